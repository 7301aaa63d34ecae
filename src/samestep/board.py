"""The board: shared memory where each worker shows where it is, and the launcher who is left.

    head       the launcher's: newest generation, whether the run is to stop
    rows       one for each worker that was ever started; a worker writes its own, all read it
    rosters    the launcher's: for each generation its members, written before the generation is

There is no lock, so a dead process cannot hold one. What a dead worker wrote stays as it was: those
that are left decide from it, and so decide alike.
"""

from __future__ import annotations

import mmap
import platform
import struct
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum

from samestep.clock import Clock, Kind

ROWS = 1024  # workers that one launch may start, replacements included
GENERATIONS = 4 * ROWS
_WORDS = 48  # of 8 bytes, one row: what peers poll and the progress lie in different cache lines
_HEAD = 8


class Head(IntEnum):
    """The launcher's own words."""

    GENERATION = 0
    STOP = 1  # the run is to end at the next boundary, with its state saved
    FIRST = 2  # the seat whose worker is `team.is_first`
    SAVED = 3  # the step of the newest checkpoint whose writing is over


class Word(IntEnum):
    """The columns of a row. Those that say "stamp" hold an operation and an attempt at it."""

    OWN = 0  # the last operation for which this worker's own run is written whole
    WRITTEN = 1  # stamp: all that this worker owes is written
    SUMMED = 2  # stamp: its slice is added
    PASSED = 3  # the last operation that is over for it
    AGREED = 4  # stamp: it has seen that the team changed, and will not pass by the old one
    KIND = 5  # what the operation is for, see `name_kind`
    FINISHED = 6  # main has returned
    SEEN = 8  # the newest generation when an operation began; one word for even ones, one for odd
    HASHED = 10  # the operation that DIGEST belongs to
    DIGEST = 11  # a cheap hash of its weights
    PHASE = 16
    STEP = 17
    LANE = 18
    EPOCH = 19
    EPOCHS = 20
    EPOCH_STEP = 21
    EPOCH_STEPS = 22
    SAMPLES = 23
    LOSS = 24  # the bits of a float64
    ACTIONS = 25  # grows with everything it begins; what does not grow may be hanging
    LANE_US = 26  # the longest of its recent lanes
    WAITS_FOR = 27  # the row it waits for, or -1
    FRESH = 28  # what it does now may be much longer than usual: a first lane, a compilation
    SPENT = 32  # microseconds of its time, one word for each kind


class Phase(IntEnum):
    """What a worker is doing."""

    START = 0
    MAIN = 1
    DATA = 2
    LANE = 3
    EXCHANGE = 4
    UPDATE = 5
    EVALUATE = 6
    FINISHED = 7
    CATCH_UP = 8


_KINDS = {
    Phase.DATA: Kind.DATA,
    Phase.LANE: Kind.COMPUTE,
    Phase.EXCHANGE: Kind.EXCHANGE,
    Phase.UPDATE: Kind.UPDATE,
    Phase.EVALUATE: Kind.EVALUATE,
}


@dataclass(frozen=True, slots=True)
class Roster:
    """The members of the team in one generation, by seat.

    `rooms` are the sizes of lanes that each has no memory for (0: none is known), `sinces` the
    generations that they came with."""

    generation: int
    rows: tuple[int, ...]
    seats: tuple[int, ...]
    rooms: tuple[int, ...]
    sinces: tuple[int, ...]

    @staticmethod
    def first(workers: int) -> Roster:
        """The team that a launch begins with."""
        everyone = tuple(range(workers))
        return Roster(1, everyone, everyone, (0,) * workers, (1,) * workers)

    @property
    def oldest(self) -> int:
        """The row of who has been in the team for longest. Not the lowest row: of two replacements,
        the one that was started later may have come to join first, and has the run's state."""
        return min(zip(self.sinces, self.rows, strict=True))[1]

    def __len__(self) -> int:
        return len(self.rows)

    def only(self, rows: Sequence[int]) -> Roster:
        """Without those that are not in `rows`."""
        kept = [i for i, row in enumerate(self.rows) if row in rows]
        return Roster(
            self.generation,
            tuple(self.rows[i] for i in kept),
            tuple(self.seats[i] for i in kept),
            tuple(self.rooms[i] for i in kept),
            tuple(self.sinces[i] for i in kept),
        )


