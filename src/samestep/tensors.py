"""`Tensors`: a dataset of tensors, held once per machine and indexed in bulk."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils.data import Dataset

from samestep.errors import UsageError

Transform = Callable[..., tuple[Any, ...]]

# Set in a worker: exchanges a tensor for one in memory that all workers share.
_share: Callable[[torch.Tensor], torch.Tensor] | None = None
_SHARED_FROM_BYTES = 1 << 20


def share_with(share: Callable[[torch.Tensor], torch.Tensor] | None) -> None:
    """Make every `Tensors` built from now on hold its data in shared memory."""
    global _share
    _share = share


class Tensors(Dataset[tuple[Any, ...]]):
    """Samples from tensors of equal length: `Tensors(images, labels)`.

    `transform(*fields)` is applied to a whole lane at once, after indexing: for example turning
    bytes into floats. The tensors must not be changed afterwards; all workers share them. `cost`
    is one number for each sample, where these differ in what they cost (the number of its tokens,
    say): then like samples share a lane, and lanes are shared out by cost.

    >>> len(Tensors(torch.zeros(5, 2), torch.zeros(5)))
    5
    """

    def __init__(self, *fields: Any, transform: Transform | None = None, cost: Any = None) -> None:
        if not fields:
            raise UsageError("Tensors: needs at least one tensor, for example Tensors(x, y)")
        tensors = [torch.as_tensor(item).detach() for item in fields]
        lengths = [len(t) if t.dim() else 0 for t in tensors]
        if len(set(lengths)) > 1:
            raise UsageError(
                f"Tensors: the lengths must be equal, got {', '.join(map(str, lengths))}"
            )
        self.fields = tuple(_hold(tensor) for tensor in tensors)
        self.transform = transform
        costs = None if cost is None else torch.as_tensor(cost)
        if costs is not None and costs.shape != (len(self),):
            raise UsageError(
                f"Tensors: cost must be one number for each of the {len(self)} samples, got the "
                f"shape {tuple(costs.shape)}"
            )
        self.cost: Callable[[int], float] | None = None if costs is None else _Costs(costs)

    def __len__(self) -> int:
        return len(self.fields[0])

    def __getitem__(self, index: int) -> tuple[Any, ...]:
        if not -len(self) <= index < len(self):
            raise IndexError(f"sample {index} of {len(self)}")
        fields = self.gather(torch.tensor([index % len(self)]))
        return tuple(item[0] for item in fields)

    def gather(self, indices: torch.Tensor) -> tuple[Any, ...]:
        """The samples at `indices`, each field as one tensor."""
        fields = tuple(item.index_select(0, indices.to(item.device)) for item in self.fields)
        return fields if self.transform is None else tuple(self.transform(*fields))

    @property
    def draws(self) -> bool:
        """Whether its transform may draw random numbers. One with `draws = False` says it does
        not, and saves the time that setting the generators for it takes."""
        return self.transform is not None and getattr(self.transform, "draws", True)

    def first(self, count: int) -> Tensors:
        """The first `count` samples; no data is copied."""
        part = Tensors.__new__(Tensors)
        part.fields, part.transform = tuple(f[:count] for f in self.fields), self.transform
        part.cost = self.cost
        return part


@dataclass(frozen=True)
class _Costs:
    """What each sample costs."""

    values: torch.Tensor

    def __call__(self, index: int) -> float:
        return float(self.values[index])


def _hold(tensor: torch.Tensor) -> torch.Tensor:
    large = tensor.device.type == "cpu" and tensor.nbytes >= _SHARED_FROM_BYTES
    return _share(tensor) if _share is not None and large else tensor
