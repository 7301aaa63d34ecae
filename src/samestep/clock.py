"""Where a worker's time goes: every moment belongs to one kind."""

from __future__ import annotations

import time
from collections import deque
from enum import IntEnum
from typing import NamedTuple

_STEPS = 10_000  # that are kept


class Kind(IntEnum):
    """What time is spent on. OTHER is the user's own code between steps."""

    DATA = 0
    COMPUTE = 1
    WAITING = 2
    EXCHANGE = 3
    UPDATE = 4
    EVALUATE = 5
    OTHER = 6


class Spent(NamedTuple):
    """One step: its number, and the seconds since the one before it, by kind."""

    step: int
    seconds: tuple[float, ...]


class Moment(NamedTuple):
    """From `at` on (seconds of a clock that all processes share) time was spent on `kind`."""

    at: float
    kind: Kind
    lane: int
    step: int


class Clock:
    """One worker's. `steps` are the latest, `seconds` the sums since the start; `moments` are noted
    for the first `traced` steps."""

    def __init__(self) -> None:
        self.traced = 0
        self.moments: list[Moment] = []
        self._step = 0
        self.steps: deque[Spent] = deque(maxlen=_STEPS)
        self.seconds = [0.0] * len(Kind)
        self._closed = [0.0] * len(Kind)
        self._kind, self._since = Kind.OTHER, time.perf_counter()

    def turn(self, kind: Kind, lane: int = -1) -> Kind:
        """From now on time is spent on `kind`; returns what it was spent on."""
        before, now = self._kind, time.perf_counter()
        self.seconds[before] += now - self._since
        self._kind, self._since = kind, now
        if self.traced:
            self.moments.append(Moment(now, kind, lane, self._step))
        return before

    def close(self, step: int) -> None:
        """A step is over."""
        self.turn(self._kind)
        spent = (a - b for a, b in zip(self.seconds, self._closed, strict=True))
        self.steps.append(Spent(step, tuple(spent)))
        self._closed = list(self.seconds)
        self._step = step
        if self.traced:
            self.traced -= 1
