"""Data: datasets held once per machine, and lanes loaded ahead of their use.

A lane is loaded by whoever runs it. What a sample looks like depends on (seed, epoch, sample) and
on nothing else, so augmentation is the same on any number of devices and loaders.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.utils.data import DataLoader, Dataset, TensorDataset, default_collate

from samestep import seeds
from samestep.datasets import fashion_mnist, mnist, shapes
from samestep.errors import UsageError
from samestep.failure import Failure
from samestep.processes import die_with_parent
from samestep.tensors import Tensors

__all__ = ["Batch", "Tensors", "fashion_mnist", "mnist", "shapes"]

Fields = tuple[Any, ...]
Collate = Callable[[list[Any]], Any]


@dataclass(frozen=True, slots=True)
class Unit:
    """What is loaded, and run, at once: a lane, a chunk of an evaluation, or (`exact=False`) all
    lanes of a worker. `lane` is the number of its first lane."""

    batch: int
    lane: int
    indices: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Batch:
    """A global batch: which samples, cut into which lanes. `team.batches` makes them."""

    epoch: int
    number: int
    indices: torch.Tensor
    lanes: tuple[range, ...]
    loader: Loader = field(repr=False)

    def __len__(self) -> int:
        return len(self.indices)

    def unit(self, lanes: range) -> Unit:
        """The lanes of a contiguous run as one unit."""
        start, stop = self.lanes[lanes.start].start, self.lanes[lanes.stop - 1].stop
        return Unit(self.number, lanes.start, tuple(self.indices[start:stop].tolist()))


def length_of(dataset: Any) -> int:
    """The number of samples, or an error that says what kind of dataset is needed."""
    if not hasattr(dataset, "__getitem__") or not hasattr(dataset, "__len__"):
        raise UsageError(
            f"dataset: needs __len__ and __getitem__ (a map-style dataset), got "
            f"{type(dataset).__name__}; put tensors into ss.data.Tensors(x, y)"
        )
    if len(dataset) == 0:
        raise UsageError("dataset: has no samples; at least 1 is needed")
    return len(dataset)


class Loader:
    """Loads units: tensors in bulk and at once, other datasets ahead of time in the background.

    `ahead` yields the units that this worker will ask for, in order. A unit that was not foreseen
    (the plan has changed) is loaded on the spot, with the same result.
    """

    def __init__(
        self,
        dataset: Dataset[Any] | Tensors,
        *,
        seed: int,
        epoch: int,
        collate: Collate | None = None,
        loaders: int = 0,
        ahead: Iterable[Unit] = (),
        cores: Sequence[int] = (),
    ) -> None:
        if type(dataset) is TensorDataset:
            dataset = Tensors(*dataset.tensors)
        self._source = _Source(dataset, collate or default_collate, seed, epoch)
        self._stash: dict[tuple[int, int], _Loaded] = {}
        self._stream: Iterator[_Loaded] | None = None
        if loaders and not isinstance(dataset, Tensors):
            self._stream = self._start(loaders, ahead, tuple(cores))

    def load(self, unit: Unit) -> Fields:
        """The fields of one unit, as the loss function gets them."""
        if self._stream is None:
            return self._source.load(unit)
        loaded = self._stash.pop((unit.batch, unit.lane), None)
        while loaded is None or loaded.unit != unit:
            loaded = next(self._stream, None)
            if loaded is None:
                return self._source.load(unit)
            if loaded.unit != unit:
                # Not wanted now: it may be wanted later, unless another worker has it by then.
                self._stash[loaded.unit.batch, loaded.unit.lane] = loaded
                if loaded.unit.batch > unit.batch:
                    return self._source.load(unit)
        for old in [k for k in self._stash if k[0] < unit.batch]:
            del self._stash[old]
        if isinstance(loaded.result, Failure):
            raise loaded.result.rebuild()
        return loaded.result

    def _start(
        self, loaders: int, ahead: Iterable[Unit], cores: tuple[int, ...]
    ) -> Iterator[_Loaded]:
        parent = os.getpid()

        def prepare(_: int) -> None:
            die_with_parent(parent)
            if cores and hasattr(os, "sched_setaffinity"):
                os.sched_setaffinity(0, cores)

        stream = DataLoader(
            self._source,
            batch_sampler=_Requests(ahead),  # type: ignore[arg-type]
            num_workers=loaders,
            collate_fn=_as_it_is,
            worker_init_fn=prepare,
            multiprocessing_context="fork",
            prefetch_factor=8,
            generator=torch.Generator(),  # it must not draw from the user's
        )
        with warnings.catch_warnings():
            # The worker's other thread only ever waits on a socket: it holds no lock at a fork.
            warnings.simplefilter("ignore", DeprecationWarning)
            return iter(stream)


@dataclass(frozen=True, slots=True)
class _Loaded:
    unit: Unit
    result: Fields | Failure


class _Requests:
    """What torch's DataLoader calls a batch sampler."""

    def __init__(self, units: Iterable[Unit]) -> None:
        self._units = units

    def __iter__(self) -> Iterator[Unit]:
        return iter(self._units)


def _as_it_is(loaded: _Loaded) -> _Loaded:
    return loaded


class _Source(Dataset[Any]):
    """One unit of a dataset, each sample under its own random numbers."""

    def __init__(self, dataset: Any, collate: Collate, seed: int, epoch: int) -> None:
        self._dataset, self._collate, self._seed, self._epoch = dataset, collate, seed, epoch

    def __getitems__(self, unit: Unit) -> _Loaded:
        try:
            return _Loaded(unit, self.load(unit))
        except Exception as error:
            return _Loaded(unit, Failure.capture(error))

    def load(self, unit: Unit) -> Fields:
        if isinstance(self._dataset, Tensors):
            if self._dataset.transform is not None:
                seeds.reseed("unit", self._seed, self._epoch, unit.indices[0])
            return self._dataset.gather(torch.tensor(unit.indices))
        samples = []
        for index in unit.indices:
            seeds.reseed("sample", self._seed, self._epoch, index)
            samples.append(self._dataset[index])
        fields = self._collate(samples)
        return tuple(fields) if isinstance(fields, (tuple, list)) else (fields,)


def to_device(value: Any, device: torch.device) -> Any:
    """Move the tensors in `value`, however they are nested."""
    if device.type == "cpu":
        return value
    if isinstance(value, (tuple, list)):
        moved = (to_device(item, device) for item in value)
        return type(value)(*moved) if hasattr(value, "_fields") else type(value)(moved)
    if isinstance(value, dict):
        return {name: to_device(item, device) for name, item in value.items()}
    return value.to(device, non_blocking=True) if hasattr(value, "to") else value
