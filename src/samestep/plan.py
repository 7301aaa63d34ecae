"""Planning: which worker runs which lanes, and when that changes. All of this is pure.

    seconds of each lane, by seat ──observe──▶ paces ──partition──▶ a run of lanes for each worker

Who ran a lane and how long it took comes with the root, so that every worker observes the same
numbers, has the same planning, and makes the same plan, without asking anybody.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from itertools import accumulate, pairwise
from statistics import median

from samestep.lanes import nodes

__all__ = ["Measured", "Planning", "Shares", "decide", "makespan", "partition"]

_SMALL = 60_000  # workers * lanes * lanes, up to which cuts are compared one by one
_SHORT, _LONG = 5, 32  # steps: what a large and a small gain must have lasted for
_LARGE_GAIN, _SMALL_GAIN = 0.08, 0.015  # of the step's time
_FIRST = 2  # measured steps before the first plan that is not equal
_RECENT, _PATIENCE = 64, 20  # changes within the recent steps make the next one wait, up to so long
_PROBE = 64  # steps after which an idle device is tried again, times how much slower it is
_KEYS = 8  # sizes of lanes that are told apart

Runs = tuple[range, ...]


# One plan


@dataclass(frozen=True)
class Shares:
    """What is to be shared out. `costs` of the lanes; `paces` of the workers, in seconds for a unit
    of cost. `sizes` are the lanes' samples, and `rooms` the size of lanes that a worker has no
    memory for (0: none is known)."""

    costs: tuple[float, ...]
    paces: tuple[float, ...]
    sizes: tuple[int, ...] = ()
    rooms: tuple[int, ...] = ()


@lru_cache(maxsize=256)
def partition(shares: Shares) -> Runs:
    """Contiguous runs, in the order of the workers, with which the slowest is done earliest.

    >>> partition(Shares((1,) * 8, (1, 1, 1)))
    (range(0, 3), range(3, 6), range(6, 8))
    >>> partition(Shares((1,) * 32, (1, 4)))
    (range(0, 26), range(26, 32))

    Of plans that are equally fast: the fewest idle workers, then the fewest nodes of the tree. What
    the exchange costs is no part of it, for no plan changes that: the additions are the same ones,
    and those that are not made while lanes are folded are made in the exchange, by all together.
    """
    able = _Able(shares)
    if not able.is_possible:
        able = _Able(replace(shares, rooms=()))
    workers, lanes = len(shares.paces), len(shares.costs)
    best, runs = _fastest(able, workers, exact=workers <= 64)
    if workers * lanes * lanes > _SMALL:
        return runs
    return _tidiest(able, workers, best)


def makespan(shares: Shares, runs: Runs) -> float:
    """The seconds of the worker that is done last."""
    return max(
        sum(shares.costs[lane] for lane in run) * pace
        for run, pace in zip(runs, shares.paces, strict=True)
    )


def _least(shares: Shares) -> float:
    """No plan is done earlier: if lanes could be cut anywhere, and for the longest lane."""
    speed = sum(1 / pace for pace in shares.paces)
    return max(sum(shares.costs) / speed, max(shares.costs) * min(shares.paces))


class _Able:
    """How far each worker gets from a lane on."""

    def __init__(self, shares: Shares) -> None:
        self.paces = shares.paces
        self.sums = [0.0, *accumulate(shares.costs)]
        self.lanes = len(shares.costs)
        rooms = {room for room in shares.rooms if room}
        self._ends = {room: _ends(shares.sizes, room) for room in rooms}
        self._rooms = shares.rooms or (0,) * len(shares.paces)
        self.is_possible = not rooms or not all(self._rooms) or min(rooms) > max(shares.sizes)
        if not self.is_possible:
            self.is_possible = max(rooms) > max(shares.sizes)

    def last(self, worker: int, start: int) -> int:
        """The end of the longest run from `start` on that it has the memory for."""
        room = self._rooms[worker]
        return self._ends[room][start] if room else self.lanes

    def end(self, worker: int, start: int, seconds: float) -> int:
        """The end of the longest run from `start` on that takes it no more than `seconds`."""
        reach = self.sums[start] + seconds / self.paces[worker]
        return min(bisect_right(self.sums, reach * (1 + 1e-12)) - 1, self.last(worker, start))

    def time(self, worker: int, start: int, stop: int) -> float:
        return (self.sums[stop] - self.sums[start]) * self.paces[worker]


def _ends(sizes: Sequence[int], room: int) -> list[int]:
    """For each lane, the first one from there on that is too large."""
    ends = [len(sizes)]
    for lane in reversed(range(len(sizes))):
        ends.append(lane if sizes[lane] >= room else ends[-1])
    return ends[::-1]


def _fill(able: _Able, workers: int, seconds: float) -> Runs | None:
    """Each worker takes as much as it can. None: that is not all there is."""
    runs, start = [], 0
    for worker in range(workers):
        stop = able.end(worker, start, seconds) if start < able.lanes else start
        runs.append(range(start, stop))
        start = stop
    return tuple(runs) if start == able.lanes else None


def _fastest(able: _Able, workers: int, exact: bool) -> tuple[float, Runs]:
    """The least makespan there is; for very many workers to a thousandth."""
    low = able.sums[-1] / sum(1 / pace for pace in able.paces)
    gap = low * 1e-3
    while (runs := _fill(able, workers, low + gap)) is None:
        low, gap = low + gap, gap * 2
    high = low + gap
    while high - low > low * (1e-9 if exact else 1e-3):
        middle = (low + high) / 2
        if (found := _fill(able, workers, middle)) is None:
            low = middle
        else:
            high, runs = middle, found
    return _longest(able, runs), runs


def _longest(able: _Able, runs: Runs) -> float:
    return max(able.time(worker, run.start, run.stop) for worker, run in enumerate(runs))


def _tidiest(able: _Able, workers: int, seconds: float) -> Runs:
    """Of all cuts within `seconds`: the fewest idle workers, then the fewest nodes."""
    lanes = able.lanes
    ways: list[dict[int, tuple[tuple[int, int], int]]] = [{0: ((0, 0), 0)}]
    for worker in range(workers):
        ends: dict[int, tuple[tuple[int, int], int]] = {}
        # From the right: of equal ways the one that gives the earlier worker more.
        for start in sorted(ways[-1], reverse=True):
            (idle, count), _ = ways[-1][start]
            for stop in range(start, able.end(worker, start, seconds) + 1):
                made = len(nodes(range(start, stop), lanes))
                value = (idle + (not made), count + made)
                if stop not in ends or value < ends[stop][0]:
                    ends[stop] = value, start
        ways.append(ends)
    stop, bounds = lanes, [lanes]
    for ends in reversed(ways[1:]):
        stop = ends[stop][1]
        bounds.append(stop)
    return tuple(range(a, b) for a, b in pairwise(reversed(bounds)))


# Plans over time


@dataclass(frozen=True)
class Measured:
    """What the root says of one step: for each lane, its cost, who ran it (a seat), and the seconds
    that took; negative where it was longer than usual for a known reason (a first lane)."""

    key: str
    costs: tuple[float, ...]
    seats: Sequence[int]
    seconds: Sequence[float]


@dataclass(frozen=True)
class Planning:
    """What plans are made from. `paces` (by size of lanes, then by seat) are those in force;
    `windows` the newest measurements; `since` the steps since `paces` were changed, `changes` when
    that was of late; `idle` for how many steps a seat has had no lane; `told` who was left idle."""

    paces: dict[str, dict[int, float]] = field(default_factory=dict)
    windows: dict[str, dict[int, tuple[float, ...]]] = field(default_factory=dict)
    since: int = 0
    steps: int = 0
    changes: tuple[int, ...] = ()
    idle: dict[int, int] = field(default_factory=dict)
    told: tuple[int, ...] = ()

    def shares(
        self,
        key: str,
        seats: Sequence[int],
        costs: tuple[float, ...],
        sizes: tuple[int, ...] = (),
        rooms: tuple[int, ...] = (),
    ) -> Shares:
        """What is to be shared out between `seats`, at the paces in force."""
        return Shares(costs, self._paces(key, seats), sizes, rooms)

    def speeds(self, seats: Sequence[int]) -> list[float]:
        """How fast each seat is, compared with each other, whatever the lanes."""
        key = next(reversed(self.paces), "")
        return [1 / pace for pace in self._paces(key, seats)]

    def _paces(self, key: str, seats: Sequence[int]) -> tuple[float, ...]:
        """Where a size of lanes has not been seen yet, another one tells."""
        return as_usual(self.paces.get(key) or next(reversed(self.paces.values()), {}), seats)

    def probes(self, runs: Runs, seats: Sequence[int]) -> Runs:
        """From time to time an idle seat gets one lane, to see whether it has become faster."""
        for place, seat in enumerate(seats):
            if not runs[place] and self.idle.get(seat, 0) >= self._patience(seat):
                return with_one(runs, place)
        return runs

    def _patience(self, seat: int) -> int:
        """A try costs at most about one part in `_PROBE` of the time until the next one."""
        paces = next(reversed(self.paces.values()), {})
        slower = paces.get(seat, 1.0) / min(paces.values(), default=1.0)
        return math.ceil(_PROBE * max(1.0, slower))

    def state(self) -> dict[str, object]:
        """Its fields, for those who join."""
        return {name: getattr(self, name) for name in self.__dataclass_fields__}


def as_usual(paces: Mapping[int, float], seats: Sequence[int]) -> tuple[float, ...]:
    """The pace of each seat; one that is not known counts as usual."""
    usual = median(paces.values()) if paces else 1.0
    return tuple(paces.get(seat, usual) for seat in seats)


def with_one(runs: Runs, place: int) -> Runs:
    """The same, but the worker at `place`, which has nothing, takes a lane from a neighbour."""
    changed = list(runs)
    left = [i for i in range(place) if runs[i]]
    if left:
        donor = runs[left[-1]]
        changed[left[-1]], taken = donor[:-1], donor[-1:]
    else:
        right = next(i for i in range(place, len(runs)) if runs[i])
        changed[right], taken = runs[right][1:], runs[right][:1]
    for i in range(left[-1] + 1 if left else 0, len(runs)):
        if i == place:
            changed[i] = taken
        elif not runs[i]:
            at = taken.start if i < place else taken.stop
            changed[i] = range(at, at)
    return tuple(changed)


def decide(
    planning: Planning, measured: Measured, seats: Sequence[int], names: Sequence[str]
) -> tuple[Planning, tuple[str, ...]]:
    """After a step: what plans are made from now on, and what the user is told."""
    key, windows = measured.key, _observed(planning, measured)
    ran = set(measured.seats)
    idle = {seat: 0 if seat in ran else planning.idle.get(seat, 0) + 1 for seat in seats}
    now = replace(
        planning, windows=windows, since=planning.since + 1, steps=planning.steps + 1, idle=idle
    )
    known = {seat: values for seat, values in windows[key].items() if seat in seats}
    if len(known) < 2:
        return now, ()
    for least, gain in _tempi(now):
        enough = all(len(values) >= least or idle[seat] for seat, values in known.items())
        if not enough:
            continue
        late = {seat: values[-least:] for seat, values in known.items()}
        changed, says = _adopted(now, measured, seats, names, late, gain)
        if changed is not now:
            return changed, says
    return now, ()


def _tempi(now: Planning) -> Iterator[tuple[int, float]]:
    """For how many steps which gain must have lasted to be worth a change now. A large gain is
    taken soon, but the sooner after other changes, the later: a load that comes and goes must not
    make plans do the same."""
    soon = min(_PATIENCE, _SHORT * (1 + len(now.changes))) if now.paces else _FIRST
    if now.since >= soon:
        yield (_SHORT if now.paces else _FIRST), _LARGE_GAIN
    if now.since >= _LONG and now.steps % 4 == 0:
        yield _LONG, _SMALL_GAIN


def _observed(planning: Planning, measured: Measured) -> dict[str, dict[int, tuple[float, ...]]]:
    """The windows with this step's paces."""
    sums: dict[int, list[float]] = {}
    for cost, seat, seconds in zip(measured.costs, measured.seats, measured.seconds, strict=True):
        if seconds > 0 and cost > 0:
            total = sums.setdefault(seat, [0.0, 0.0])
            total[0] += seconds
            total[1] += cost
    windows = {key: dict(mine) for key, mine in planning.windows.items() if key != measured.key}
    while len(windows) >= _KEYS:
        del windows[next(iter(windows))]
    mine = dict(planning.windows.get(measured.key, {}))
    for seat, (seconds, cost) in sums.items():
        # Of a device that was idle, what it was like before says nothing.
        before = () if planning.idle.get(seat, 0) else mine.get(seat, ())
        mine[seat] = (*before[1 - _LONG :], seconds / cost)
    return {**windows, measured.key: mine}


