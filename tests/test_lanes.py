"""Cutting, sharing out and the tree: pure, so tried on anything."""

from __future__ import annotations

from itertools import pairwise, product

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from samestep.exchange import add_tree
from samestep.lanes import Node, arranged, cut, depth, fused, nodes, reduction, share
from samestep.tree import Tree


@given(st.integers(0, 500), st.integers(1, 40))
def test_cut_covers_the_batch_in_order_with_sizes_that_differ_by_one(samples, lanes):
    parts = cut(samples, lanes)
    assert [i for part in parts for i in part] == list(range(samples))
    assert len(parts) == min(samples, lanes)
    sizes = [len(part) for part in parts]
    assert not sizes or max(sizes) - min(sizes) <= 1
    assert sizes == sorted(sizes, reverse=True)


@given(
    st.integers(0, 9),
    st.lists(st.sampled_from([1.0, 0.5, 0.25, 0.9, 0.1, 3.0]), min_size=1, max_size=3),
)
def test_share_is_the_best_there_is(lanes, speeds):
    runs = share(lanes, speeds)
    assert [lane for run in runs for lane in run] == list(range(lanes))
    slowest = max(len(run) / speed for run, speed in zip(runs, speeds, strict=True))
    best = min(
        max(n / speed for n, speed in zip(counts, speeds, strict=True))
        for counts in product(range(lanes + 1), repeat=len(speeds))
        if sum(counts) == lanes
    )
    assert slowest == pytest.approx(best)


def all_runs(draw, lanes, workers):
    cuts = sorted(draw(st.lists(st.integers(0, lanes), min_size=workers - 1, max_size=workers - 1)))
    return tuple(range(a, b) for a, b in pairwise([0, *cuts, lanes]))


@st.composite
def plans(draw):
    lanes = draw(st.integers(1, 33))
    return lanes, all_runs(draw, lanes, draw(st.integers(1, 6)))


def plain_tree(values: list[torch.Tensor], level: int, index: int) -> torch.Tensor | None:
    """The definition, by recursion: absent lanes are skipped."""
    if level == 0:
        return values[index] if index < len(values) else None
    left = plain_tree(values, level - 1, 2 * index)
    right = plain_tree(values, level - 1, 2 * index + 1)
    if left is None or right is None:
        return left if right is None else right
    return left + right


class Pair:
    """Stands for a pair of flat vectors."""

    def __init__(self) -> None:
        self.value = torch.zeros(3)

    def add_(self, other: Pair) -> None:
        self.value.add_(other.value)


@given(plans(), st.integers(0, 2**32))
@example((24, (range(1), range(1, 24))), 0)  # five nodes beside each other, then three buffers
@settings(max_examples=300)
def test_any_plan_gives_the_bits_of_the_plain_tree(plan, seed):
    lanes, runs = plan
    generator = torch.Generator().manual_seed(seed)
    values = [torch.randn(3, generator=generator) * 10.0 ** (i % 5) for i in range(lanes)]
    slots: dict[int, Pair] = {}
    for run in runs:
        scratch = [Pair() for _ in range(depth(lanes) - 1)]  # no more are needed
        slot = lambda lane: slots.setdefault(lane, Pair())  # noqa: E731
        tree = Tree(run, lanes, slot, scratch.__getitem__)
        for lane in run:
            buffer, add = tree.leaf(lane)
            buffer.value = buffer.value + values[lane] if add else values[lane].clone()
            tree.fold(lane)
    plan_of_sums = reduction(runs, lanes)
    assert sorted(slots) == sorted(plan_of_sums.slots)
    pieces = {slot: slots[slot].value for slot in plan_of_sums.slots}
    before = {slot: value.clone() for slot, value in pieces.items()}
    total = add_tree(pieces, plan_of_sums, torch.empty(3))
    assert torch.equal(total, plain_tree(values, depth(lanes), 0))
    assert all(torch.equal(pieces[slot], before[slot]) for slot in pieces), "nodes were changed"


def test_order_matters_at_all():
    """The control: adding the same lanes from left to right gives other bits."""
    values = [torch.randn(1000, generator=torch.Generator().manual_seed(i)) for i in range(8)]
    left = values[0].clone()
    for value in values[1:]:
        left += value
    assert not torch.equal(left, plain_tree(values, 3, 0))


@given(plans())
def test_nodes_are_complete_and_as_large_as_can_be(plan):
    lanes, runs = plan
    for run in runs:
        covered = []
        for node in nodes(run, lanes):
            mine = range(node.first, min(lanes, (node.index + 1) << node.level))
            assert set(mine) <= set(run)
            covered += mine
            parent = Node(node.level + 1, node.index // 2)
            if node.level < depth(lanes):
                around = range(parent.first, min(lanes, (parent.index + 1) << parent.level))
                assert not set(around) <= set(run), "the parent is complete too"
        assert covered == list(run)


def test_fused_runs_are_added_from_left_to_right():
    plan = fused((range(3), range(3, 3), range(3, 8)))
    assert plan.owners == ((0,), (), (3,))
    assert plan.additions == ((0, 3),)


@given(st.lists(st.integers(1, 50), min_size=1, max_size=40), st.integers(1, 12))
def test_like_samples_share_a_lane(costs, count):
    lanes = cut(len(costs), count)
    places = arranged(costs, lanes)
    assert sorted(places) == list(range(len(costs)))
    held = [sorted(costs[places[i]] for i in lane) for lane in lanes]
    # The cheapest, the dearest, the second cheapest, and so on.
    in_order = held[0::2] + held[1::2][::-1]
    assert [cost for lane in in_order for cost in lane] == sorted(costs)
