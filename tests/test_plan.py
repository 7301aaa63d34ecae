"""Planning: as good as trying everything, fast for a thousand devices, steady, quick to follow."""

from __future__ import annotations

import itertools
import random
import time
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import jobs
import samestep as ss
from samestep.lanes import nodes, share
from samestep.plan import Measured, Planning, Shares, decide, makespan, partition, with_one

costs = st.lists(st.integers(1, 9).map(float), min_size=1, max_size=9)
paces = st.lists(st.sampled_from([0.3, 0.5, 1.0, 1.7, 2.0, 4.0, 11.0]), min_size=1, max_size=4)


def all_cuts(lanes, workers):
    for cuts in itertools.combinations_with_replacement(range(lanes + 1), workers - 1):
        bounds = [0, *cuts, lanes]
        yield tuple(range(a, b) for a, b in itertools.pairwise(bounds))


def fits(shares, runs):
    return all(
        not room or shares.sizes[lane] < room
        for run, room in zip(runs, shares.rooms, strict=True)
        for lane in run
    )


def count_nodes(runs, lanes):
    return sum(len(nodes(run, lanes)) for run in runs)


@given(costs, paces, st.data())
@settings(max_examples=300, deadline=None)
def test_no_cut_is_better(costs, paces, data):
    """Against every contiguous cut: the time, then idle workers, then nodes."""
    lanes, workers = len(costs), len(paces)
    sizes = tuple(data.draw(st.lists(st.integers(1, 4), min_size=lanes, max_size=lanes)))
    rooms = tuple(
        data.draw(st.lists(st.sampled_from([0, 0, 2, 4]), min_size=workers, max_size=workers))
    )
    shares = Shares(tuple(costs), tuple(paces), sizes, rooms)
    cuts = [runs for runs in all_cuts(lanes, workers) if fits(shares, runs)]
    if not cuts:  # nobody has the memory: then it counts for nothing
        cuts = list(all_cuts(lanes, workers))

    def value(runs):
        return makespan(shares, runs), sum(not run for run in runs), count_nodes(runs, lanes)

    runs = partition(shares)
    assert runs in cuts
    best = min(map(value, cuts))
    assert value(runs)[0] == pytest.approx(best[0], rel=1e-9)
    tied = [v for v in map(value, cuts) if v[0] <= best[0] * (1 + 1e-9)]
    assert value(runs)[1:] == min(v[1:] for v in tied)


@given(st.integers(1, 40), st.lists(st.floats(0.1, 10), min_size=1, max_size=6))
@settings(max_examples=200, deadline=None)
def test_lanes_alike_are_shared_as_well_as_one_by_one(lanes, speeds):
    """`share` gives each next lane to the worker that would end it first, which is optimal."""
    shares = Shares((1.0,) * lanes, tuple(1 / speed for speed in speeds))
    best = makespan(shares, share(lanes, speeds))
    assert makespan(shares, partition(shares)) <= best * (1 + 1e-9)


def test_a_thousand_devices_within_50_ms_and_a_hundredth():
    """Speeds drift; lanes are many enough that the best possible is known to a thousandth."""
    draw = random.Random(0)
    speeds = [draw.uniform(0.1, 1) for _ in range(1000)]
    worst_s = 0.0
    for lanes in (1000, 4000, 20_000):
        for _ in range(5):
            speeds = [max(0.05, speed * draw.uniform(0.9, 1.1)) for speed in speeds]
            shares = Shares((32.0,) * lanes, tuple(1 / speed for speed in speeds))
            began = time.perf_counter()
            runs = partition(shares)
            worst_s = max(worst_s, time.perf_counter() - began)
            best = makespan(shares, share(lanes, speeds))  # optimal for lanes alike
            assert makespan(shares, runs) <= best * 1.01
    assert worst_s < 0.05, f"{worst_s * 1e3:.0f} ms"


@given(st.lists(st.integers(0, 3), min_size=2, max_size=6).filter(any), st.data())
def test_an_idle_worker_takes_one_lane_of_a_neighbour(counts, data):
    idle = [place for place, count in enumerate(counts) if not count]
    if not idle:
        return
    bounds = [0, *itertools.accumulate(counts)]
    runs = tuple(range(a, b) for a, b in itertools.pairwise(bounds))
    place = data.draw(st.sampled_from(idle))
    changed = with_one(runs, place)
    assert [lane for run in changed for lane in run] == list(range(sum(counts)))
    assert len(changed[place]) == 1
    assert sum(abs(len(a) - len(b)) for a, b in zip(runs, changed, strict=True)) == 2