def _adopted(
    now: Planning,
    measured: Measured,
    seats: Sequence[int],
    names: Sequence[str],
    late: dict[int, tuple[float, ...]],
    gain: float,
) -> tuple[Planning, tuple[str, ...]]:
    """Take the paces measured of `late` if that makes a step shorter by `gain`, even if the present
    plan has had bad luck."""
    known = {seat: median(values) for seat, values in late.items()}
    force = now.shares(measured.key, seats, measured.costs)
    wanted = replace(force, paces=as_usual(known, seats))
    ratios = [new / old for new, old in zip(wanted.paces, force.paces, strict=True)]
    if max(ratios) * (1 - gain) < min(ratios):
        return now, ()
    chance = max(map(_chance, late.values()))
    least = tuple(pace * (1 - chance) for pace in wanted.paces)
    before = partition(force)
    worth = makespan(replace(wanted, paces=least), before) * (1 - gain)
    # Looking for the best plan takes long for a step of a small model; no plan beats the first.
    if _least(wanted) > worth or makespan(wanted, after := partition(wanted)) > worth:
        return now, ()
    kept = {key: mine for key, mine in now.paces.items() if key != measured.key}
    mine = {**now.paces.get(measured.key, {}), **known}
    recent = (*(step for step in now.changes if step > now.steps - _RECENT), now.steps)
    paces = {**kept, measured.key: mine}
    changed = replace(now, paces=paces, since=0, changes=recent)
    counts, were = ([len(run) for run in runs] for runs in (after, before))
    slowest = max(range(len(seats)), key=lambda place: wanted.paces[place])
    fastest = min(range(len(seats)), key=lambda place: wanted.paces[place])
    times = wanted.paces[slowest] / wanted.paces[fastest]
    lanes = ", ".join(f"{name} {count}" for name, count in zip(names, counts, strict=True))
    says = [
        f"lanes: {lanes} (were {', '.join(map(str, were))}): {names[slowest]} takes {times:.2f} "
        f"times as long for a lane as {names[fastest]}"
    ]
    told = set(now.told)
    for place, longer in _left_idle(wanted, after):
        if seats[place] not in told:
            told.add(seats[place])
            says.append(
                f"{names[place]} would make each step {100 * longer:.0f} % longer; left idle"
            )
    return replace(changed, told=tuple(sorted(told))), tuple(says)


def _chance(values: tuple[float, ...]) -> float:
    """How far their median may be off by chance, as a share of it: three standard errors."""
    if len(values) < 2:
        return 0.0
    middle = median(values)
    spread = (
        max(values) - min(values)
        if len(values) < 3
        else 1.5 * median(abs(value - middle) for value in values)
    )
    return min(0.9, 3 * 1.25 * spread / middle / math.sqrt(len(values)))


def _left_idle(shares: Shares, runs: Runs) -> Iterator[tuple[int, float]]:
    """Who gets nothing, and by which share a step would be longer if it got one lane."""
    for place, run in enumerate(runs):
        if not run:
            yield place, makespan(shares, with_one(runs, place)) / makespan(shares, runs) - 1
