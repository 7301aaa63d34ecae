"""One contract for every exchange: the bits of a plain loop over lanes in one process."""

from __future__ import annotations

from functools import partial

import pytest
import torch

import samestep as ss
from samestep.exchange import Flat, Shape, Work
from samestep.exchange.collectives import Collectives
from samestep.lanes import depth, reduction, share
from samestep.prove import uneven
from samestep.tree import Tree

SIZES = [Shape(1, 1), Shape(15, 3), Shape(1000, 130), Shape(70_001, 17), Shape(0, 5)]


def lane_result(shape, lane, step):
    generator = torch.Generator().manual_seed(1000 * step + lane)
    return Flat(
        torch.randn(shape.f32, generator=generator),
        torch.randn(shape.f64, generator=generator, dtype=torch.float64) * 1e3**lane,
    )


def plain_loop(shape, lanes, step):
    """Nodes by level, from the bottom, in one process."""
    level = [lane_result(shape, lane, step) for lane in range(lanes)]
    for _ in range(depth(lanes)):
        level = [
            Flat(*(a + b for a, b in zip(level[i], level[i + 1], strict=True)))
            if i + 1 < len(level)
            else level[i]
            for i in range(0, len(level), 2)
        ]
    return level[0]


def keep_contract(team, transport, folder, lanes):
    """Many exchanges in a row, with equal and uneven plans that change at every step."""
    if transport == "collectives":
        import torch.distributed as dist

        dist.init_process_group(
            "gloo",
            init_method=f"file://{folder}/rendezvous",
            rank=team.number,
            world_size=team.size,
        )
    checked = 0
    for i, shape in enumerate(SIZES):
        if transport == "collectives":
            exchange = Collectives(shape, team.device)
        else:
            exchange = team.exchange(shape, lanes, 0, f"test {i}", "")
        scratch = [Flat.empty(shape, team.device) for _ in range(depth(lanes) + 1)]
        for step in range(7):
            present = lanes if step != 3 else max(1, lanes - 2)
            if step % 2:
                counts = uneven(team.size, present, step)
                starts = [sum(counts[:w]) for w in range(team.size)]
                runs = tuple(range(a, a + n) for a, n in zip(starts, counts, strict=True))
            else:
                runs = share(present, [1.0] * team.size)

            def do(run, exchange=exchange, shape=shape, present=present, step=step, own=scratch):
                tree = Tree(run, present, exchange.slot, own.__getitem__)
                for lane in run:
                    buffer, add = tree.leaf(lane)
                    result = lane_result(shape, lane, step)
                    if add:
                        buffer.add_(result)
                    else:
                        for target, source in zip(buffer, result, strict=True):
                            target.copy_(source)
                    tree.fold(lane)

            do(runs[team.number])
            total = exchange.reduce(Work(runs, partial(reduction, lanes=present), do))
            expected = plain_loop(shape, present, step)
            for got, wanted in zip(total, expected, strict=True):
                assert torch.equal(got, wanted), (shape, step, runs)
            checked += 1
    if transport == "collectives":
        dist.barrier()
        dist.destroy_process_group()
    return checked


@pytest.mark.parametrize("lanes", [1, 5, 8])
@pytest.mark.parametrize("workers", [1, 2, 3, 4])
@pytest.mark.parametrize("transport", ["shared memory", "collectives"])
def test_contract(transport, workers, lanes, tmp_path):
    args = (transport, str(tmp_path), lanes)
    checked = ss.launch(
        keep_contract, devices=f"{workers}xcpu", args=args, lanes=max(lanes, workers)
    )
    assert checked == len(SIZES) * 7


def two_calls(team, what):
    model = torch.nn.Linear(2, 2)
    trainer = team.trainer(model, torch.optim.SGD(model.parameters(), lr=0.1), per_example)
    data = ss.data.Tensors(torch.zeros(4, 2))
    if what == "evaluate on the first" and team.is_first:
        trainer.evaluate(data, ss.metrics.mean_loss)
    if what == "a step less on the last" and team.number == 1:
        return
    for batch in team.batches(data, 4):
        trainer.step(batch)


def per_example(model, x):
    return model(x).sum(1)


@pytest.mark.parametrize("what", ["evaluate on the first", "a step less on the last"])
def test_calls_that_do_not_match_are_an_error_and_not_a_hang(what):
    with pytest.raises(ss.TeamError, match="every worker must make the same calls"):
        ss.launch(two_calls, devices="2xcpu", args=(what,))