# Over time


class Simulated:
    """Devices whose lanes take what they take, planned as a team plans."""

    def __init__(self, paces, lanes=32, noise=0.0, seed=0):
        self.paces, self.costs, self.noise = list(paces), (8.0,) * lanes, noise
        self.planning, self.draw, self.said = Planning(), random.Random(seed), []
        self.seats = tuple(range(len(paces)))

    def runs(self):
        shares = self.planning.shares("0 8", self.seats, self.costs)
        return self.planning.probes(partition(shares), self.seats)

    def step(self):
        runs, seats, seconds = self.runs(), [], []
        for seat, run in enumerate(runs):
            for _ in run:
                seats.append(seat)
                seconds.append(8 * self.paces[seat] * self.draw.lognormvariate(0, self.noise))
        names = [f"cpu:{seat}" for seat in self.seats]
        measured = Measured("0 8", self.costs, seats, seconds)
        self.planning, says = decide(self.planning, measured, self.seats, names)
        self.said += says
        return runs

    def best(self):
        shares = Shares(self.costs, tuple(self.paces))
        return makespan(shares, partition(shares))

    def now(self):
        return makespan(Shares(self.costs, tuple(self.paces)), self.runs())


@pytest.mark.parametrize("lanes", [8, 32])
@pytest.mark.parametrize("workers", [2, 3, 4])
def test_equal_devices_keep_their_plan(workers, lanes):
    """Noise of 10 % in each lane moves nothing."""
    team = Simulated([1.0] * workers, lanes, noise=0.1)
    plans = {team.step() for _ in range(2000)}
    assert len(plans) == 1, team.said
    assert sorted(map(len, *plans)) == sorted(map(len, share(lanes, [1.0] * workers)))
    assert not team.said


def test_single_slow_steps_move_nothing():
    team = Simulated([1.0, 1.0])
    for step in range(500):
        team.paces[1] = 20.0 if step % 7 == 3 else 1.0
        team.step()
    assert not team.said


@pytest.mark.parametrize("slow", [2.0, 4.0, 10.0])
def test_the_plan_follows_within_20_steps_and_comes_back(slow):
    team = Simulated([1.0, 1.0], noise=0.05)
    for pace in (1.0, slow, 1.0, slow):
        team.paces[1] = pace
        for _ in range(20):
            team.step()
        assert team.now() <= team.best() * 1.06
        for _ in range(100):
            team.step()
        assert team.now() <= team.best() * 1.03
    assert len(team.said) <= 3 * 3, "a change is one line, and there are few"


def test_a_load_that_comes_and_goes_does_not_make_plans_do_the_same():
    team = Simulated([1.0, 1.0])
    for step in range(600):
        team.paces[1] = 3.0 if step // 6 % 2 else 1.0
        team.step()
    assert len(team.said) <= 600 / 20


def test_too_slow_to_help_is_told_once_and_tried_again():
    team = Simulated([1.0, 1.0, 40.0], lanes=8)
    plans = [team.step() for _ in range(20)]
    assert len(plans[-1][2]) == 0
    assert [text for text in team.said if "left idle" in text] == [
        "cpu:2 would make each step 900 % longer; left idle"
    ]
    later = [len(team.step()[2]) for _ in range(8000)]
    assert 1 <= sum(later) <= 8000 / (64 * 10), "tried again, for less than a hundredth of the time"
    assert sum("left idle" in text for text in team.said) == 1
    team.paces[2] = 1.0
    for _ in range(64 * 41):
        team.step()
    assert len(team.runs()[2]) >= 2, "it has become as fast as the others"


def test_who_comes_or_goes_is_planned_at_once():
    team = Simulated([1.0, 2.0, 1.0])
    for _ in range(40):
        team.step()
    costs = team.costs
    two = partition(team.planning.shares("0 8", (0, 1), costs))
    assert 20 <= len(two[0]) <= 22, "what is known of those that are left counts"
    four = partition(team.planning.shares("0 8", (0, 1, 2, 3), costs))
    assert abs(len(four[3]) - len(four[0])) <= 2, "who is not known counts as usual"


def test_another_size_of_lanes_is_planned_by_what_is_known():
    team = Simulated([1.0, 3.0])
    for _ in range(20):
        team.step()
    runs = partition(team.planning.shares("0 3", (0, 1), (3.0,) * 8))
    assert [len(run) for run in runs] == [6, 2]


