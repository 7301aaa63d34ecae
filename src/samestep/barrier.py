"""Where workers wait for each other, and agree on what to do when the team has changed.

An operation is one exchange. Each worker writes what it owes, waits until all have, adds its slice,
waits until all have, and passes. When a worker is lost on the way, the launcher publishes a new
generation, and those that are left must all do the same: either all pass, or all begin the
operation's next attempt. Whoever waits and sees the new generation promises (AGREED) not to pass by
the old one, then waits until each of the others has promised or has passed:

    somebody has passed     the sums were complete, and stay until I write my next nodes: I pass too
    all have promised       nobody passed, nobody will: all begin again, with the lost runs shared
                            out among those that are left

A worker passes or promises, never both, so all decide alike. Nothing is decided from who saw what
first: an attempt depends only on the runs the operation began with, on which of them are written
whole (a dead worker's words no longer change), and on the generation.

New members need no promise, since nobody waits for them yet: a generation that everyone had SEEN
when the operation began is adopted by all at the next boundary between two batches.
"""

from __future__ import annotations

import os
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass

from samestep.board import Board, Head, Roster, Word, fence, name_kind
from samestep.clock import Kind
from samestep.errors import TeamError

_SPINS = 200
_YIELD_S = 0.002
_SLEEP_S = 0.0001
_ATTEMPTS = 16  # bits of a stamp that hold the attempt: the generation it is made in


@dataclass(frozen=True, slots=True)
class Verdict:
    """Workers whose weights should be alike, and are not: the digest of each row. `odd` are the
    rows that differ from the majority; none, if there is no majority."""

    digests: tuple[tuple[int, int], ...]
    odd: tuple[int, ...]


