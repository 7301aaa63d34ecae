"""Lanes: cutting a global batch, sharing lanes out, and the tree that adds their results.

All of this is pure. The additions and their order follow from the number of lanes alone; who runs
which lane decides only where a partial sum is made, never what it is.

    lanes     0   1   2   3   4   5   6        (7 lanes: the eighth is absent and skipped)
              └─┬─┘   └─┬─┘   └─┬─┘   │
    level 1    0,1     2,3     4,5    6
                └───┬───┘       └──┬──┘
    level 2        0-3            4-6
                    └──────┬───────┘
    level 3               root
"""

from __future__ import annotations

import heapq
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise

__all__ = [
    "Node",
    "Reduction",
    "arranged",
    "cut",
    "fused",
    "nodes",
    "reduction",
    "reshare",
    "share",
]


@dataclass(frozen=True, slots=True)
class Node:
    """Node (level, index) of the tree: lanes [index * 2**level, (index + 1) * 2**level)."""

    level: int
    index: int

    @property
    def first(self) -> int:
        """The first lane it covers; it names the node's slot in an exchange."""
        return self.index << self.level

    def raised(self, lanes: int) -> Node:
        """The highest node that covers the same present lanes.

        A left node whose right sibling lies beyond the last lane is its own parent: absent lanes
        are skipped, not added as zeros.
        """
        level, index = self.level, self.index
        while level < depth(lanes) and index % 2 == 0 and (index + 1) << level >= lanes:
            level, index = level + 1, index // 2
        return Node(level, index)

    def pairs_with(self, right: Node) -> bool:
        """Whether `right` is the right-hand sibling of this node."""
        return self.level == right.level and self.index % 2 == 0 and right.index == self.index + 1


@dataclass(frozen=True, slots=True)
class Reduction:
    """What an exchange has to add: `owners[w]` are the slots that run w has, in order;
    `additions` are (left, right) pairs, each meaning left += right, ending in slot `root`."""

    owners: tuple[tuple[int, ...], ...]
    additions: tuple[tuple[int, int], ...]

    @property
    def slots(self) -> tuple[int, ...]:
        return tuple(slot for owned in self.owners for slot in owned)

    @property
    def root(self) -> int:
        return min(self.slots)


def depth(lanes: int) -> int:
    """The level of the root."""
    return (lanes - 1).bit_length()


def cut(samples: int, lanes: int) -> tuple[range, ...]:
    """Cut a global batch into lanes by position; sizes differ by at most one.

    >>> cut(10, 4)
    (range(0, 3), range(3, 6), range(6, 8), range(8, 10))

    A batch with fewer samples than lanes gives fewer lanes, of one sample each: an empty lane
    has no result and is left out.
    """
    size, longer = divmod(samples, lanes)
    bounds = [lane * size + min(lane, longer) for lane in range(min(samples, lanes) + 1)]
    return tuple(range(a, b) for a, b in pairwise(bounds))


