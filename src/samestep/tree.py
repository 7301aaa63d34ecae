"""Folding lanes' results into nodes as they come, with as few buffers as the tree allows."""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from typing import NamedTuple

from samestep.exchange import Flat
from samestep.lanes import Node, join, nodes

Buffers = Callable[[int], Flat]


class Move(NamedTuple):
    """What becomes of one lane: it is added to the newest buffer, or written to a slot or to the
    scratch buffer of that number; then as many buffers are merged into those before them."""

    adds: bool
    slot: int | None
    scratch: int
    merges: int


class Tree:
    """One worker's run of lanes, in order.

    `slot(first)` is where a node that the exchange will take is built; `scratch(i)` are this
    worker's own buffers for what is merged before that: no more than the tree is deep.
    """

    def __init__(self, run: range, lanes: int, slot: Buffers, scratch: Buffers) -> None:
        self._moves = moves(run, lanes)
        self._slot, self._scratch = slot, scratch
        self._buffers: list[Flat] = []

    def leaf(self, lane: int) -> tuple[Flat, bool]:
        """Where the lane's result goes, and whether it is to be added there or written."""
        move = self._moves[lane]
        if not move.adds:
            self._buffers.append(
                self._scratch(move.scratch) if move.slot is None else self._slot(move.slot)
            )
        return self._buffers[-1], move.adds

    def fold(self, lane: int) -> None:
        """The lane's result is there: merge what is complete."""
        for _ in range(self._moves[lane].merges):
            right = self._buffers.pop()
            self._buffers[-1].add_(right)


@lru_cache(maxsize=1024)
def moves(run: range, lanes: int) -> dict[int, Move]:
    """What becomes of each lane of a run."""
    final = {node.first for node in nodes(run, lanes)}
    stack: list[Node] = []
    buffers: list[bool] = []  # whether each that is in use is a slot
    made = {}
    for lane in run:
        node = Node(0, lane).raised(lanes)
        adds, slot, scratch = bool(stack) and stack[-1].pairs_with(node), None, 0
        if not adds:
            # Invariant: what was begun before a final node is complete, so it lies on slots alone.
            slot = lane if lane in final else None
            scratch = buffers.count(False)
            buffers.append(slot is not None)
        merges = len(join(stack, Node(0, lane), lanes)) - adds
        del buffers[len(buffers) - merges :]
        made[lane] = Move(adds, slot, scratch, merges)
    return made
