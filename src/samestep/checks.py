"""What a trainer is given: refused where it cannot be right, with what would be."""

from __future__ import annotations

import inspect
from typing import Any

import torch
from torch import nn

from samestep.errors import OptimizerError, UsageError

__all__ = ["check_model", "check_optimizer"]


def check_model(model: Any, optimizer: Any, loss: Any) -> None:
    if not isinstance(model, nn.Module):
        raise UsageError(
            f"model: must be a torch.nn.Module, got {type(model).__name__}; several go into a "
            "torch.nn.ModuleDict"
        )
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise OptimizerError(
            f"optimizer: must be a torch.optim.Optimizer, got {type(optimizer).__name__}"
        )
    if not callable(loss):
        raise UsageError(f"loss: must be a function loss(model, *fields), got {loss!r}")
    known = {id(parameter) for parameter in model.parameters()}
    strangers = [
        parameter
        for group in optimizer.param_groups
        for parameter in group["params"]
        if id(parameter) not in known
    ]
    if strangers:
        raise OptimizerError(
            f"optimizer: holds {len(strangers)} parameters that are not the model's, the first of "
            f"shape {tuple(strangers[0].shape)}; make the optimizer from model.parameters() of "
            "the model you pass"
        )


def check_optimizer(optimizer: torch.optim.Optimizer) -> None:
    name = type(optimizer).__name__
    closure = inspect.signature(type(optimizer).step).parameters.get("closure")
    if closure is not None and closure.default is inspect.Parameter.empty:
        raise OptimizerError(
            f"optimizer: {name} calls the loss again by itself (a closure), so a step is not one "
            "backward pass; use one that does not, such as torch.optim.AdamW"
        )
    if isinstance(optimizer, torch.optim.SparseAdam):
        raise OptimizerError(
            f"optimizer: {name} needs sparse gradients, which have no fixed layout; use "
            "torch.optim.Adam and sparse=False"
        )