if platform.machine() in {"x86_64", "AMD64", "i386", "i686"}:

    def fence() -> None:
        """x86 keeps stores in order and loads in order, which is all that the words need."""

else:
    _gate = threading.Lock()

    def fence() -> None:
        """Order what was read and written before against what comes after.

        A release followed by an acquire is not reordered (ARMv8), and everything earlier stays
        before the release, everything later after the acquire: hence two rounds.
        """
        with _gate:
            pass
        with _gate:
            pass


class Board:
    """The board of a launch with `seats` devices; `me` is the row this process writes."""

    def __init__(self, seats: int, me: int = 0, fd: int | None = None) -> None:
        self.seats, self.me = seats, me
        self._map = mmap.mmap(-1 if fd is None else fd, self.bytes_needed(seats))
        self.words = memoryview(self._map).cast("q")
        self._mine = _HEAD + me * _WORDS
        self.clock = Clock()

    @staticmethod
    def bytes_needed(seats: int) -> int:
        """Most of it is never touched, and takes no memory."""
        return 8 * (_HEAD + ROWS * _WORDS + GENERATIONS * (1 + 4 * seats))

    def close(self) -> None:
        self.words.release()
        self._map.close()

    def put(self, word: Word, value: int) -> None:
        self.words[self._mine + word] = value

    def get(self, row: int, word: Word) -> int:
        return self.words[_HEAD + row * _WORDS + word]

    def place(self, row: int, word: Word) -> int:
        """Where in `words` it stands."""
        return _HEAD + row * _WORDS + word

    def enter(self, phase: Phase, lane: int = -1) -> None:
        """Show the phase, and the lane if it is about one."""
        words, mine = self.words, self._mine
        words[mine + Word.PHASE] = phase
        words[mine + Word.LANE] = lane
        words[mine + Word.ACTIONS] += 1
        self.clock.turn(_KINDS.get(phase, Kind.OTHER), lane)

    def close_step(self, step: int) -> None:
        """A step is committed: show it, and the time spent so far."""
        words, mine = self.words, self._mine
        words[mine + Word.STEP] = step
        self.clock.close(step)
        for kind, seconds in enumerate(self.clock.seconds):
            words[mine + Word.SPENT + kind] = int(seconds * 1e6)

    def spent(self, row: int) -> tuple[float, ...]:
        """The seconds a worker has spent until its last step, by kind."""
        start = _HEAD + row * _WORDS + Word.SPENT
        return tuple(micros / 1e6 for micros in self.words[start : start + len(Kind)])

    def put_loss(self, loss: float) -> None:
        self.put(Word.LOSS, struct.unpack("q", struct.pack("d", loss))[0])

    def loss(self, row: int) -> float:
        value: float = struct.unpack("d", struct.pack("q", self.get(row, Word.LOSS)))[0]
        return value

    # The team

    def head(self, word: Head) -> int:
        return self.words[word]

    def put_head(self, word: Head, value: int) -> None:
        """The launcher only."""
        self.words[word] = value

    def publish(self, roster: Roster) -> None:
        """The launcher only: a new generation, its members first."""
        start = self._roster_place(roster.generation)
        self.words[start] = len(roster)
        entries = zip(roster.rows, roster.seats, roster.rooms, roster.sinces, strict=True)
        for i, entry in enumerate(entries):
            for j, value in enumerate(entry):
                self.words[start + 1 + 4 * i + j] = value
        fence()
        self.put_head(Head.GENERATION, roster.generation)

    def roster(self, generation: int | None = None) -> Roster:
        """The team of a generation, the newest unless given. Once published, it never changes."""
        generation = self.head(Head.GENERATION) if generation is None else generation
        fence()
        start = self._roster_place(generation)
        count = self.words[start]
        flat = [self.words[start + 1 + i] for i in range(4 * count)]
        return Roster(generation, *(tuple(flat[column::4]) for column in range(4)))

    def _roster_place(self, generation: int) -> int:
        return _HEAD + ROWS * _WORDS + generation * (1 + 4 * self.seats)


def kind_of(trainer: int, evaluate: bool) -> int:
    """The word that says what an exchange is for."""
    return trainer * 2 + evaluate


def name_kind(kind: int) -> str:
    what = "trainer.evaluate" if kind % 2 else "trainer.step"
    return what if kind < 2 else f"{what} of trainer {kind // 2}"
