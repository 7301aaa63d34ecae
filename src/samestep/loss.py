"""The user's loss function: what it returns, how it is run, and what it must not do."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn

from samestep.errors import LossError

__all__ = [
    "Arithmetic",
    "Loss",
    "changed_weights",
    "compiled",
    "evaluating",
    "is_out_of_memory",
    "once_per_machine",
    "weighed",
]

Loss = Callable[..., torch.Tensor | tuple[torch.Tensor, torch.Tensor | float | int]]


def weighed(result: Any, samples: int) -> tuple[torch.Tensor, torch.Tensor]:
    """What a loss function returned, as (sum, weight)."""
    if isinstance(result, tuple) and len(result) == 2 and isinstance(result[0], torch.Tensor):
        total, weight = result
        if total.numel() != 1:
            raise LossError(
                f"loss: returned (sum, weight) with a sum of shape {tuple(total.shape)}; it must "
                "be one number, the sum of the weighted losses"
            )
        if not isinstance(weight, (torch.Tensor, int, float)):
            raise LossError(
                f"loss: returned (sum, weight) with {weight!r} as the weight; it must be a number, "
                "or a tensor of weights, which is added up"
            )
        weight = torch.as_tensor(weight).detach().to(total.device, torch.float64)
        return total.reshape(()), weight.sum()
    if isinstance(result, tuple) and len(result) == 2 and isinstance(result[1], torch.Tensor):
        raise LossError(
            f"loss: returned a tuple whose first part is {type(result[0]).__name__}; it must be "
            "(sum, weight), in this order, and the sum a tensor"
        )
    if not isinstance(result, torch.Tensor):
        raise LossError(
            f"loss: returned {type(result).__name__}; it must return a tensor with one loss per "
            "example, or (sum, weight)"
        )
    if result.dim() == 0:
        raise LossError(
            f"loss: returned one number for a lane of {samples} examples, so its weight is not "
            'known; return one loss per example (reduction="none"), or (sum, weight)'
        )
    losses = result if result.dtype == torch.float64 else result.float()
    weight = torch.tensor(losses.numel(), dtype=torch.float64, device=losses.device)
    return losses.sum(), weight


def compiled(loss: Loss) -> Loss:
    """Each shape gets code of its own, so what a lane gives cannot depend on which were seen."""
    import torch._dynamo

    # Beyond the limit torch would silently run the rest uncompiled, with other bits.
    torch._dynamo.config.recompile_limit = 1024
    torch._dynamo.config.fail_on_recompile_limit_hit = True
    made: Loss = torch.compile(loss, dynamic=False)
    return made


@contextlib.contextmanager
def once_per_machine(cores: Sequence[int]) -> Iterator[None]:
    """For what may have to be compiled: one worker does it, on all `cores`, and the others find its
    code in the compiler's cache. The kernel takes the lock from who dies."""
    import fcntl

    from torch._inductor.runtime.cache_dir_utils import cache_dir

    pins = os.sched_getaffinity(0) if cores and hasattr(os, "sched_getaffinity") else None
    with open(Path(cache_dir()) / "samestep.lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if pins is not None:
            os.sched_setaffinity(0, cores)
        try:
            yield
        finally:
            if pins is not None:
                os.sched_setaffinity(0, pins)


class Arithmetic:
    """The precision and the kernels that lanes run with."""

    def __init__(self, device: torch.device, precision: str, exact: bool) -> None:
        self._device, self._precision, self._exact = device, precision, exact

    def autocast(self) -> contextlib.AbstractContextManager[Any]:
        if self._precision == "fp32":
            return contextlib.nullcontext()
        return torch.autocast(self._device.type, dtype=torch.bfloat16)

    def deterministic_kernels(self) -> contextlib.AbstractContextManager[Any]:
        """Of attention's implementations on a GPU, the one whose sums have a fixed order."""
        if self._device.type == "cpu" or not self._exact:
            return contextlib.nullcontext()
        from torch.nn.attention import SDPBackend, sdpa_kernel

        return sdpa_kernel(SDPBackend.MATH)


@contextlib.contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """Evaluation mode, and back to each module's own mode."""
    modes = [(module, module.training) for module in model.modules()]
    model.eval()
    try:
        yield
    finally:
        for module, training in modes:
            module.training = training


def changed_weights(model: nn.Module, versions: list[int]) -> str:
    named = zip(model.named_parameters(), versions, strict=True)
    name = next(name for (name, parameter), before in named if parameter._version != before)
    return (
        f"loss: running it changed the parameter {name!r} in place, so a lane's result would "
        "depend on the lanes before it; change weights between steps, or keep what changes in a "
        "buffer (an embedding's max_norm does this; normalise in the forward pass instead)"
    )


def is_out_of_memory(error: Exception) -> bool:
    """torch has a class for it on GPUs; on the CPU it is a RuntimeError that says so."""
    return isinstance(error, (MemoryError, torch.OutOfMemoryError)) or (
        isinstance(error, RuntimeError) and "can't allocate memory" in str(error)
    )
