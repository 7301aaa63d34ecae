"""Watching for workers that hang: pure, from what the board shows and the time.

A worker that waits for another is not hanging, unless they wait in a ring. The others must begin
something new before their deadline, which follows from their own recent lanes. Work that may take
as long as it likes, such as the code of `main` between two steps (saving, plotting), an evaluation,
a first lane or a compilation, has a deadline many times as long, unless the process is stopped.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from samestep.board import Phase

LANES = 20  # times its longest recent lane, a worker may take
LONG = 20  # times the usual deadline, for work without a measure


@dataclass(frozen=True, slots=True)
class Seen:
    """One worker, as it shows itself. `is_stopped`: by a signal, as the kernel says."""

    phase: Phase
    actions: int
    lane_s: float
    waits_for: int
    is_fresh: bool
    is_stopped: bool


@dataclass(frozen=True, slots=True)
class Watch:
    """Since when each worker has shown the same."""

    floor_s: float
    since: Mapping[int, tuple[Seen, float]] = field(default_factory=dict)


def look(watch: Watch, seen: Mapping[int, Seen], now: float) -> tuple[Watch, dict[int, float]]:
    """Take a look at all workers; returns who has hung, and for how many seconds."""
    since = {}
    for row, mine in seen.items():
        before = watch.since.get(row)
        same = before is not None and (before[0].actions, before[0].waits_for) == (
            mine.actions,
            mine.waits_for,
        )
        since[row] = (mine, before[1] if same and before is not None else now)
    hung = {
        row: now - start
        for row, (mine, start) in since.items()
        if now - start > _deadline(mine, watch.floor_s)
    }
    stuck = _in_a_ring(since, now, watch.floor_s)
    if not hung and stuck is not None:
        hung[stuck] = now - since[stuck][1]
    return replace(watch, since=since), hung


def _in_a_ring(since: Mapping[int, tuple[Seen, float]], now: float, floor_s: float) -> int | None:
    """The first of workers that wait for each other in a ring, which none of them will ever leave.
    That should not happen; if it does, ending one of them is better than waiting for ever."""
    for first in sorted(since):
        ring: list[int] = []
        row = first
        while row in since and row not in ring:
            ring.append(row)
            row = since[row][0].waits_for
        if row == first and all(
            now - since[other][1] > 2 * max(floor_s, LANES * since[other][0].lane_s)
            for other in ring
        ):
            return first
    return None


def _deadline(seen: Seen, floor_s: float) -> float:
    usual = max(floor_s, LANES * seen.lane_s)
    if seen.is_stopped:
        return usual
    if seen.waits_for >= 0 or seen.phase in {Phase.FINISHED, Phase.CATCH_UP}:
        return float("inf")
    if seen.is_fresh or seen.phase in {Phase.START, Phase.MAIN, Phase.EVALUATE}:
        return LONG * usual
    return usual