def arranged(costs: Sequence[float], lanes: Sequence[range]) -> list[int]:
    """The order of a batch's samples in which like samples share a lane: little is padded then.

    >>> arranged([5, 1, 7, 3, 2, 8, 6, 4], cut(8, 4))
    [1, 4, 2, 5, 3, 7, 0, 6]

    The cheapest lane comes first, then the dearest, the second cheapest, the second dearest and so
    on, so that runs of lanes cost about the same.
    """
    order = sorted(range(len(costs)), key=costs.__getitem__)
    count = len(lanes)
    ranks = [lane // 2 if lane % 2 == 0 else count - 1 - lane // 2 for lane in range(count)]
    starts = [0] * count
    for lane, after in pairwise(sorted(range(count), key=ranks.__getitem__)):
        starts[after] = starts[lane] + len(lanes[lane])
    return [
        place
        for lane, start in zip(lanes, starts, strict=True)
        for place in order[start : start + len(lane)]
    ]


def share(lanes: int, speeds: Sequence[float]) -> tuple[range, ...]:
    """Give each worker a contiguous run of lanes so that the slowest is done as early as it can be.

    >>> share(8, [1, 1, 1])
    (range(0, 3), range(3, 6), range(6, 8))
    >>> share(8, [1, 0.25])
    (range(0, 7), range(7, 8))

    Giving each next lane to the worker that would end it first is exact for lanes of equal cost.
    """
    counts = [0] * len(speeds)
    ends = [(1 / speed, worker) for worker, speed in enumerate(speeds)]
    heapq.heapify(ends)
    for _ in range(lanes):
        _, worker = heapq.heappop(ends)
        counts[worker] += 1
        heapq.heappush(ends, ((counts[worker] + 1) / speeds[worker], worker))
    runs, start = [], 0
    for count in counts:
        runs.append(range(start, start + count))
        start += count
    return tuple(runs)


def reshare(
    runs: Sequence[range], missing: Collection[int], helpers: Sequence[int]
) -> tuple[tuple[range, ...], dict[int, tuple[range, ...]]]:
    """Share out the runs of the places in `missing` between `helpers`.

    >>> reshare([range(0, 3), range(3, 6), range(6, 8)], {1}, [0, 2])
    ((range(0, 3), range(3, 5), range(5, 6), range(6, 8)), {0: (range(3, 5),), 2: (range(5, 6),)})

    Returns all runs that there are then, from left to right, and the new ones of each helper.
    """
    lost = [runs[place] for place in sorted(missing) if runs[place]]
    pieces = [run for place, run in enumerate(runs) if run and place not in missing]
    work: dict[int, list[range]] = {place: [] for place in helpers}
    done = 0
    shares = share(sum(map(len, lost)), [1.0] * len(helpers))
    for run in lost:
        for place, mine in zip(helpers, shares, strict=True):
            start, stop = max(mine.start, done), min(mine.stop, done + len(run))
            if start < stop:
                part = range(run.start + start - done, run.start + stop - done)
                work[place].append(part)
                pieces.append(part)
        done += len(run)
    pieces.sort(key=lambda run: run.start)
    return tuple(pieces), {place: tuple(parts) for place, parts in work.items()}


def join(stack: list[Node], node: Node, lanes: int) -> list[tuple[Node, Node]]:
    """Push `node` and merge siblings for as long as there are any; returns the merged pairs."""
    pairs = []
    stack.append(node.raised(lanes))
    while len(stack) > 1 and stack[-2].pairs_with(stack[-1]):
        right, left = stack.pop(), stack.pop()
        pairs.append((left, right))
        stack.append(Node(left.level + 1, left.index // 2).raised(lanes))
    return pairs


def nodes(run: range, lanes: int) -> tuple[Node, ...]:
    """The largest complete nodes of a contiguous run of lanes, from left to right."""
    stack: list[Node] = []
    for lane in run:
        join(stack, Node(0, lane), lanes)
    return tuple(stack)


@lru_cache(maxsize=1024)
def reduction(runs: tuple[range, ...], lanes: int) -> Reduction:
    """The additions that are left once each run of lanes has been reduced by itself."""
    held = [nodes(run, lanes) for run in runs]
    stack: list[Node] = []
    pairs: list[tuple[Node, Node]] = []
    for node in sorted((n for worker in held for n in worker), key=lambda n: n.first):
        pairs += join(stack, node, lanes)
    return Reduction(
        owners=tuple(tuple(node.first for node in worker) for worker in held),
        additions=tuple((left.first, right.first) for left, right in pairs),
    )


@lru_cache(maxsize=1024)
def fused(runs: tuple[range, ...]) -> Reduction:
    """`exact=False`: there is one result for each run; they are added left to right."""
    owners = tuple((run.start,) if run else () for run in runs)
    slots = sorted(slot for owned in owners for slot in owned)
    return Reduction(owners, tuple((slots[0], slot) for slot in slots[1:]))
