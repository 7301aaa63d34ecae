"""The team, as one worker sees it: where the run is, its epochs and batches, its trainers."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol, TypeVar

import torch

from samestep import seeds
from samestep.board import Board, Phase, Word, name_kind
from samestep.data import Batch, Collate, Cut, Loader, Unit, length_of
from samestep.devices import Device
from samestep.errors import UsageError
from samestep.exchange import Exchange, Shape
from samestep.lanes import cut, share
from samestep.trainer import Loss, Trainer

Plan = Callable[[int, int], Sequence[int]]
"""`plan(lanes, step)` gives the number of lanes of each worker."""

T = TypeVar("T")


class Position(NamedTuple):
    """Where a run is: the epoch, and the number of steps committed since its start."""

    epoch: int
    step: int


@dataclass(frozen=True)
class Settings:
    """What a run was launched with; the same on every worker."""

    devices: tuple[Device, ...]
    lanes: int
    seed: int
    exact: bool
    threads: int
    plan: Plan | None = None
    stop_at: int | None = None
    cores: tuple[int, ...] = ()


class Link(Protocol):
    """What a team needs from whoever started it: a launcher, or torchrun."""

    def exchange(
        self, board: Board, shape: Shape, lanes: int, kind: int, name: str, about: str
    ) -> Exchange:
        """An exchange between all workers; `about` must be the same text on each of them."""

    def show(self, text: str) -> None:
        """Print once for the whole team."""

    def record(self, values: dict[str, Any]) -> None:
        """Keep one record of the run's log."""


class StopAt(BaseException):
    """The run has reached the step it was to stop at. No user's `except` should catch it."""


