"""Metrics: exact counts over every sample of a dataset, once.

A metric counts what it needs in one chunk and turns the total into a value. Counts are added in
float64 (whole numbers exactly, up to 2**53) through the same tree as gradients, so a metric has the
same bits on any number of devices.

    class MeanAbsoluteError(ss.metrics.Metric):
        def count(self, outputs, targets):
            return torch.stack([(outputs - targets).abs().sum(), torch.tensor(targets.numel())])

        def value(self, total):
            return (total[0] / total[1]).item()
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch

from samestep.errors import UsageError

__all__ = ["Metric", "accuracy", "confusion_matrix", "mean_loss", "top_k"]


@dataclass
class Seen:
    """One chunk, as the model sees it. The last field is the target, the others are inputs."""

    model: Callable[..., Any]
    loss: Callable[..., tuple[torch.Tensor, torch.Tensor]]
    fields: tuple[Any, ...]

    @cached_property
    def outputs(self) -> Any:
        inputs = self.fields[:-1] if len(self.fields) > 1 else self.fields
        return self.model(*inputs)

    @property
    def targets(self) -> Any:
        return self.fields[-1]

    @cached_property
    def loss_and_weight(self) -> tuple[torch.Tensor, torch.Tensor]:
        return self.loss(self.model, *self.fields)


class Metric:
    """Subclass it with `count` and `value`; see the module's example."""

    def count(self, outputs: Any, targets: Any) -> torch.Tensor:
        """What one chunk adds to the total: a tensor whose shape is the same for every chunk."""
        raise NotImplementedError

    def value(self, total: torch.Tensor) -> Any:
        """The result, from the sum (float64) of all counts."""
        raise NotImplementedError

    def measure(self, seen: Seen) -> torch.Tensor:
        """`count` on the model's outputs; override it to look at more than these."""
        return self.count(seen.outputs, seen.targets)


class _TopK(Metric):
    """The share of samples whose target is among the `k` largest outputs."""

    def __init__(self, k: int) -> None:
        if k < 1:
            raise UsageError(f"top_k: k must be at least 1, got {k}")
        self.k = k

    def count(self, outputs: Any, targets: Any) -> torch.Tensor:
        if self.k > outputs.shape[-1]:
            raise UsageError(f"top_k: k={self.k}, but there are only {outputs.shape[-1]} classes")
        if self.k == 1:
            right = outputs.argmax(-1) == targets
        else:
            right = (outputs.topk(self.k, dim=-1).indices == targets.unsqueeze(-1)).any(-1)
        return torch.stack([right.sum(), torch.tensor(right.numel(), device=right.device)])

    def value(self, total: torch.Tensor) -> float:
        return (total[0] / total[1]).item()


class _MeanLoss(Metric):
    """The trainer's loss, averaged as in training."""

    def measure(self, seen: Seen) -> torch.Tensor:
        loss, weight = seen.loss_and_weight
        return torch.stack([loss.double(), weight.double()])

    def value(self, total: torch.Tensor) -> float:
        return (total[0] / total[1]).item()


class _ConfusionMatrix(Metric):
    def __init__(self, classes: int) -> None:
        self.classes = classes

    def count(self, outputs: Any, targets: Any) -> torch.Tensor:
        pairs = targets.flatten() * self.classes + outputs.argmax(-1).flatten()
        counts = torch.bincount(pairs.cpu(), minlength=self.classes**2)
        if len(counts) > self.classes**2:
            raise UsageError(f"confusion_matrix: a class is beyond classes={self.classes}")
        return counts.view(self.classes, self.classes)

    def value(self, total: torch.Tensor) -> torch.Tensor:
        return total.to(torch.int64)


accuracy: Metric = _TopK(1)
"""The share of samples whose largest output is the target."""

mean_loss: Metric = _MeanLoss()
"""The trainer's loss, averaged as in training."""


def top_k(k: int) -> Metric:
    """The share of samples whose target is among the `k` largest outputs."""
    return _TopK(k)


def confusion_matrix(classes: int) -> Metric:
    """Counts as an integer tensor: row the target, column the prediction."""
    return _ConfusionMatrix(classes)
