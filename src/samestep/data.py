"""Data: datasets held once per machine, and lanes loaded ahead of their use.

A lane is loaded by whoever runs it. What a sample looks like depends on (seed, epoch, sample) and
on nothing else, so augmentation is the same on any number of devices and loaders.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, NamedTuple

import torch
from torch.utils.data import Dataset, TensorDataset, default_collate

from samestep import seeds
from samestep.datasets import fashion_mnist, mnist, shapes
from samestep.errors import UsageError
from samestep.failure import Failure
from samestep.lanes import arranged, cut
from samestep.loaders import Loaders
from samestep.tensors import Tensors

__all__ = ["Batch", "Tensors", "fashion_mnist", "mnist", "shapes"]

Fields = tuple[Any, ...]
Collate = Callable[[list[Any]], Any]


class Key(NamedTuple):
    """Which unit it is: of which batch, its first lane, and how many samples it has."""

    batch: int
    lane: int
    samples: int


@dataclass(frozen=True, slots=True, eq=False)
class Unit:
    """What is loaded, and run, at once: a lane, a chunk of an evaluation, or (`exact=False`) all
    lanes of a worker. `lane` is the number of its first lane."""

    batch: int
    lane: int
    indices: torch.Tensor

    def __len__(self) -> int:
        return len(self.indices)

    @property
    def key(self) -> Key:
        return Key(self.batch, self.lane, len(self))


@dataclass(frozen=True)
class Cut:
    """Which samples a global batch has, and how they are cut into lanes. `costs` are what the lanes
    are expected to cost, in units that are alike for all cuts of one `key`."""

    epoch: int
    number: int
    indices: torch.Tensor
    lanes: tuple[range, ...]
    costs: tuple[float, ...]
    key: str

    def __len__(self) -> int:
        return len(self.indices)

    def unit(self, lanes: range) -> Unit:
        """The lanes of a contiguous run as one unit."""
        start, stop = self.lanes[lanes.start].start, self.lanes[lanes.stop - 1].stop
        return Unit(self.number, lanes.start, self.indices[start:stop])


@dataclass(frozen=True)
class Epoch:
    """One epoch of a dataset with `samples` samples, as global batches. Which samples a batch has
    depends on (seed, epoch) alone; their order in it also on what they cost."""

    samples: int
    batch_size: int
    shuffle: bool
    drop_last: bool
    seed: int
    number: int
    lanes: int
    cost: Callable[[int], float] | None = None

    def __len__(self) -> int:
        """The number of batches."""
        whole, rest = divmod(self.samples, self.batch_size)
        return whole if self.drop_last or not rest else whole + 1

    @cached_property
    def order(self) -> torch.Tensor:
        return seeds.order(self.samples, self.seed, self.number, self.shuffle)

    def cut(self, batch: int) -> Cut:
        """Which samples a batch has, and its lanes."""
        indices = self.order[batch * self.batch_size : (batch + 1) * self.batch_size]
        lanes = cut(len(indices), self.lanes)
        if self.cost is None:
            costs = tuple(float(len(lane)) for lane in lanes)
            return Cut(self.number, batch, indices, lanes, costs, str(len(lanes[0])))
        each = [float(self.cost(index)) for index in indices.tolist()]
        places = arranged(each, lanes)
        indices, each = indices[torch.tensor(places)], [each[place] for place in places]
        costs = tuple(sum(each[lane.start : lane.stop]) for lane in lanes)
        if not all(0 < cost < math.inf for cost in costs):
            raise UsageError(
                f"dataset: its cost(index) adds up to {min(costs)} for a lane; a sample's cost "
                "must be a number above 0, for example its number of tokens"
            )
        return Cut(self.number, batch, indices, lanes, costs, "cost")

    def facts(self) -> dict[str, str]:
        """What must be the same in a run that goes on from this one's state."""
        names = ("samples", "batch_size", "shuffle", "drop_last")
        return {name: str(getattr(self, name)) for name in names}


@dataclass(frozen=True)
class Batch(Cut):
    """A global batch, ready to be loaded. `team.batches` makes them; `trainer.step` takes them."""

    loader: Loader = field(repr=False)

    @staticmethod
    def of(cut: Cut, loader: Loader) -> Batch:
        """A cut and what loads it."""
        return Batch(cut.epoch, cut.number, cut.indices, cut.lanes, cut.costs, cut.key, loader)


def check_collate(collate: Any) -> None:
    if collate is not None and not callable(collate):
        raise UsageError(
            f"collate={collate!r}: must be a function from a list of samples to a batch, or None"
        )


def length_of(dataset: Any) -> int:
    """The number of samples, or an error that says what kind of dataset is needed."""
    is_map = hasattr(dataset, "__getitem__") and hasattr(dataset, "__len__")
    if not is_map or isinstance(dataset, (dict, str, torch.Tensor)):
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
        self._stash: dict[Key, Fields | Failure] = {}
        self._loaders: Loaders | None = None
        if loaders and not isinstance(dataset, Tensors):
            requests = ((unit.key, unit.indices.tolist()) for unit in ahead)
            self._loaders = Loaders(self._source.try_load, requests, loaders, cores)

    def load(self, unit: Unit) -> Fields:
        """The fields of one unit, as the loss function gets them."""
        if self._loaders is None:
            return self._source.load(unit.indices)
        while unit.key not in self._stash:
            loaded = self._loaders.next()
            if loaded is None:
                return self._source.load(unit.indices)
            # What is not wanted now may be wanted later, unless another worker has it by then.
            (key, _), result = loaded
            self._stash[key] = result
            if key.batch > unit.batch:
                return self._source.load(unit.indices)
        result = self._stash.pop(unit.key)
        for old in [other for other in self._stash if other.batch < unit.batch]:
            del self._stash[old]
        if isinstance(result, Failure):
            raise result.rebuild()
        return result

    def close(self) -> None:
        """End the background loaders."""
        if self._loaders is not None:
            self._loaders.close()


class _Source:
    """One unit of a dataset, each sample under its own random numbers."""

    def __init__(self, dataset: Any, collate: Collate, seed: int, epoch: int) -> None:
        self._dataset, self._collate, self._seed, self._epoch = dataset, collate, seed, epoch

    def try_load(self, request: tuple[Key, list[int]]) -> Fields | Failure:
        """For a background loader: what went wrong is a result too."""
        try:
            return self.load(torch.tensor(request[1]))
        except Exception as error:
            return Failure.capture(error)

    def load(self, indices: torch.Tensor) -> Fields:
        if isinstance(self._dataset, Tensors):
            if self._dataset.draws:
                seeds.reseed("unit", self._seed, self._epoch, int(indices[0]))
            return self._dataset.gather(indices)
        samples = []
        for index in indices.tolist():
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
