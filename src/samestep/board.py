"""The board: one page of shared memory on which each worker shows where it is.

Every worker writes its own row and reads the others'. There is no lock, so a dead process cannot
hold one. The launcher reads the rows for progress and for naming the step and lane of a failure.
"""

from __future__ import annotations

import mmap
import os
import platform
import struct
import threading
import time
from collections.abc import Callable
from enum import IntEnum

from samestep.errors import TeamError

_WORDS = 32  # of 8 bytes: the flags that peers poll and the progress lie in different cache lines
_SPINS = 200
_YIELD_S = 0.002
_SLEEP_S = 0.0001


class Word(IntEnum):
    """The columns of a row."""

    WRITTEN = 0  # number of the last exchange whose nodes are written
    SUMMED = 1  # number of the last exchange whose slice is added
    KIND = 2  # what the last exchange was for, see `name_kind`
    FINISHED = 3  # main has returned
    PHASE = 8
    STEP = 9
    LANE = 10
    EPOCH = 11
    EPOCHS = 12
    EPOCH_STEP = 13
    EPOCH_STEPS = 14
    SAMPLES = 15
    LOSS = 16  # the bits of a float64


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


if platform.machine() in {"x86_64", "AMD64", "i386", "i686"}:

    def fence() -> None:
        """x86 keeps stores in order and loads in order, which is all that the flags need."""

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
    """The rows of all workers; `me` is the row this process writes (the launcher has none)."""

    def __init__(self, size: int, me: int = 0, fd: int | None = None) -> None:
        self.size, self.me = size, me
        bytes_ = size * _WORDS * 8
        self._map = mmap.mmap(-1 if fd is None else fd, bytes_)
        self.words = memoryview(self._map).cast("q")
        self._mine = me * _WORDS
        self._others = [worker for worker in range(size) if worker != me]
        self.operations = 0

    def close(self) -> None:
        self.words.release()
        self._map.close()

    def put(self, word: Word, value: int) -> None:
        self.words[self._mine + word] = value

    def get(self, worker: int, word: Word) -> int:
        return self.words[worker * _WORDS + word]

    def enter(self, phase: Phase, lane: int = -1) -> None:
        """Show the phase, and the lane if it is about one."""
        self.words[self._mine + Word.PHASE] = phase
        self.words[self._mine + Word.LANE] = lane

    def put_loss(self, loss: float) -> None:
        self.put(Word.LOSS, struct.unpack("q", struct.pack("d", loss))[0])

    def loss(self, worker: int) -> float:
        value: float = struct.unpack("d", struct.pack("q", self.get(worker, Word.LOSS)))[0]
        return value

    def wait_written(self, kind: int) -> None:
        """Say that this worker's nodes are written, and wait until everyone's are."""
        self.operations += 1
        self.put(Word.KIND, kind)
        fence()
        self.put(Word.WRITTEN, self.operations)
        self._wait(Word.WRITTEN, kind)
        for worker in self._others:
            if (theirs := self.get(worker, Word.KIND)) != kind:
                raise TeamError(_mismatch(self.me, kind, worker, f"is in {name_kind(theirs)}"))

    def wait_summed(self, kind: int) -> None:
        """Say that this worker's slice is added, and wait until everyone's is."""
        fence()
        self.put(Word.SUMMED, self.operations)
        self._wait(Word.SUMMED, kind)

    def _wait(self, word: Word, kind: int) -> None:
        words, operation = self.words, self.operations
        for worker in self._others:
            place = worker * _WORDS + word
            if words[place] < operation:
                self._wait_for(lambda place=place: words[place] >= operation, worker, kind)  # type: ignore[misc]
        fence()

    def _wait_for(self, arrived: Callable[[], bool], worker: int, kind: int) -> None:
        for _ in range(_SPINS):
            if arrived():
                return
        until = time.monotonic() + _YIELD_S
        while time.monotonic() < until:
            if arrived():
                return
            os.sched_yield()
        while not arrived():
            # Invariant: a worker marks itself finished after its last exchange, so a finished
            # worker that has not arrived never will.
            if self.get(worker, Word.FINISHED) and not arrived():
                raise TeamError(_mismatch(self.me, kind, worker, "has finished `main`"))
            time.sleep(_SLEEP_S)


def kind_of(trainer: int, evaluate: bool) -> int:
    """The word that says what an exchange is for."""
    return trainer * 2 + evaluate


def name_kind(kind: int) -> str:
    what = "trainer.evaluate" if kind % 2 else "trainer.step"
    return what if kind < 2 else f"{what} of trainer {kind // 2}"


def _mismatch(me: int, kind: int, other: int, what: str) -> str:
    return (
        f"worker {me} is in {name_kind(kind)} while worker {other} {what}: every worker must "
        "make the same calls in the same order (is one of them under `if team.is_first:`?)"
    )
