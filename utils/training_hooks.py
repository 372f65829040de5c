"""Hooks on optimizers and data loaders; consistency/ is loaded when a script uses one of these.

A process has hooks only between setup_distributed() and close(). These are the fewest hooks that
show what a training does. torch calls two of them before and after the step of any optimizer, and
one when a model is wrapped in DistributedDataParallel. torch has no hook for loaders, so
DataLoader.__iter__ and the __next__ of its iterators are wrapped.
"""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.distributed import Store  # type: ignore[attr-defined]
from torch.nn.modules.module import register_module_module_registration_hook
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer
from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)
from torch.utils.data import DataLoader
from torch.utils.data.dataloader import _BaseDataLoaderIter

if TYPE_CHECKING:
    from .consistency.training_watch import TrainingWatch

_original_iter, _original_next = DataLoader.__iter__, _BaseDataLoaderIter.__next__


class TrainingError(RuntimeError):
    """The training goes wrong, and check_training="error" ends it."""


class TrainingHooks:
    """The hooks of this process. They report the main thread's training to a TrainingWatch."""

    def __init__(self, rank: int, world_size: int, store: Store, *, raises: bool = False) -> None:
        """Set the hooks. store: shared by all ranks. raises: TrainingError after a problem."""
        self._raises = raises
        self._rank, self._world_size, self._store = rank, world_size, store
        self._watch: TrainingWatch | None = None
        self._models: weakref.WeakSet[DistributedDataParallel] = weakref.WeakSet()
        self._handles = [
            register_optimizer_step_pre_hook(self._begin_step),
            register_optimizer_step_post_hook(self._stepped),
            register_module_module_registration_hook(self._registered),
        ]
        hooks = self

        def iterate(loader: DataLoader[Any]) -> Any:
            iterator = _original_iter(loader)
            hooks.watch.begin_epoch(loader, iterator)
            return iterator

        def advance(iterator: _BaseDataLoaderIter) -> Any:
            batch = _original_next(iterator)
            if hooks._watch is not None:
                hooks._watch.iterator = weakref.ref(iterator)  # the last reference ends its workers
                if hooks._watch.epochs:
                    hooks._watch.first_batch(iterator, batch)
            return batch

        DataLoader.__iter__ = iterate  # type: ignore[method-assign]
        _BaseDataLoaderIter.__next__ = advance  # type: ignore

    @property
    def watch(self) -> TrainingWatch:
        """The comparison of this rank's training with the other ranks'; created on first use."""
        if self._watch is None:
            from .consistency.training_watch import TrainingWatch
            from .coordination import StoreCommunicator

            communicator = None
            if self._world_size > 1:
                # A separate connection: it need not wait while the script waits in its store.
                store = self._store.clone()  # type: ignore[attr-defined, unused-ignore]
                communicator = StoreCommunicator("training", self._rank, self._world_size, store)
            self._watch = TrainingWatch(communicator, self._models)
        return self._watch

    def _registered(self, module: nn.Module, name: str, child: nn.Module | None) -> None:
        if isinstance(module, DistributedDataParallel):
            self._models.add(module)

    def _begin_step(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        if self._watch is not None and not torch.compiler.is_compiling():
            self._watch.begin_step(optimizer)

    def _stepped(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        if not torch.compiler.is_compiling():
            self.watch.stepped(optimizer)
            self._check_problem()

    def _check_problem(self) -> None:
        if self._raises and self._watch is not None and self._watch.problem:
            raise TrainingError(self._watch.problem)

    def close(self, *, orderly: bool = True) -> None:
        """Remove the hooks, and end the comparison; a second call does nothing.

        orderly: whether the other ranks close, too.
        """
        for handle in self._handles:
            handle.remove()
        DataLoader.__iter__ = _original_iter  # type: ignore[method-assign]
        _BaseDataLoaderIter.__next__ = _original_next  # type: ignore[method-assign]
        if self._watch is not None:
            self._watch.close(orderly=orderly)
            if orderly:
                self._check_problem()
