"""Trainings with and without --stage: the same bits, no opened file of the shared packages, nothing left after kills.

python tests/faults/staged.py [--scripts 01 03 ...] [--nanogpt FOLDER] [--lightning PYTHON] [--trace]
python tests/faults/staged.py --kills 40

Two ranks, gloo. Each training runs without --stage and with a kept copy. Its ranks print a hash of all parameters
after each step, or their losses with all digits. Prints a table: script, steps that were compared, whether all are
identical. --nanogpt: the folder of a clone, whose train.py runs as it is, on each rank alone: with DDP it needs CUDA.
--lightning: the Python of an environment with Lightning. --trace: strace follows each process of the launch with
--stage; the column "opened" has how many files below the shared packages the ranks, and what they started, have opened,
then how many files in all.

--kills: launches with --stage are killed 0.2 to 15 s after they start: the launch alone, all its processes at once, or
by SIGTERM. Before every second one the kept copy is removed, and before some the archive, too. After each kill, no
process may be left; the next launch has to work from a copy, and to leave no file but the kept copy and the archive.
Exit status 0 if all is right.
"""
from __future__ import annotations

import argparse
import hashlib
import math
import os
import pickle
import random
import re
import runpy
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
WATCH = [str(Path(__file__).resolve()), "--watch"]
OWN = [str(ROOT / "tests" / "launch" / "staged_program.py")]
LAUNCH = [sys.executable, str(ROOT / "scripts" / "launch.py"), "-n", "2"]
SMALL = ["--layers", "1", "--heads", "2", "--width", "32", "--context", "32"]
SCRIPTS = {
    "01": [*WATCH, "examples/01_ddp_minimal.py", "--epochs", "1", "--backend", "gloo"],
    "03": [*WATCH, "examples/03_text_lm.py", *SMALL, "--text", str(ROOT / "README.md"), "--steps", "8", "--eval-every",
           "50", "--sample", "0", "--backend", "gloo"],
    "05": [*WATCH, "examples/05_survive.py", "--epochs", "1", "--backend", "gloo", "--folder", "FOLDER"],
    "07": [*WATCH, "examples/07_fsdp.py", *SMALL, "--steps", "6", "--checkpoints", "FOLDER"],
    "processes": [*OWN, "fork", "spawn", "forkserver"],
    "workers": [*OWN, "workers-fork", "workers-spawn", "workers-forkserver"],
    "compile": [*OWN, "compile"],
}
NANOGPT = ["--device=cpu", "--backend=gloo", "--compile=False", "--dtype=float32", "--dataset=text", "--n_layer=2",
           "--n_head=2", "--n_embd=64", "--block_size=32", "--batch_size=4", "--gradient_accumulation_steps=4",
           "--max_iters=6", "--eval_iters=2", "--eval_interval=100", "--log_interval=1", "--out_dir=FOLDER"]
LIGHTNING = """\
import lightning, torch
from torch.utils.data import DataLoader, TensorDataset

class Model(lightning.LightningModule):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(16, 1)
    def training_step(self, batch):
        return (self.layer(batch[0]) - 1).square().mean()
    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=0.01)

lightning.seed_everything(7)
data = DataLoader(TensorDataset(torch.rand(96, 16)), 8, shuffle=True, num_workers=2)
lightning.Trainer(accelerator="cpu", devices=2, strategy="ddp", max_epochs=2, logger=False, enable_checkpointing=False,
                  enable_progress_bar=False).fit(Model(), data)
"""
SECONDS = 600.0


def watch(script: str, arguments: list[str], *, alone: bool) -> None:
    """Run a script; print a hash of the parameters after each step of an optimizer. alone: not as a rank."""
    import torch
    from torch.optim.optimizer import register_optimizer_step_post_hook

    steps, rank = 0, os.environ["RANK"]
    if alone:
        del os.environ["RANK"]

    def after_step(optimizer: torch.optim.Optimizer, *_: object) -> None:
        nonlocal steps
        digest, steps = hashlib.sha256(), steps + 1
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                local = getattr(parameter, "to_local", lambda value=parameter: value)()
                digest.update(local.detach().contiguous().view(torch.uint8).numpy().tobytes())
        sys.stdout.write(f"rank {rank} step {steps} {digest.hexdigest()}\n")  # at once: print() would write twice
        sys.stdout.flush()

    register_optimizer_step_post_hook(after_step)
    sys.argv = [script, *arguments]
    sys.path[0] = str(Path(script).parent)
    runpy.run_path(script, run_name="__main__")


def compared(output: str) -> list[str]:
    """Return what has to be the same with and without --stage. A rank may print it within a line of another."""
    return sorted(re.findall(r"rank \d+ (?:step \d+ [0-9a-f]{64}|\S+ loss \S+)", output))


def packages_of(python: str) -> str:
    code = "import os, sysconfig; print(os.path.realpath(sysconfig.get_path('purelib')))"
    return subprocess.run([python, "-c", code], capture_output=True, text=True, check=True).stdout.strip()


