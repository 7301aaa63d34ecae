"""The way `main` takes: its loops of batches, what its calls have returned, and catching up.

A worker that joins, and a resumed run, go this way from its start. Loops that are over are empty,
calls return what they returned then, until `main` comes to the loop that goes on.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

from samestep.errors import CheckpointDiffers, TeamError
from samestep.settings import Resumed
from samestep.state import Snapshot

T = TypeVar("T")


class Course:
    """One worker's. `fetch` gets the state to catch up with, once that is needed: `target`."""

    def __init__(self, is_behind: bool, fetch: Callable[[], Snapshot]) -> None:
        self.is_behind, self._fetch = is_behind, fetch
        self.target: Snapshot | None = None
        self.loops = 0  # begun so far
        self.open: dict[int, int] = {}  # loops under way: how many batches each has given
        self.ends: dict[int, int] = {}  # the step at which each finished loop ended
        self.records: list[Any] = []  # what calls have returned, for those who catch up
        self._given: dict[int, int] = {}  # loops that were under way where this worker caught up
        self._replayed = 0

    def begin(self) -> int:
        """The number of a new loop."""
        self.loops += 1
        return self.loops - 1

    def wanted(self) -> Snapshot:
        """The state to catch up with; from now on something is skipped."""
        if self.target is None:
            self.target = self._fetch()
        return self.target

    def start_of(self, loop: int) -> int | None:
        """The first batch of a loop; None if it is over already."""
        if not self.is_behind:
            return self._given.pop(loop, 0)
        target = self.wanted()
        if loop == target.loop:
            return target.batch
        if loop in target.ends:
            return None
        if loop in target.open:
            return target.open[loop] - 1  # the batch that it had given is given again
        raise TeamError(
            f"`main` has come to its loop of batches number {loop + 1}, which the run it is to "
            "catch up with had not begun: `main` must do the same each time"
        )

    def is_here(self, loop: int) -> bool:
        """Whether this is the loop that goes on."""
        return self.target is not None and self.is_behind and loop == self.target.loop

    def recorded(self, what: str, compute: Callable[[], T]) -> T:
        """The result of a call, or while catching up what it was then."""
        if self.is_behind:
            records = self.wanted().records
            if self._replayed >= len(records) or records[self._replayed][0] != what:
                raise TeamError(
                    f"`main` has called {what} where the run it is to catch up with did not: "
                    "`main` must do the same each time (it ends too early if it has fewer epochs "
                    "than the run has trained)"
                )
            self._replayed += 1
            value: T = records[self._replayed - 1][1]
            return value
        value = compute()
        self.records.append((what, value))
        return value

    def check(self, mine: dict[str, str], resumed: Resumed | None, worker: int) -> None:
        """Refuse the state of another training, with a table of what differs."""
        target = self.wanted()
        theirs = target.facts
        names = [
            name
            for name in dict.fromkeys([*theirs, *mine])
            if theirs.get(name) != mine.get(name)
            and not (resumed and resumed.edited and name.startswith("code"))
        ]
        if not names and self._replayed == len(target.records):
            return
        if resumed is None:
            raise TeamError(
                f"worker {worker}: `main` took another way than in the other workers, so this one "
                "cannot join them; `main` must do the same each time"
            )
        if not names:
            names = ["calls of evaluate"]
            theirs, mine = ({names[0]: str(n)} for n in (len(target.records), self._replayed))
        width = max(map(len, names))
        rows = [
            f"  {name:<{width}}  {theirs.get(name, '-')} there, {mine.get(name, '-')} here"
            for name in names
        ]
        remedy = "start it as it was started, or give another run= to begin a new one"
        if all(name.startswith("code") for name in names):
            remedy = 'if the change is meant, say resume="edited"; ' + remedy
        raise CheckpointDiffers(
            "\n".join([f"resume: {resumed.name} is of another training:", *rows, remedy])
        )

    def arrive(self) -> None:
        """This worker is where the run is."""
        target = self.wanted()
        self.ends, self.records = target.ends, target.records
        self._given = {loop: n for loop, n in target.open.items() if loop not in self.open}
        self.is_behind, self.target = False, None