class Barrier:
    """One worker's side. `roster` is the team it works with."""

    def __init__(self, board: Board, roster: Roster, operation: int = 0) -> None:
        self.board, self.roster, self.operation = board, roster, operation
        self.joined: Roster | None = None  # adopted at the next boundary
        self._start = self._known = roster
        self._kind = self._stamp = 0
        self._condemned: set[int] = set()

    @property
    def place(self) -> int:
        """Where this worker stands among the members; runs are in that order."""
        return self.roster.rows.index(self.board.me)

    @property
    def started_place(self) -> int:
        """Where it stood among those that the operation began with."""
        return self._start.rows.index(self.board.me)

    def enter(self, roster: Roster, operation: int) -> None:
        """A new member: it takes part from the operation after this one."""
        self.roster = self._known = self._start = roster
        self.operation = operation

    def begin(self, kind: int, own: bool = True, digest: int | None = None) -> None:
        """A new operation. `own`: this worker's run is written whole. `digest`: of its weights, to
        be compared."""
        board = self.board
        self.operation += 1
        self._start, self._kind = self.roster, kind
        self._stamp = self.operation << _ATTEMPTS | self.roster.generation
        self._condemned.clear()
        board.put(Word.KIND, kind)
        self._put_seen(board.head(Head.GENERATION))
        if digest is not None:
            board.put(Word.DIGEST, digest)
            board.put(Word.HASHED, self.operation)
        if own:
            fence()
            board.put(Word.OWN, self.operation)

    def all_written(self) -> bool:
        """Say that all this worker owes is written, and wait for the others. False: the team has
        changed."""
        fence()
        self.board.put(Word.WRITTEN, self._stamp)
        if not self._wait(Word.WRITTEN):
            return False
        for row in self.roster.rows:
            if (theirs := self.board.get(row, Word.KIND)) != self._kind:
                raise TeamError(self._mismatch(row, f"is in {name_kind(theirs)}"))
        return True

    def all_summed(self) -> bool:
        """Say that this worker's slice is added, and wait for the others. False: the team has
        changed."""
        fence()
        self.board.put(Word.SUMMED, self._stamp)
        return self._wait(Word.SUMMED)

    def wait_changed(self) -> None:
        """Wait until the launcher has changed the team, as it has been asked to."""
        self._poll(lambda: False, self.board.me)

    def agree(self) -> bool:
        """The team has changed. True: the operation is over all the same. False: all begin its next
        attempt, with those that are left."""
        board = self.board
        while True:
            newest = self._settled(board.roster())
            stamp = self.operation << _ATTEMPTS | newest.generation
            board.put(Word.AGREED, stamp)
            fence()
            if self._all_decided(newest, stamp):
                break
        if any(board.get(row, Word.PASSED) >= self.operation for row in self._start.rows):
            return True
        self._adopt(newest)
        self._put_seen(newest.generation)
        self._stamp = stamp
        return False

    def missing(self) -> frozenset[int]:
        """The places, among those the operation began with, whose runs are not written whole."""
        get = self.board.get
        return frozenset(
            place
            for place, row in enumerate(self._start.rows)
            if row in self._condemned or get(row, Word.OWN) < self.operation
        )

    def helpers(self, size: int) -> tuple[int, ...]:
        """Those that are left and have room for lanes of `size`, by their places at the start."""
        return tuple(
            self._start.rows.index(row)
            for row, room in zip(self.roster.rows, self.roster.rooms, strict=True)
            if not room or size < room
        )

    def verdict(self) -> Verdict | None:
        """After all have written: whose digests differ, if this operation has any."""
        get = self.board.get
        rows = [row for row in self.roster.rows if get(row, Word.HASHED) == self.operation]
        digests = {row: get(row, Word.DIGEST) for row in rows}
        if len(set(digests.values())) <= 1:
            return None
        usual, count = Counter(digests.values()).most_common(1)[0]
        odd = [row for row in rows if digests[row] != usual] if 2 * count > len(rows) else []
        self._condemned.update(odd)
        return Verdict(tuple(digests.items()), tuple(odd))

    def end(self) -> None:
        """The operation is over for this worker."""
        board = self.board
        board.put(Word.PASSED, self.operation)
        if self._seen(board.me) == self.roster.generation:
            return
        # Nobody begins the operation after the next before I have passed this one and the next, so
        # these words still stand, and all see the same.
        oldest = min(map(self._seen, self.roster.rows))
        if oldest > self.roster.generation:
            self._note(board.roster(oldest))

    def join(self) -> tuple[int, ...]:
        """At a boundary: the new members become members. Returns their rows."""
        if self.joined is None:
            return ()
        rows = tuple(sorted(set(self.joined.rows) - set(self.roster.rows)))
        self.roster = self._known = self.joined
        self.joined = None
        return rows

    # Inside

    def _put_seen(self, generation: int) -> None:
        board = self.board
        board.words[board.place(board.me, Word.SEEN) + self.operation % 2] = generation

    def _seen(self, row: int) -> int:
        """The newest generation when that worker's present operation began."""
        return self.board.words[self.board.place(row, Word.SEEN) + self.operation % 2]

    def _settled(self, newest: Roster) -> Roster:
        """The first generation that is like `newest` to those that the operation began with.

        A worker that looks later may see one more generation, in which somebody has only joined.
        Both must try again under the same one, or each would wait for the other.
        """
        rows = self._start.rows
        wanted = newest.only(rows)
        while newest.generation > self._start.generation:
            before = self.board.roster(newest.generation - 1)
            mine = before.only(rows)
            if (mine.rows, mine.rooms) != (wanted.rows, wanted.rooms):
                break
            newest = before
        return newest

    def _adopt(self, newest: Roster) -> None:
        self._note(newest)
        self.roster = newest.only(self._start.rows)

    def _note(self, newest: Roster) -> None:
        has_new = set(newest.rows) - set(self.roster.rows)
        self.joined = newest if has_new else None

    def _all_decided(self, newest: Roster, stamp: int) -> bool:
        """Wait until each of those that are left has promised or passed. False: the team has
        changed again."""
        get = self.board.get
        for row in newest.only(self._start.rows).rows:

            def decided(row: int = row) -> bool:
                return get(row, Word.AGREED) >= stamp or get(row, Word.PASSED) >= self.operation

            if row != self.board.me and not decided():
                self._known = newest
                if not self._poll(decided, row, since=newest):
                    return False
        return True

    def _wait(self, word: Word) -> bool:
        board, stamp = self.board, self._stamp
        words = board.words
        for row in self.roster.rows:
            place = board.place(row, word)
            if words[place] < stamp and not self._poll(
                lambda place=place: words[place] >= stamp,  # type: ignore[misc]
                row,
            ):
                return False
        fence()
        return True

    def _poll(self, arrived: Callable[[], bool], row: int, since: Roster | None = None) -> bool:
        """Wait for `row`. False: the team that it is part of, `since`, has changed."""
        team = since or self.roster
        for _ in range(_SPINS):
            if arrived():
                return True
        self.board.put(Word.WAITS_FOR, row)
        before = self.board.clock.turn(Kind.WAITING)
        try:
            until = time.monotonic() + _YIELD_S
            while not arrived():
                if self._is_disturbed(team):
                    return False
                # Invariant: a worker marks itself finished after its last operation, so a finished
                # worker that has not arrived never will.
                if self.board.get(row, Word.FINISHED) and not arrived():
                    raise TeamError(self._mismatch(row, "has finished `main`"))
                if time.monotonic() < until:
                    os.sched_yield()
                else:
                    time.sleep(_SLEEP_S)
            return True
        finally:
            self.board.clock.turn(before)
            self.board.put(Word.WAITS_FOR, -1)

    def _is_disturbed(self, team: Roster) -> bool:
        """Whether a member of `team` is gone, or has found that it has no room for a lane."""
        if self.board.head(Head.GENERATION) == self._known.generation:
            return False
        newest = self._known = self.board.roster()
        return newest.only(team.rows).rooms != team.rooms or not set(team.rows) <= set(newest.rows)

    def _mismatch(self, row: int, what: str) -> str:
        seats = dict(zip(self.roster.rows, self.roster.seats, strict=True))
        return (
            f"worker {seats[self.board.me]} is in {name_kind(self._kind)} while worker "
            f"{seats[row]} {what}: every worker must make the same calls in the same order (is one "
            "of them under `if team.is_first:`?)"
        )