def test_planning_is_its_fields():
    team = Simulated([1.0, 3.0])
    for _ in range(9):
        team.step()
    assert Planning(**team.planning.state()) == team.planning
    assert replace(team.planning, since=0) != Planning()


# In a training


def plan_of(team, steps=30):
    seen = []

    def loss(model, x, y):
        time.sleep(0.002 * len(x) * (3 if team.number == 1 else 1))
        return jobs.cross_entropy(model, x, y)

    model = ss.models.mlp(100, (8,), 5)
    trainer = team.trainer(model, torch_sgd(model), loss)
    for _ in team.epochs(100):
        for batch in team.batches(jobs.images(64), 32):
            trainer.step(batch)
            seen.append(tuple(team.plan.values()))
            if team.position.step == steps:
                return trainer.fingerprint(), seen, team.plan
    raise AssertionError


def torch_sgd(model):
    import torch

    return torch.optim.SGD(model.parameters(), lr=0.1)


def test_a_slow_worker_gets_fewer_lanes_and_the_same_bits(capfd, tmp_path):
    alone = ss.launch(plan_of, devices="1xcpu", lanes=16)[0]
    run = tmp_path / "run"
    result, seen, plan = ss.launch(plan_of, devices="2xcpu", lanes=16, run=run)
    assert result == alone
    assert seen[0] == (8, 8)
    assert list(plan) == ["cpu:0", "cpu:1"]
    assert plan["cpu:0"] == 12
    said = capfd.readouterr().err
    assert "lanes: cpu:0 12, cpu:1 4 (were 8, 8): cpu:1 takes" in said
    assert "times as long for a lane as cpu:0" in (run / "events.log").read_text()


def test_each_size_of_lanes_has_paces_of_its_own():
    """The second worker is slow with large lanes only; the last batch has small ones."""

    def main(team):
        def loss(model, x, y):
            time.sleep(0.002 * (4 if team.number == 1 and len(x) > 1 else 1))
            return jobs.cross_entropy(model, x, y)

        model = ss.models.mlp(100, (8,), 5)
        trainer = team.trainer(model, torch_sgd(model), loss)
        seen = {}
        for _ in team.epochs(16):
            for batch in team.batches(jobs.images(80), 64):
                trainer.step(batch)
                seen[len(batch)] = team.plan["cpu:0"]
        return seen

    seen = ss.launch(main, devices="2xcpu", lanes=16)
    assert seen[64] >= 11
    assert seen[16] <= 9


def test_costs_of_samples_are_planned_for():
    """The dear lanes are among the first eight: half of the lanes are not half of the work."""

    def main(team):
        data = jobs.images(64)
        data.cost = lambda index: 9.0 if index < 16 else 1.0
        model = ss.models.mlp(100, (8,), 5)
        trainer = team.trainer(model, torch_sgd(model), jobs.cross_entropy)
        for batch in team.batches(data, 64, shuffle=False):
            trainer.step(batch)
        return trainer.fingerprint(), list(team.plan.values())

    alone, _ = ss.launch(main, devices="1xcpu", lanes=16)
    assert ss.launch(main, devices="2xcpu", lanes=16) == (alone, [5, 11])


def test_a_column_that_is_called_cost_is_no_method():
    def main(team):
        data = jobs.images(8)
        data.cost = 3.0
        return [len(batch) for batch in team.batches(data, 8)]

    assert ss.launch(main, devices="1xcpu") == [8]


def test_a_cost_must_be_above_0():
    def main(team):
        data = jobs.images(8)
        data.cost = lambda index: 0
        for _ in team.batches(data, 8):
            pass

    with pytest.raises(ss.UsageError, match=r"cost\(index\) adds up to 0.0 for a lane"):
        ss.launch(main, devices="1xcpu")


def test_time_is_known_by_kind():
    def main(team):
        plan_of(team, steps=5)
        return team.board.clock.steps, team.board.spent(team.board.me)

    steps, spent = ss.launch(main, devices="2xcpu", lanes=4)
    assert [spent.step for spent in steps] == [1, 2, 3, 4, 5]
    assert all(seconds >= 0 for _, kinds in steps for seconds in kinds)
    assert sum(spent) == pytest.approx(sum(sum(kinds) for _, kinds in steps), rel=0.01)
    assert spent[1] > 0.5 * 5 * 0.002 * 16, "most of it computing"
    assert spent[2] > spent[1] * 0.3, "the faster one waits, at first"
