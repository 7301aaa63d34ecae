"""The state of a run at a boundary between two batches, and putting it back.

A snapshot is everything that a worker needs to go on from there: where the run is, what calls of
`main` have returned so far, weights, optimizers, schedulers, kept objects, and random numbers. It
goes to a worker that joins and, written to disk, into a checkpoint. Both are one mechanism.
"""

from __future__ import annotations

import random
import weakref
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import nn

__all__ = ["Snapshot", "capture", "random_state", "restore", "schedulers", "set_random_state"]


@dataclass
class Snapshot:
    """`loop` is the number of the `team.batches` loop that goes on, `batch` its next batch; `open`
    are other loops that are under way, with the number of batches they have given; `ends` is the
    step at which each loop before it ended. `facts` must be the same where it is put back. `logged`
    is the number of records that the log has by then, `saved` the step last saved."""

    loop: int
    batch: int
    step: int
    samples: int
    open: dict[int, int]
    ends: dict[int, int]
    records: list[Any]
    facts: dict[str, str]
    trainers: list[dict[str, Any]] = field(default_factory=list)
    schedulers: list[dict[str, Any]] = field(default_factory=list)
    kept: dict[str, Any] = field(default_factory=dict)
    random: dict[str, Any] = field(default_factory=dict)
    # For a worker that joins: the operation the team has just ended, and its generation.
    operation: int = 0
    generation: int = 0
    planning: dict[str, Any] = field(default_factory=dict)
    logged: int = 0
    saved: int = 0


def capture(model: nn.Module, optimizer: dict[str, Any]) -> dict[str, Any]:
    """All values of a model and its optimizer's state, as they are and where they are."""
    return {
        "parameters": {name: value.detach() for name, value in model.named_parameters()},
        "buffers": {name: value.detach() for name, value in model.named_buffers()},
        "optimizer": optimizer,
    }


def restore(model: nn.Module, state: dict[str, Any]) -> None:
    """Put captured values back into the same model."""
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.copy_(state["parameters"][name])
            parameter.grad = None
        for name, buffer in model.named_buffers():
            saved = state["buffers"][name]
            if buffer.shape == saved.shape and buffer.dtype == saved.dtype:
                buffer.copy_(saved)
            else:
                path, _, key = name.rpartition(".")
                setattr(model.get_submodule(path), key, saved.to(buffer.device, copy=True))


def random_state() -> dict[str, Any]:
    """Python's, NumPy's and torch's global generators."""
    state: dict[str, Any] = {
        "python": random.getstate(),
        "numpy": np.random.get_state(),
        "torch": torch.default_generator.get_state(),
    }
    if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        state["cuda"] = torch.cuda.get_rng_state()
    return state


def set_random_state(state: dict[str, Any]) -> None:
    random.setstate(state["python"])
    np.random.set_state(state["numpy"])
    torch.default_generator.set_state(state["torch"].clone())
    if "cuda" in state and torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        torch.cuda.set_rng_state(state["cuda"].clone())


# Learning-rate schedulers belong to an optimizer without its knowing. A run whose schedule started
# anew after a resume would be silently wrong, so all that are made are noted, in their order.
_made: list[weakref.ref[Any]] = []


def watch_schedulers() -> None:
    """From now on, note every scheduler that is made."""
    base = torch.optim.lr_scheduler.LRScheduler

    def __new__(cls: type, *args: Any, **kwargs: Any) -> Any:
        made: Any = object.__new__(cls)
        _made.append(weakref.ref(made))
        return made

    base.__new__ = __new__  # type: ignore[method-assign]


def schedulers(optimizers: list[torch.optim.Optimizer]) -> Iterator[Any]:
    """The schedulers of `optimizers` that are still in use, in the order they were made."""
    _made[:] = [ref for ref in _made if ref() is not None]
    for ref in list(_made):
        scheduler = ref()
        owner = getattr(scheduler, "optimizer", None)
        if any(owner is optimizer for optimizer in optimizers):
            yield scheduler