def opened_files(trace: Path, packages: str, root: str) -> tuple[set[str], int]:
    """Return which files below the shared packages the ranks have opened, and how many files they have opened.

    The ranks are the processes that have become the Python of the copy, and all that these have started. strace shows
    to which file a descriptor leads: not to a link.
    """
    lines = [line.partition(" ") for line in trace.read_text(errors="replace").splitlines()]
    ranks, is_rank = {pid for pid, _, call in lines if f'execve("{root}' in call}, set()
    started = [(pid, found[1]) for pid, _, call in lines
               if (found := re.search(r"(?:clone|clone3|fork|vfork)(?:\(.*| resumed>.*)= (\d+)$", call))]
    while new := {child for parent, child in started if parent in ranks} - ranks:
        ranks |= new
        is_rank |= new  # from its first line, which may be there before that of its start
    shared, count = set(), 0
    for pid, _, call in lines:
        if f'execve("{root}' in call:
            is_rank.add(pid)
        opened = re.search(r"open(?:at)?(?:\(.*| resumed>.*)= \d+<(.*)>$", call)
        if opened and pid in is_rank:
            count += 1
            if opened[1].startswith(f"{packages}/"):
                shared.add(opened[1])
    return shared, count


class Trainings:
    """The scripts, and how each is launched."""

    def __init__(self, folder: Path, args: argparse.Namespace) -> None:
        self.folder, self.disk = folder, folder / "disk"
        self.disk.mkdir()
        self.scripts = {name: (sys.executable, words, ROOT) for name, words in SCRIPTS.items()}
        if args.nanogpt:
            work = folder / "nanogpt"
            shutil.copytree(args.nanogpt, work, ignore=shutil.ignore_patterns(".git", "assets", "*.ipynb"))
            self.write_data(work / "data" / "text")
            words = [WATCH[0], "--watch-alone", str(work / "train.py"), *NANOGPT]
            self.scripts["nanoGPT"] = (sys.executable, words, work)
        if args.lightning:
            (folder / "train.py").write_text(LIGHTNING)
            self.scripts["Lightning"] = (args.lightning, [*WATCH, str(folder / "train.py")], folder)

    @staticmethod
    def write_data(data: Path) -> None:
        import numpy

        data.mkdir()
        tokens = numpy.frombuffer((ROOT / "README.md").read_bytes(), dtype=numpy.uint8).astype(numpy.uint16)
        for name in ("train.bin", "val.bin"):
            tokens.tofile(data / name)
        (data / "meta.pkl").write_bytes(pickle.dumps({"vocab_size": 256}))

    def launch(self, name: str, stage: bool, trace: Path | None = None) -> str:
        python, words, work = self.scripts[name]
        output = tempfile.mkdtemp(dir=self.folder)
        words = [word.replace("FOLDER", output) for word in words]
        # Where caches would be shared by both sides, the second one would compile nothing.
        environ = {**os.environ, "OMP_NUM_THREADS": "1", "TORCHINDUCTOR_CACHE_DIR": f"{output}/inductor"}
        options = ["--stage", "--stage-dir", str(self.disk)] if stage else ["--no-stage"]
        calls = "trace=open,openat,execve,clone,clone3,fork,vfork"
        strace = ["strace", "-f", "--seccomp-bpf", "-y", "-qq", "-e", calls, "-o", str(trace)] if trace else []
        done = subprocess.run([*strace, *LAUNCH, "--python", python, *options, *words], cwd=work, env=environ,
                              stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=SECONDS)
        if done.returncode or "warning: the packages" in done.stdout or "are not staged" in done.stdout:
            raise RuntimeError(f"{name}, stage {stage}: exit status {done.returncode}\n{done.stdout}")
        return done.stdout


def compare(folder: Path, args: argparse.Namespace) -> int:
    trainings, wrong = Trainings(folder, args), 0
    print(f"{'script':12}{'without':>9}{'with':>9}  identical{'  opened' * args.trace}")
    for name in args.scripts or trainings.scripts:
        python = trainings.scripts[name][0]
        try:
            without = compared(trainings.launch(name, False))
            kept = compared(trainings.launch(name, True)) if args.trace else []  # the copy is kept from here on
            trace = folder / "trace" if args.trace else None
            output = trainings.launch(name, True, trace)
        except RuntimeError as error:
            print(f"{name:12}FAILED", flush=True)
            print(error, file=sys.stderr, flush=True)
            wrong += 1
            continue
        staged = compared(output)
        same = bool(without) and without == staged and (not args.trace or kept == staged)
        line = f"{name:12}{len(without):9}{len(staged):9}  {'yes' if same else 'NO':9}"
        if trace:
            shared, count = opened_files(trace, packages_of(python), f"{trainings.disk}/ddpkit-stage-")
            line += f"{len(shared):8} of {count}"
            for path in sorted(shared)[:10]:
                print(path, file=sys.stderr)
            same = same and not shared and count > 100
        print(line, flush=True)
        wrong += not same
    return int(bool(wrong))


# Kills ----------------------------------------------------------------------------------------------------------------


