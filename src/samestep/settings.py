"""What a run was launched with, and what a team needs from whoever started it."""

from __future__ import annotations

import mmap
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

from samestep.barrier import Barrier
from samestep.devices import Device
from samestep.exchange import Exchange, Shape
from samestep.state import Snapshot

__all__ = ["Link", "Plan", "Position", "Resumed", "Saves", "Settings", "StopAt"]

Plan = Callable[[int, int], Sequence[int]]
"""`plan(lanes, step)` gives the number of lanes of each worker."""


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
    check_every: int = 0
    saves: Saves | None = None
    resumed: Resumed | None = None
    code: str = ""
    traced: int = 0


@dataclass(frozen=True)
class Saves:
    """When a run's state is saved: every so many steps, or seconds."""

    steps: int = 0
    seconds: float = 0.0


@dataclass(frozen=True)
class Resumed:
    """Where a resumed run goes on from."""

    snapshot: Snapshot
    name: str
    edited: bool
    lines: int
    numerics: str


class Link(Protocol):
    """What a team needs from whoever started it: a launcher, or torchrun."""

    def exchange(
        self, barrier: Barrier, shape: Shape, lanes: int, kind: int, name: str, about: str
    ) -> Exchange:
        """An exchange between all workers; `about` must be the same text on each of them."""

    def memory(self, name: str, size: int, about: str) -> mmap.mmap:
        """Memory that all workers share, filled with zeros at first; `about` as above."""

    def show(self, text: str) -> None:
        """Print once for the whole team."""

    def record(self, values: dict[str, Any], text: str, step: int) -> None:
        """Keep and show one record of the run's log. Every worker says it."""

    def catch_up(self) -> Snapshot:
        """Ask to join the others, and wait for the state they are in."""

    def give(self, rows: tuple[int, ...], snapshot: Snapshot) -> None:
        """Hand the state to workers that join."""

    def save(self, snapshot: Snapshot, due: bool) -> None:
        """Hand the state to be written to disk, at once (`due`) or if the run has to stop."""

    def tell(self, text: str) -> None:
        """Tell the user something about the run."""

    def no_room(self, size: int, lanes: int) -> None:
        """Say that there is no memory here for a lane of `size` samples."""

    def wait_end(self) -> None:
        """Wait to be ended."""


class StopAt(BaseException):
    """The run has reached the step it was to stop at. No user's `except` should catch it."""
