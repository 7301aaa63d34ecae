"""The team, as one worker sees it: where the run is, its epochs and batches, its trainers."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from typing import Any, TypeVar

import torch

from samestep import seeds, state
from samestep.barrier import Barrier
from samestep.board import Board, Head, Phase, Word, kind_of, name_kind
from samestep.checkpoint import encode
from samestep.clock import Kind
from samestep.contract import Inspects
from samestep.course import Course
from samestep.data import Batch, Collate, Cut, Epoch, Loader, Unit, check_collate, length_of
from samestep.errors import UsageError, check_counts, check_flags
from samestep.exchange import Exchange, Shape
from samestep.loss import Loss
from samestep.plan import Measured, Planning, Runs, decide, partition
from samestep.settings import Link, Position, Settings, StopAt
from samestep.state import Snapshot
from samestep.stores import Sharded
from samestep.trainer import Trainer

T = TypeVar("T")

_SAVED_POLL_S = 0.001

_SNAPSHOT_S = (
    10.0  # at the end of a loop, the state is kept in memory if it was last kept before that
)


class Team:
    """What `main` is given. Every worker runs `main` and makes the same calls in the same order."""

    def __init__(
        self, settings: Settings, board: Board, link: Link, seat: int = 0, joins: bool = False
    ) -> None:
        self._settings, self._board, self._link, self._seat = settings, board, link, seat
        self._device = settings.devices[seat]
        # Invariant: all whom the launch began with begin with the first generation, even who comes
        # so late that somebody has been lost by then. Who joins is told its own (`_go_live`).
        self._barrier = Barrier(board, board.roster() if joins else board.roster(1))
        self._epoch = self._step = self._logged = 0
        self._counting = False
        self._kept: dict[str, Any] = {}
        self._trainers: list[Trainer] = []
        self._course = Course(joins or settings.resumed is not None, self._fetch)
        self._loop_facts: dict[int, dict[str, str]] = {}  # of loops of batches under way
        self._saved_step, self._saved_at = 0, time.monotonic()
        self._awaits = 0  # the step of a checkpoint that must be written before the next commit
        self._planning = Planning()
        self._runs: Runs = ()
        self.inspector: Inspects | None = None

    @property
    def position(self) -> Position:
        """(epoch, step): steps are counted in global batches from the start of the run."""
        return Position(self._epoch, self._step)

    @property
    def size(self) -> int:
        """The number of workers, at this moment."""
        return len(self._barrier.roster)

    @property
    def number(self) -> int:
        """This worker's number, from 0: that of its device in `devices`."""
        return self._seat

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
    def cores(self) -> tuple[int, ...]:
        """The cores that the launch may use; none, if its workers are not pinned."""
        return self._settings.cores

    @property
    def seed(self) -> int:
        """The seed of the run."""
        return self._settings.seed

    @property
    def exact(self) -> bool:
        """Whether the result has the same bits on any devices."""
        return self._settings.exact

    @property
    def plan(self) -> dict[str, int]:
        """How many lanes of the newest step each device ran, by its name."""
        devices = (self._settings.devices[seat] for seat in self._barrier.roster.seats)
        return {
            str(device): len(run)
            for device, run in zip(devices, self._runs or ((),) * self.size, strict=False)
        }

    @property
    def is_first(self) -> bool:
        """True on one worker: for writing files and the like. Never step or evaluate under it.

        False where something was skipped while catching up: the weights are not the run's then.
        """
        return self._seat == self._board.head(Head.FIRST) and not self.has_skipped

    @property
    def catching_up(self) -> bool:
        """Whether this worker is still on its way to where the run is: it has replaced one that was
        lost, or the run was resumed. Until then loops of batches are empty, `evaluate` returns what
        it returned then, and nothing is printed or logged."""
        return self._course.is_behind

    def __repr__(self) -> str:
        return (
            f"<Team: worker {self.number} of {self.size} on {self._device}, {self.lanes} lanes, "
            f"epoch {self._epoch}, step {self._step}>"
        )

    def epochs(self, count: int) -> Iterator[int]:
        """Count epochs: `for epoch in team.epochs(10)`."""
        check_counts(0, epochs=count)
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
        check_counts(1, batch_size=batch_size)
        check_counts(0, loaders=loaders)
        check_flags(shuffle=shuffle, drop_last=drop_last)
        check_collate(collate)
        made = Epoch(
            length_of(dataset),
            batch_size,
            shuffle,
            drop_last,
            self.seed,
            self._epoch,
            self.lanes,
            cost if callable(cost := getattr(dataset, "cost", None)) else None,
        )
        if not len(made):
            raise UsageError(
                f"batch_size={batch_size} with drop_last=True: the dataset has only "
                f"{made.samples} samples, so there is no batch; lower batch_size or keep the last"
            )
        # Numbered when they are made and not when they start: of loops in step (`zip`), those after
        # one that is over never start.
        return self._loop(self._course.begin(), made, dataset, collate, loaders)

    def _loop(
        self, loop: int, made: Epoch, dataset: Any, collate: Collate | None, loaders: int
    ) -> Iterator[Batch]:
        """A loop's batches, from where the run is."""
        self._loop_facts[loop] = made.facts()
        start = self._course.start_of(loop)
        if start is None:
            self._step = self._course.wanted().ends[loop]
        if self.catching_up:
            self._make_whole(made, Loader(dataset, seed=self.seed, epoch=0, collate=collate))
            if self._course.is_here(loop):
                self._go_live()
        if start is not None:
            loader = Loader(
                dataset,
                seed=self.seed,
                epoch=made.number,
                collate=collate,
                loaders=loaders,
                ahead=self._foresee(made, start),
                cores=self._settings.cores,
            )
            yield from self._batches(loop, made, start, loader)
        self._loop_facts.pop(loop, None)
        if not self._counting:
            self._epoch += 1

    def _batches(self, loop: int, made: Epoch, start: int, loader: Loader) -> Iterator[Batch]:
        """The batches from `start` on, with a boundary before each and at the end."""
        self._board.put(Word.EPOCH, made.number)
        self._board.put(Word.EPOCH_STEPS, len(made))
        try:
            for number in range(start, len(made)):
                self._boundary(loop, number)
                self._course.open[loop] = number + 1
                cut = made.cut(number)
                yield Batch.of(cut, loader)
            self._boundary(loop, len(made), is_end=True)
        finally:
            loader.close()
            self._course.open.pop(loop, None)
            self._course.ends[loop] = self._step

    def _foresee(self, made: Epoch, start: int) -> Iterator[Unit]:
        """What this worker would run if the plan stayed as it is."""
        first = self._step - start
        for number in range(start, len(made)):
            cut = made.cut(number)
            run = self.runs(cut, first + number)[self.place]
            yield from self.units(cut, run)

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
        encode(kept.state_dict(), f"kept/{name}", {})
        self._kept[name] = kept
        return kept

    def log(self, **values: Any) -> None:
        """Print one line of results, once, and add it to the run's log."""
        if self.catching_up:
            return
        self._logged += 1
        text = "  ".join(f"{name} {_plain(value)}" for name, value in values.items())
        self._link.record(
            {"step": self._step, **{k: _value(v) for k, v in values.items()}}, text, self._step
        )

    def print(self, *values: Any, sep: str = " ") -> None:
        """Print once, however many workers there are."""
        if self.is_oldest and not self.catching_up:
            self._link.show(sep.join(map(str, values)))

    # Catching up, joining, saving

    def _fetch(self) -> Snapshot:
        """The state to catch up with."""
        self._board.enter(Phase.CATCH_UP)
        resumed = self._settings.resumed
        return resumed.snapshot if resumed else self._link.catch_up()

    def _make_whole(self, made: Epoch, loader: Loader) -> None:
        """Initialise lazy modules with a loop's first batch, as its first step has done."""
        for trainer in self._trainers:
            if not trainer.is_built:
                cut = made.cut(0)
                batch = Batch.of(cut, loader)
                with suppress(Exception):  # the batch is another trainer's
                    trainer.make_whole(batch)

    def _go_live(self) -> None:
        """`main` is where the run is: take its state and its random numbers."""
        target = self._course.wanted()
        self._course.check(self._all_facts(target.loop), self._settings.resumed, self.number)
        for trainer, saved in zip(self._trainers, target.trainers, strict=True):
            trainer.restore(saved)
        for scheduler, saved in zip(self._schedulers(), target.schedulers, strict=True):
            scheduler.load_state_dict(saved)
        for name, kept in self._kept.items():
            kept.load_state_dict(target.kept[name])
        self._step, self._logged = target.step, target.logged
        self._saved_step = target.saved if target.generation else self._step
        self._board.put(Word.STEP, target.step)
        self._board.put(Word.SAMPLES, target.samples)
        if target.generation:
            roster = self._board.roster(target.generation)
            self._barrier.enter(roster, target.operation)
            self._planning = Planning(**target.planning)
        self._course.arrive()
        self._board.enter(Phase.MAIN)
        state.set_random_state(target.random)

    def _all_facts(self, loop: int) -> dict[str, str]:
        settings = self._settings
        facts = {
            "lanes": str(settings.lanes),
            "seed": str(settings.seed),
            "exact": str(settings.exact),
            "threads": str(settings.threads),
            "code of main": settings.code,
            "kept": ", ".join(sorted(self._kept)) or "nothing",
            "schedulers": ", ".join(type(s).__name__ for s in self._schedulers()) or "none",
            "trainers": str(len(self._trainers)),
            **self._loop_facts[loop],
        }
        for trainer in self._trainers:
            facts |= trainer.facts()
        return facts

    def _schedulers(self) -> list[Any]:
        return list(state.schedulers([trainer.optimizer for trainer in self._trainers]))

    def _boundary(self, loop: int, batch: int, is_end: bool = False) -> None:
        """Between two batches nothing is under way: here workers join, and the state is saved."""
        self._board.put(Word.EPOCH_STEP, batch)
        if self.catching_up:
            return
        if self._barrier.joined is not None:
            rows = self._barrier.join()
            if self.is_oldest:
                self._link.give(rows, self._snapshot(loop, batch, is_shared=True))
        if self._settings.saves is not None and self.is_oldest:
            self._save(loop, batch, is_end)

    def _save(self, loop: int, batch: int, is_end: bool) -> None:
        saves, stop = self._settings.saves, self._board.head(Head.STOP)
        assert saves is not None
        steps, seconds = self._step - self._saved_step, time.monotonic() - self._saved_at
        due = bool(stop) or (
            steps >= saves.steps if saves.steps else steps > 0 and seconds >= saves.seconds
        )
        if due or (is_end and seconds > _SNAPSHOT_S and steps):
            self._link.save(self._snapshot(loop, batch), due)
            self._saved_step, self._saved_at = self._step, time.monotonic()
            self._awaits = self._step if saves.steps and due else 0
        if stop:
            self._link.wait_end()

    def _snapshot(self, loop: int, batch: int, is_shared: bool = False) -> Snapshot:
        return Snapshot(
            loop=loop,
            batch=batch,
            step=self._step,
            samples=self._board.get(self._board.me, Word.SAMPLES),
            open={n: given for n, given in self._course.open.items() if n != loop},
            ends=dict(self._course.ends),
            records=list(self._course.records),
            facts=self._all_facts(loop),
            trainers=[trainer.state(is_shared) for trainer in self._trainers],
            schedulers=[scheduler.state_dict() for scheduler in self._schedulers()],
            kept={name: kept.state_dict() for name, kept in self._kept.items()},
            random=state.random_state(),
            operation=self._barrier.operation,
            generation=self._barrier.roster.generation,
            planning=self._planning.state(),
            logged=self._logged,
            saved=self._saved_step,
        )

    # What follows is for the trainer.

    @property
    def is_oldest(self) -> bool:
        """True on the worker that has been in the team for longest: it speaks for all."""
        return self._board.me == self._barrier.roster.oldest

    @property
    def board(self) -> Board:
        """Where this worker shows what it does."""
        return self._board

    @property
    def step(self) -> int:
        """The number of steps committed since the start of the run."""
        return self._step

    @property
    def loop(self) -> int:
        """The number of loops of batches begun."""
        return self._course.loops

    @property
    def place(self) -> int:
        """Where this worker stands among the members; runs are in that order."""
        return self._barrier.place

    @property
    def has_skipped(self) -> bool:
        """Whether the weights are not what they were here when the run came by."""
        return self._course.target is not None

    @property
    def is_checked(self) -> bool:
        """Whether workers compare their weights in the present step."""
        every = self._settings.check_every
        return bool(every) and self._step % every == 0 and self.size > 1

    def no_room(self, size: int, lanes: int) -> None:
        """Say that there is no memory here for a lane of `size` samples."""
        self._link.no_room(size, lanes)

    def runs(self, cut: Cut, step: int | None = None, trainer: int = 0) -> Runs:
        """The plan: the contiguous run of lanes of each member. Who is known to have no memory for
        lanes of this size gets none."""
        roster, plan, lanes = self._barrier.roster, self._settings.plan, len(cut.lanes)
        if plan is None or len(roster) != len(self._settings.devices):
            sizes = tuple(map(len, cut.lanes)) if any(roster.rooms) else ()
            rooms = roster.rooms if any(roster.rooms) else ()
            shares = self._planning.shares(
                _key(cut, trainer), roster.seats, cut.costs, sizes, rooms
            )
            runs = partition(shares)
            # Who is idle for want of memory is not tried again.
            return runs if rooms else self._planning.probes(runs, roster.seats)
        counts = list(plan(lanes, self._step if step is None else step))
        if len(counts) != self.size or sum(counts) != lanes or min(counts) < 0:
            raise UsageError(
                f"plan: must give {self.size} counts that add up to {lanes} lanes, gave {counts}"
            )
        starts = [sum(counts[:i]) for i in range(self.size)]
        return tuple(range(a, a + n) for a, n in zip(starts, counts, strict=True))

    @property
    def speeds(self) -> list[float]:
        """How fast the members are, as far as that is known."""
        return self._planning.speeds(self._barrier.roster.seats)

    def observe(
        self, runs: Runs, cut: Cut, trainer: int, seats: list[int], seconds: list[float]
    ) -> None:
        """Take in what the root says of a step: who ran its lanes, and how long that took."""
        self._runs = runs
        if self._settings.plan is not None:
            return
        measured = Measured(_key(cut, trainer), cut.costs, seats, seconds)
        present = self._barrier.roster.seats
        names = [str(self._settings.devices[seat]) for seat in present]
        self._planning, says = decide(self._planning, measured, present, names)
        if self.is_oldest:
            for text in says:
                self._link.tell(f"step {self._step + 1}: {text}")

    def units(self, batch: Cut, run: range) -> list[Unit]:
        """A run of lanes of a batch: lane by lane, or all at once if not exact."""
        if self.exact:
            return [batch.unit(range(lane, lane + 1)) for lane in run]
        return [batch.unit(run)] if run else []

    def exchange(self, shape: Shape, lanes: int, kind: int, key: str, about: str) -> Exchange:
        """An exchange between all workers of the team, called `key`; `about` must be alike."""
        name = f"{name_kind(kind)} {key}"
        return self._link.exchange(self._barrier, shape, lanes, kind, name, about)

    def recorded(self, what: str, compute: Callable[[], T]) -> T:
        """The result of a call, or while catching up what it was then."""
        return self._course.recorded(what, compute)

    def sharded(self, optimizer: torch.optim.Optimizer, trainer: int) -> Sharded:
        """A store in memory that all workers share."""
        kind = kind_of(trainer, False)
        return Sharded(
            optimizer,
            self._barrier,
            kind,
            self._seat,
            len(self._settings.devices),
            lambda size, about: self._link.memory(f"store of {name_kind(kind)}", size, about),
        )

    def spent(self) -> dict[str, tuple[float, ...]]:
        """The seconds of each member until its last step, by kind."""
        roster, devices = self._barrier.roster, self._settings.devices
        return {
            str(devices[seat]): self._board.spent(row)
            for row, seat in zip(roster.rows, roster.seats, strict=True)
        }

    def wait_saved(self) -> None:
        """Where checkpoints are asked for by steps, no more than these are ever to be repeated: so
        a step is committed only when the checkpoint that was due before it is there."""
        if not self._awaits or self._board.head(Head.SAVED) >= self._awaits:
            return
        before = self._board.clock.turn(Kind.WAITING)
        self._board.put(Word.FRESH, 1)  # a slow disk is no hanging worker
        while self._board.head(Head.SAVED) < self._awaits:
            time.sleep(_SAVED_POLL_S)
        self._awaits = 0
        self._board.clock.turn(before)

    def commit(self, samples: int, loss: float) -> None:
        """A step has been applied: move on, with random numbers keyed by the new position."""
        board = self._board
        self._step += 1
        board.put(Word.SAMPLES, board.get(board.me, Word.SAMPLES) + samples)
        board.put(Word.EPOCH_STEP, board.get(board.me, Word.EPOCH_STEP) + 1)
        board.put_loss(loss)
        board.enter(Phase.MAIN)
        board.close_step(self._step)
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


def _key(cut: Cut, trainer: int) -> str:
    """What lanes have one pace: those of one model, and of one size."""
    return f"{trainer} {cut.key}"


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