def processes_of(mark: str) -> dict[int, str]:
    """Return the processes, by id, that have this text in their environment: those of a launch, and their command."""
    found = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit() and int(entry.name) != os.getpid():
            try:
                if mark.encode() in (entry / "environ").read_bytes():
                    found[int(entry.name)] = (entry / "cmdline").read_bytes().replace(b"\0", b" ").decode()[:100]
            except OSError:
                continue
    return found


def kill_launches(folder: Path, kills: int) -> int:
    python, disk = make_environment(folder), folder / "disk"
    disk.mkdir()
    archives = folder / "env" / ".ddpkit-stage"
    root = disk / f"ddpkit-stage-{os.geteuid()}"
    (folder / "program.py").write_text(KILLED_PROGRAM)
    words = [*LAUNCH, "--python", python, "--stage", "--stage-dir", str(disk), str(folder / "program.py")]
    wrong = 0
    for number in range(kills):
        removed = ""
        if number % 2:
            shutil.rmtree(root, ignore_errors=True)
            removed = "copy"
            if number % 4 == 3:
                shutil.rmtree(archives, ignore_errors=True)
                removed = "copy and archive"
        how = random.choice(("launch", "all", "SIGTERM"))
        at = math.exp(random.uniform(math.log(0.2), math.log(4 if "archive" in removed else 15)))  # packing is short
        mark = f"STAGED_KILL={folder.name}-{number}"
        environ = {**os.environ, "STAGED_KILL": mark.partition("=")[2], "OMP_NUM_THREADS": "1"}
        with (folder / "output").open("w") as file:
            launch = subprocess.Popen([*words, "60"], env=environ, stdout=file, stderr=file, start_new_session=True)
            time.sleep(at)
            found = "" if launch.poll() is None else "ended by itself before the kill"
            phase = phase_of(archives, root)
            if how == "SIGTERM":
                launch.terminate()
            else:
                for pid in processes_of(mark) if how == "all" else (launch.pid,):
                    try:
                        os.kill(pid, signal.SIGKILL)
                    except ProcessLookupError:
                        continue
            launch.wait(60)
            limit = time.monotonic() + 30
            while (left := processes_of(mark)) and time.monotonic() < limit:
                time.sleep(0.1)
        if left:
            found += f" processes left: {left}"
        done = subprocess.run([*words, "0"], env=environ, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
                              timeout=SECONDS)
        if done.returncode or done.stdout.count(f"imported {root}") != 2 or "warning" in done.stdout:
            found += f" the next launch: exit status {done.returncode}\n{done.stdout}"
        odd = [path.name for path in root.glob("*") if not re.fullmatch(r"[0-9a-f]{24}(\.lock|\.used)?", path.name)]
        odd += [path.name for path in disk.iterdir() if path != root]
        odd += [path.name for path in archives.glob("*")
                if not re.fullmatch(r"[0-9a-f]{24}\.(tar|json|lock|index)", path.name)]
        if odd:
            found += f" left: {odd}"
        wrong += bool(found)
        print(f"{number + 1:3} {at:5.1f} s, {how:8} {phase:12} {f'without {removed}' if removed else '':24} "
              f"{f'WRONG {found}' if found else 'right'}", flush=True)
    print(f"{kills - wrong} of {kills} right")
    return int(bool(wrong))


KILLED_PROGRAM = """\
import sys, time
import package0
sys.stdout.write(f"imported {package0.__file__}\\n")
sys.stdout.flush()
time.sleep(float(sys.argv[1]))
"""


def phase_of(archives: Path, root: Path) -> str:
    """Return what a launch with --stage does at this moment."""
    if list(archives.glob(".*-*/tar")):
        return "packing"
    if list(root.glob("*-*")):
        return "unpacking"
    return "running" if list(root.glob("*/.ddpkit-complete")) else "before"


def make_environment(folder: Path) -> str:
    """Make an environment with packages that take some seconds to pack and to unpack; return its Python."""
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(folder / "env")], check=True)
    packages = Path(packages_of(str(folder / "env" / "bin" / "python")))
    content = os.urandom(1000) * 20
    for name in ("torch", *(f"package{number}" for number in range(100))):
        package = packages / name
        package.mkdir()
        (package / "__init__.py").write_text("")
        for file in range(150):
            (package / f"data{file}").write_bytes(content)
    return str(folder / "env" / "bin" / "python")


def main() -> int:
    if sys.argv[1:2] in (["--watch"], ["--watch-alone"]):
        watch(sys.argv[2], sys.argv[3:], alone=sys.argv[1] == "--watch-alone")
        return 0
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--scripts", nargs="+", metavar="NAME", help="some of them")
    parser.add_argument("--nanogpt", type=Path, metavar="FOLDER")
    parser.add_argument("--lightning", metavar="PYTHON")
    parser.add_argument("--trace", action="store_true")
    parser.add_argument("--kills", type=int, metavar="N")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="staged-") as name:
        return kill_launches(Path(name), args.kills) if args.kills else compare(Path(name), args)


if __name__ == "__main__":
    sys.exit(main())
