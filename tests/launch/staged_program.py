"""A training that starts processes of its own, for launches with --stage.

staged_program.py [spawn | forkserver | fork | workers-fork | workers-spawn | workers-forkserver | compile ...]

Of each word, a process makes the inputs by that method, or is the worker of a DataLoader; "compile" compiles the
model. Each rank prints its loss after each step with all digits, and from where its processes have imported torch.
"""
from __future__ import annotations

import multiprocessing
import sys

import torch
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset

STEPS = 3


class Inputs(Dataset[tuple[torch.Tensor, str]]):
    def __len__(self) -> int:
        return 8 * STEPS

    def __getitem__(self, number: int) -> tuple[torch.Tensor, str]:
        return draw(number), torch.__file__


def draw(number: int) -> torch.Tensor:
    return torch.rand(16, generator=torch.Generator().manual_seed(number))


def draw_list(number: int) -> tuple[list[float], str]:
    return draw(number).tolist(), torch.__file__


def batches(method: str) -> list[tuple[torch.Tensor, list[str]]]:
    if method.startswith("workers-"):
        start = method.partition("-")[2]
        return list(DataLoader(Inputs(), 8, num_workers=1, multiprocessing_context=start))
    with multiprocessing.get_context(method).Pool(1) as pool:
        rows, files = zip(*pool.map(draw_list, range(8 * STEPS)), strict=True)
    return [(torch.tensor(rows[8 * step:8 * step + 8]), list(files)) for step in range(STEPS)]


def main() -> None:
    from ddpkit import setup_distributed  # not in the processes that this one starts

    methods = [word for word in sys.argv[1:] if word != "compile"] or ["fork"]
    with setup_distributed("gloo") as dist:
        torch.manual_seed(7)
        net: torch.nn.Module = torch.nn.Sequential(torch.nn.Linear(16, 32), torch.nn.Tanh(), torch.nn.Linear(32, 1))
        model = DistributedDataParallel(torch.compile(net) if "compile" in sys.argv else net)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        files = {torch.__file__}
        for method in methods:
            for inputs, of_workers in batches(method):
                files.update(of_workers)
                loss = (model(inputs + dist.rank) - 1).square().mean()
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
                sys.stdout.write(f"rank {dist.rank} {method} loss {loss.item().hex()}\n")  # in one call: ranks share it
        sys.stdout.write(f"rank {dist.rank} torch of all its processes: {' '.join(sorted(files))}\n")


if __name__ == "__main__":
    main()
