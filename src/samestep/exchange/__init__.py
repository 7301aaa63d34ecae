"""The exchange: the tree sum of all lanes' results, handed to every worker.

Work is divided by elements. Each worker has written its nodes; worker j adds slice j of all nodes
in tree order; everyone reads the whole:

    worker 0   [ node 0-3 ]─┐ slice 0 ─▶ add ─┐
                            ╳                 ├─▶ total, the same on every worker
    worker 1   [ node 4-7 ]─┘ slice 1 ─▶ add ─┘

A transport only moves bits; the additions are `add_tree`, here, so that neither the transport nor
the size of its messages can change a result.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import NamedTuple

import torch

from samestep.lanes import Reduction

__all__ = ["Exchange", "Flat", "Shape", "Work", "add_tree", "slices"]

_ALIGN = 16  # elements: 64 bytes of float32, so that no two workers write one cache line


class Shape(NamedTuple):
    """How many float32 and float64 numbers a lane's result has."""

    f32: int
    f64: int


class Flat(NamedTuple):
    """A lane's result, or the sum of several: one vector of each type."""

    f32: torch.Tensor
    f64: torch.Tensor

    @staticmethod
    def empty(shape: Shape, device: torch.device) -> Flat:
        return Flat(
            torch.zeros(shape.f32, dtype=torch.float32, device=device),
            torch.zeros(shape.f64, dtype=torch.float64, device=device),
        )

    def add_(self, other: Flat) -> None:
        self.f32.add_(other.f32)
        self.f64.add_(other.f64)


@dataclass(frozen=True)
class Work:
    """What an exchange is about. `runs` are the runs of all workers, in the order of the members;
    `reduction` says what is to be added for a set of runs. `do(run)` builds the nodes of a run, and
    is called for the runs of workers that are lost. `is_done`: this worker's own run is built; it
    is not if there was no memory for lanes of `size`. `digest` is a hash of the weights, if these
    are to be compared."""

    runs: tuple[range, ...]
    reduction: Callable[[tuple[range, ...]], Reduction]
    do: Callable[[range], None]
    size: int = 0
    is_done: bool = True
    digest: int | None = None


class Exchange(ABC):
    """One contract for every transport, held by one suite of tests."""

    @abstractmethod
    def slot(self, lane: int) -> Flat:
        """Where this worker builds the node whose first lane is `lane`."""

    @abstractmethod
    def reduce(self, work: Work) -> Flat:
        """Add all workers' nodes. The result is borrowed: it is valid until the next `reduce`,
        must not be written to, and is the same, bit for bit, on every worker."""


def slices(count: int, size: int) -> tuple[slice, ...]:
    """Cut `count` elements into one slice per worker, on aligned bounds."""
    step = -(-count // (size * _ALIGN)) * _ALIGN
    return tuple(slice(min(count, i * step), min(count, (i + 1) * step)) for i in range(size))


def add_tree(
    pieces: Mapping[int, torch.Tensor], reduction: Reduction, out: torch.Tensor
) -> torch.Tensor:
    """Add `pieces` (one tensor for each slot) in the order of the tree, into `out`.

    The pieces are not written to: they are still whole if a worker is lost while adding.
    """
    if not reduction.additions:
        return out.copy_(pieces[reduction.root])
    if len(reduction.additions) == 1:
        ((left, right),) = reduction.additions
        return torch.add(pieces[left], pieces[right], out=out)
    values, last = dict(pieces), len(reduction.additions) - 1
    spare: list[torch.Tensor] = []
    for i, (left, right) in enumerate(reduction.additions):
        made = values[left] is not pieces[left]
        if i == last:
            target = out
        elif made:
            target = values[left]
        else:
            target = spare.pop() if spare else torch.empty_like(out)
        torch.add(values[left], values[right], out=target)
        values[left] = target
        if values[right] is not pieces[right]:
            spare.append(values[right])
    return out
