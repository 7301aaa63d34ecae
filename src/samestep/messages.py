"""What launcher and workers say to each other."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from samestep.clock import Moment, Spent
from samestep.devices import Device, NumericsClass
from samestep.failure import Failure


@dataclass(frozen=True, slots=True)
class Order:
    """To a new worker, through the fork server. Its descriptors: channel, stdout, stderr, board,
    payload, crash report."""

    row: int
    seat: int
    seats: int
    joins: bool
    device: Device
    threads: int
    exact: bool
    pins: tuple[int, ...]
    environ: dict[str, str]
    folder: str
    path: list[str]
    argv: list[str]


@dataclass(frozen=True, slots=True)
class Ready:
    """The worker has set itself up and run the probe lane."""

    numerics: NumericsClass


@dataclass(frozen=True, slots=True)
class Claim:
    """The worker needs memory that all workers share. The answer is a descriptor."""

    key: str
    size: int
    about: str


@dataclass(frozen=True, slots=True)
class Wanted:
    """The worker has a tensor with this digest. The answer is a descriptor if another worker has
    shared it, or none: then this worker is to share it, with `Shared`."""

    digest: str


@dataclass(frozen=True, slots=True)
class Shared:
    """Here is the memory that holds the tensor of this digest; its descriptor comes with it."""

    digest: str


@dataclass(frozen=True, slots=True)
class Record:
    """One record for the run's log, as text too. Every worker sends it; `step`, `names` and
    `number` (the how-manieth of these at this step) tell that it is the same."""

    values: dict[str, Any]
    text: str
    step: int
    names: str
    number: int


@dataclass(frozen=True, slots=True)
class Note:
    """The user is to be told something about the run."""

    text: str


@dataclass(frozen=True, slots=True)
class CatchUp:
    """A replacement has come to where it needs the team's state. The answer is `State`."""


@dataclass(frozen=True, slots=True)
class State:
    """The state of the run; its descriptor comes with it. From a member: for the workers of `rows`
    that join, or (none) to be written to disk: at once if `due`; `logged` records belong to
    it. To a worker: what it asked for."""

    rows: tuple[int, ...] = ()
    step: int = 0
    due: bool = False
    logged: int = 0


@dataclass(frozen=True, slots=True)
class NoRoom:
    """There was no memory for a lane of `size` samples; the batch had `lanes` lanes."""

    size: int
    lanes: int


@dataclass(frozen=True, slots=True)
class Differs:
    """After `step` steps the workers' weights differ: a digest for each row, and those rows that
    differ from the majority (none if there is none)."""

    step: int
    digests: tuple[tuple[int, int], ...]
    odd: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Done:
    """`main` has returned."""

    fingerprints: tuple[str, ...]
    moments: tuple[Moment, ...] = ()
    steps: tuple[Spent, ...] = ()


@dataclass(frozen=True, slots=True)
class Tell:
    """To a worker that is done: send what `main` has returned."""


@dataclass(frozen=True, slots=True)
class Result:
    """What `main` has returned, pickled."""

    pickled: bytes


@dataclass(frozen=True, slots=True)
class Leave:
    """To a worker that is done: it is over."""


@dataclass(frozen=True, slots=True)
class Failed:
    """`main` has raised."""

    failure: Failure
