"""Folding lanes' results into nodes as they come, with as few buffers as the tree allows."""

from __future__ import annotations

from collections.abc import Callable

from samestep.exchange import Flat
from samestep.lanes import Node, join, nodes

Buffers = Callable[[int], Flat]


class Tree:
    """One worker's run of lanes, in order.

    `slot(first)` is where a node that the exchange will take is built; `scratch(i)` are this
    worker's own buffers for what is merged before that: no more than the tree is deep.
    """

    def __init__(self, run: range, lanes: int, slot: Buffers, scratch: Buffers) -> None:
        self._lanes, self._slot, self._scratch = lanes, slot, scratch
        self._final = {node.first for node in nodes(run, lanes)}
        self._stack: list[Node] = []
        self._buffers: list[Flat] = []
        self._slots = 0  # how many of them are slots

    def leaf(self, lane: int) -> tuple[Flat, bool]:
        """Where the lane's result goes, and whether it is to be added there or written."""
        node = Node(0, lane).raised(self._lanes)
        if self._stack and self._stack[-1].pairs_with(node):
            return self._buffers[-1], True
        if lane in self._final:
            # Invariant: what was begun before it is complete, so it lies on slots alone.
            buffer, self._slots = self._slot(lane), self._slots + 1
        else:
            buffer = self._scratch(len(self._buffers) - self._slots)
        self._buffers.append(buffer)
        return buffer, False

    def fold(self, lane: int) -> None:
        """The lane's result is there: merge what is complete."""
        pairs = join(self._stack, Node(0, lane), self._lanes)
        for _ in pairs if len(self._buffers) == len(self._stack) + len(pairs) else pairs[1:]:
            right = self._buffers.pop()
            self._buffers[-1].add_(right)
