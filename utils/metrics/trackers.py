"""Send a run's values to TensorBoard or Weights & Biases, if they are installed."""

from __future__ import annotations

import importlib
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol


class TrackerMissing(RuntimeError):
    """A tracker's package is not installed, or cannot start."""


class Tracker(Protocol):
    """Receives the values of each step in order."""

    def log(self, step: int, values: Mapping[str, float]) -> None: ...

    def flush(self) -> None: ...

    def close(self) -> None: ...


class TensorBoard:
    """Writes event files below `folder`; `tensorboard --logdir FOLDER` shows them.

    first_step: TensorBoard hides values of earlier processes from this step on.
    """

    def __init__(self, folder: Path, first_step: int) -> None:
        try:
            module = importlib.import_module("torch.utils.tensorboard")
        except ImportError as error:
            raise TrackerMissing(
                f"TensorBoard is not used: {error}. Install it: pip install tensorboard"
            ) from error
        self._writer: Any = module.SummaryWriter(str(folder), purge_step=first_step)

    def log(self, step: int, values: Mapping[str, float]) -> None:
        for name, value in values.items():
            self._writer.add_scalar(name, value, step)

    def flush(self) -> None:
        self._writer.flush()

    def close(self) -> None:
        self._writer.close()


class WeightsAndBiases:
    """Writes an offline run below `folder`; `wandb sync` uploads it. WANDB_MODE=online uploads now.

    run: id of the run; it stays the same after restarts, so that all parts form one run.
    """

    def __init__(self, folder: Path, project: str, run: str) -> None:
        try:
            wandb = importlib.import_module("wandb")
        except ImportError as error:
            raise TrackerMissing(
                f"Weights & Biases is not used: {error}. Install it: pip install wandb"
            ) from error
        try:
            self._run: Any = wandb.init(
                project=project,
                dir=str(folder),
                id=run,
                resume="allow",
                mode=os.environ.get("WANDB_MODE", "offline"),
            )
        except Exception as error:  # wandb raises many errors, and none should end a training
            raise TrackerMissing(f"Weights & Biases is not used: {error}") from error

    def log(self, step: int, values: Mapping[str, float]) -> None:
        self._run.log(dict(values), step=step)

    def flush(self) -> None:
        pass  # wandb's own process writes what it has received

    def close(self) -> None:
        self._run.finish()