class Team:
    """What `main` is given. Every worker runs `main` and makes the same calls in the same order."""

    def __init__(self, settings: Settings, board: Board, link: Link) -> None:
        self._settings, self._board, self._link = settings, board, link
        self._device = settings.devices[board.me]
        self._epoch = self._step = self._exchanges = 0
        self._counting = False
        self._kept: dict[str, Any] = {}
        self._trainers: list[Trainer] = []

    @property
    def position(self) -> Position:
        """(epoch, step): steps are counted in global batches from the start of the run."""
        return Position(self._epoch, self._step)

    @property
    def size(self) -> int:
        """The number of workers."""
        return self._board.size

    @property
    def number(self) -> int:
        """This worker's number, from 0."""
        return self._board.me

    @property
    def device(self) -> torch.device:
        """The device of this worker, as torch names it."""
        return self._device.torch_device

    @property
    def devices(self) -> str:
        """All devices of the team, by name."""
        return ", ".join(map(str, self._settings.devices))

    @property
    def lanes(self) -> int:
        """The number of lanes a global batch is cut into."""
        return self._settings.lanes

    @property
    def seed(self) -> int:
        """The seed of the run."""
        return self._settings.seed

    @property
    def exact(self) -> bool:
        """Whether the result has the same bits on any devices."""
        return self._settings.exact

    @property
    def is_first(self) -> bool:
        """True on one worker: for writing files and the like. Never step or evaluate under it."""
        return self._board.me == 0

    def __repr__(self) -> str:
        return (
            f"<Team: worker {self.number} of {self.size} on {self._device}, {self.lanes} lanes, "
            f"epoch {self._epoch}, step {self._step}>"
        )

    def epochs(self, count: int) -> Iterator[int]:
        """Count epochs: `for epoch in team.epochs(10)`."""
        _check_count("epochs", count, least=0)
        self._counting = True
        self._board.put(Word.EPOCHS, count)
        try:
            for epoch in range(self._epoch, count):
                self._epoch = epoch
                yield epoch
            self._epoch = count
        finally:
            self._counting = False

    def batches(
        self,
        dataset: Any,
        batch_size: int,
        shuffle: bool = True,
        drop_last: bool = False,
        *,
        collate: Collate | None = None,
        loaders: int = 1,
    ) -> Iterator[Batch]:
        """One epoch of global batches.

        `batch_size` is that of the whole step, on any number of devices. The order depends on
        (seed, epoch) alone. A dataset other than `ss.data.Tensors` is loaded ahead by `loaders`
        background processes of each worker; 0 loads in the worker itself.
        """
        _check_count("batch_size", batch_size, least=1)
        _check_count("loaders", loaders, least=0)
        samples, epoch = length_of(dataset), self._epoch
        count = samples // batch_size if drop_last else math.ceil(samples / batch_size)
        if count == 0:
            raise UsageError(
                f"batch_size={batch_size} with drop_last=True: the dataset has only {samples} "
                "samples, so there is no batch; lower batch_size or keep the last batch"
            )
        order = seeds.order(samples, self.seed, epoch, shuffle)
        self._board.put(Word.EPOCH, epoch)
        self._board.put(Word.EPOCH_STEPS, count)

        def cuts() -> Iterator[Cut]:
            for number in range(count):
                indices = order[number * batch_size : (number + 1) * batch_size]
                yield Cut(epoch, number, indices, cut(len(indices), self.lanes))

        first = self._step
        loader = Loader(
            dataset,
            seed=self.seed,
            epoch=epoch,
            collate=collate,
            loaders=loaders,
            # What this worker would run if the plan stayed as it is.
            ahead=(
                unit
                for made in cuts()
                for unit in self.units(made, self.runs(len(made.lanes), first + made.number))
            ),
            cores=self._settings.cores,
        )
        try:
            for made in cuts():
                self._board.put(Word.EPOCH_STEP, made.number)
                yield Batch(made.epoch, made.number, made.indices, made.lanes, loader)
        finally:
            loader.close()
        if not self._counting:
            self._epoch += 1

    def trainer(
        self,
        model: torch.nn.Module,
        optimizer: torch.optim.Optimizer,
        loss: Loss,
        *,
        clip_norm: float | None = None,
        precision: str = "fp32",
        compile: bool = False,
        store: str = "replicated",
    ) -> Trainer:
        """A trainer for `model`; see `Trainer`. Model and optimizer stay your own objects."""
        trainer = Trainer(
            self,
            model,
            optimizer,
            loss,
            number=len(self._trainers),
            clip_norm=clip_norm,
            precision=precision,
            compile=compile,
            store=store,
        )
        self._trainers.append(trainer)
        return trainer

    def keep(self, name: str, kept: T) -> T:
        """Name an object that belongs to the run's state (anything with `state_dict`)."""
        if not hasattr(kept, "state_dict") or not hasattr(kept, "load_state_dict"):
            raise UsageError(
                f"keep({name!r}): needs an object with state_dict and load_state_dict, got "
                f"{type(kept).__name__}"
            )
        if name in self._kept:
            raise UsageError(f"keep({name!r}): this name is taken; give each object its own")
        self._kept[name] = kept
        return kept

    def log(self, **values: Any) -> None:
        """Print one line of results, once, and add it to the run's log."""
        if self.is_first:
            self._link.show("  ".join(f"{name} {_plain(value)}" for name, value in values.items()))
            self._link.record({"step": self._step, **{k: _value(v) for k, v in values.items()}})

    def print(self, *values: Any, sep: str = " ") -> None:
        """Print once, however many workers there are."""
        if self.is_first:
            self._link.show(sep.join(map(str, values)))

    # What follows is for the trainer.

    @property
    def board(self) -> Board:
        """Where this worker shows what it does."""
        return self._board

    @property
    def step(self) -> int:
        """The number of steps committed since the start of the run."""
        return self._step

    def runs(self, lanes: int, step: int | None = None) -> tuple[range, ...]:
        """The plan: the contiguous run of lanes of each worker."""
        if self._settings.plan is None:
            return share(lanes, [device.speed for device in self._settings.devices])
        counts = list(self._settings.plan(lanes, self._step if step is None else step))
        if len(counts) != self.size or sum(counts) != lanes or min(counts) < 0:
            raise UsageError(
                f"plan: must give {self.size} counts that add up to {lanes} lanes, gave {counts}"
            )
        starts = [sum(counts[:i]) for i in range(self.size)]
        return tuple(range(a, a + n) for a, n in zip(starts, counts, strict=True))

    def units(self, batch: Cut, runs: Sequence[range]) -> list[Unit]:
        """What this worker runs of a batch: lane by lane, or all at once if not exact."""
        run = runs[self.number]
        if self.exact:
            return [batch.unit(range(lane, lane + 1)) for lane in run]
        return [batch.unit(run)] if run else []

    def exchange(self, shape: Shape, lanes: int, kind: int, about: str) -> Exchange:
        """An exchange between all workers of the team; `about` must be alike on each."""
        self._exchanges += 1
        name = f"exchange {self._exchanges}: {name_kind(kind)}"
        return self._link.exchange(self._board, shape, lanes, kind, name, about)

    def commit(self, samples: int, loss: float) -> None:
        """A step has been applied: move on, with random numbers keyed by the new position."""
        board = self._board
        self._step += 1
        board.put(Word.STEP, self._step)
        board.put(Word.SAMPLES, board.get(self.number, Word.SAMPLES) + samples)
        board.put(Word.EPOCH_STEP, board.get(self.number, Word.EPOCH_STEP) + 1)
        board.put_loss(loss)
        board.enter(Phase.MAIN)
        seeds.reseed("main", self.seed, self._step)
        if self._step == self._settings.stop_at:
            raise StopAt

    def pause(self, began: float) -> None:
        """Imitate a slower device: a lane that began then takes 1 / speed as long."""
        if self._device.speed < 1:
            time.sleep((time.perf_counter() - began) * (1 / self._device.speed - 1))

    def fingerprints(self) -> list[str]:
        """The fingerprint of each trainer."""
        return [trainer.fingerprint() for trainer in self._trainers if trainer.is_built]


def _check_count(name: str, value: int, least: int) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise UsageError(f"{name}={value!r}: must be a whole number of at least {least}")


def _plain(value: Any) -> str:
    value = _value(value)
    return f"{value:.4f}" if isinstance(value, float) else str(value)


def _value(value: Any) -> Any:
    """Something that JSON can hold."""
    if isinstance(value, torch.Tensor):
        value = value.tolist()
    return (
        value if isinstance(value, (int, float, str, bool, list, dict, type(None))) else str(value)
    )
