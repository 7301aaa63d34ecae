"""Do not import torch's compiler before anything is compiled.

Making a `torch.optim` optimizer, and its first step, import `torch._dynamo`, only to tell it what
not to trace: 1.0 s in each worker (measured with torch 2.13 on one core). Until someone imports
dynamo because they want it, nothing can be traced, so here it is left out until then; from then on
torch's own code runs. Where torch is written differently nothing is changed.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from typing import Any

import torch

_MARK = "__dynamo_disable"  # where torch._compile keeps a method that is not to be traced
_GRAD_WRAPPER = "_use_grad"  # what torch.optim calls the wrapper around every `step`


def install() -> None:
    """In the fork server, before any optimizer is made."""
    for method in vars(torch.optim.Optimizer).values():
        plain = getattr(method, "__wrapped__", None)
        if plain is not None and not hasattr(plain, _MARK):
            setattr(plain, _MARK, _late_mark(plain, method))
    for kind in vars(torch.optim).values():
        if isinstance(kind, type) and issubclass(kind, torch.optim.Optimizer):
            step = vars(kind).get("step")
            code = getattr(step, "__code__", None)
            if code is not None and code.co_name == _GRAD_WRAPPER:
                kind.step = _late_step(step)  # type: ignore[method-assign]


def _late_mark(plain: Callable[..., Any], method: Callable[..., Any]) -> Callable[..., Any]:
    def call(*args: Any, **kwargs: Any) -> Any:
        if "torch._dynamo" not in sys.modules:
            return plain(*args, **kwargs)
        if getattr(plain, _MARK, None) is call:
            delattr(plain, _MARK)  # torch then makes the mark itself
        return method(*args, **kwargs)

    return call


def _late_step(step: Any) -> Callable[..., Any]:
    @functools.wraps(step.__wrapped__)
    def call(self: torch.optim.Optimizer, *args: Any, **kwargs: Any) -> Any:
        if "torch._dynamo" in sys.modules:
            return step(self, *args, **kwargs)
        with torch.set_grad_enabled(self.defaults["differentiable"]):
            return step.__wrapped__(self, *args, **kwargs)

    return call
