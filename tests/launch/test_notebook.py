"""A notebook trains as a single process, and starts several ranks by `!ddpkit launch`."""
from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

nbclient = pytest.importorskip("nbclient")
pytest.importorskip("ipykernel")

TRAIN = """\
import torch
from ddpkit import setup_distributed
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

with setup_distributed("gloo") as job:
    data = TensorDataset(torch.ones(64, 4))
    loader = DataLoader(data, batch_size=16, sampler=DistributedSampler(data, job.world_size, job.rank))
    ddp = DDP(torch.nn.Linear(4, 1))
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1)
    for (x,) in loader:
        loss = ddp(x).square().mean()
        loss.backward()
        optimizer.step()
    print("mean loss", job.all_reduce_mean(loss).item() < 10)
"""
LAUNCHED = """\
from ddpkit import setup_distributed

with setup_distributed("gloo") as job:
    mean = job.all_reduce_mean(float(job.rank))
    if job.is_main:
        print("mean rank", mean)
"""


def test_cells_train_twice_and_launch_two_ranks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A second training in the same process, as somebody has who runs a cell again, and a program by its file."""
    monkeypatch.setenv("PATH", f"{Path(sys.executable).parent}:{os.environ['PATH']}")  # of the activated environment
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    (tmp_path / "train.py").write_text(LAUNCHED)
    cells = [TRAIN, TRAIN, "!ddpkit launch -n 2 train.py", "print(_exit_code)",
             "with setup_distributed('gloo'):\n    raise ValueError('bad batch')", "print('the kernel lives')"]
    outputs = run(cells, tmp_path)
    for output in outputs[:2]:
        assert "1 rank on 1 host, started without a launcher, backend gloo" in output and "mean loss True" in output
    assert "2 ranks on 1 host, started by ddpkit launch, backend gloo" in outputs[2], outputs[2]
    assert "mean rank 0.5" in outputs[2] and outputs[3] == "0\n", outputs[2:4]
    assert "ValueError: bad batch" in outputs[4] and outputs[5] == "the kernel lives\n", outputs[4:]


def run(cells: list[str], folder: Path) -> list[str]:
    """Run the cells in a new kernel in this folder; return what each has shown."""
    import nbformat

    notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(cell) for cell in cells])
    nbclient.NotebookClient(notebook, timeout=120, kernel_name="python3", allow_errors=True,
                            resources={"metadata": {"path": str(folder)}}).execute()
    return ["".join(output.get("text", "") or f"{output.get('ename')}: {output.get('evalue')}\n"
                    for output in cell.outputs) for cell in notebook.cells]
