"""The launcher's decisions, without a process."""

from __future__ import annotations

import itertools
import pickle

import pytest

import samestep as ss
from samestep.devices import Device, NumericsClass
from samestep.failure import Failure
from samestep.messages import Claim, Done, Failed, Ready
from samestep.supervise import End, Grant, Lost, Returned, State, begin, decide

CPU = NumericsClass("cpu", "m", 1, "2", "f", "a")
DEVICES = (Device("cpu", 0), Device("cpu", 1), Device("cpu", 2))


def play(events, exact=True):
    run, all_instructions = begin(DEVICES, exact), []
    for number, event in events:
        run, instructions = decide(run, number, event)
        all_instructions.append(instructions)
    return run, all_instructions


READY = [(n, Ready(CPU)) for n in range(3)]
DONE = [(n, Done(pickle.dumps(n) if n == 0 else None, ("f",))) for n in range(3)]
GONE = [(n, Lost(0, "step 4, in finished", "")) for n in range(3)]


def interleavings():
    """Every order in which three workers can end: each is done, then gone."""
    events = [("done", n) for n in range(3)] + [("gone", n) for n in range(3)]
    for order in itertools.permutations(events):
        if all(order.index(("done", n)) < order.index(("gone", n)) for n in range(3)):
            yield [(DONE if what == "done" else GONE)[n] for what, n in order]


def test_a_run_that_ends_well_in_any_order():
    orders = list(interleavings())
    assert len(orders) == 90
    for order in orders:
        run, instructions = play([*READY, *order])
        assert run.outcome == Returned(pickle.dumps(0), ("f",))
        assert run.is_over
        assert not any(instructions)


def test_a_worker_that_dies_ends_the_others():
    run, instructions = play([*READY, (1, Lost(9, "step 4, lane 2", "stack"))])
    assert isinstance(run.outcome, ss.WorkerDied)
    assert str(run.outcome).startswith("worker 1 (cpu:1) was ended by SIGKILL")
    assert str(run.outcome).endswith("at step 4, lane 2")
    assert run.outcome.__notes__ == ["stack"]
    assert instructions[-1] == (End(0), End(2))
    assert [m.state for m in run.members] == [State.RUNNING, State.GONE, State.RUNNING]


def test_a_worker_that_dies_after_it_was_done_changes_nothing():
    run, _ = play([*READY, DONE[1], (1, Lost(9, "", "")), DONE[0], DONE[2]])
    assert isinstance(run.outcome, Returned)


def test_the_first_failure_counts():
    first, second = (Failure.capture(ValueError(text)) for text in ("first", "second"))
    run, instructions = play([*READY, (2, Failed(first)), (0, Failed(second)), (1, GONE[1][1])])
    assert run.outcome == first
    assert instructions[3] == (End(0), End(1), End(2))


def test_a_device_of_another_class_ends_an_exact_run_only():
    other = NumericsClass("cpu", "m", 1, "2", "f", "b")
    events = [*READY[:2], (2, Ready(other))]
    run, instructions = play(events)
    assert isinstance(run.outcome, ss.DeviceDiffers)
    assert "cpu:2 (worker 2)" in str(run.outcome)
    assert len(instructions[-1]) == 3
    run, _ = play(events, exact=False)
    assert run.outcome is None


def test_shared_memory_is_granted_to_those_who_built_the_same():
    run, instructions = play([*READY, (0, Claim("e", 10, "a b")), (2, Claim("e", 10, "a b"))])
    assert instructions[3:] == [(Grant(0, "e", 10),), (Grant(2, "e", 10),)]
    run, _ = decide(run, 1, Claim("e", 10, "a c"))
    assert isinstance(run.outcome, ss.TeamError)
    assert "workers 0 and 1 built different models: they differ in the values" in str(run.outcome)
    run, _ = play([(0, Claim("e", 10, "a b")), (1, Claim("e", 12, "c b"))])
    assert "they differ in parameters or buffers" in str(run.outcome)


def test_other_weights_at_the_end():
    odd = [DONE[0], DONE[1], (2, Done(None, ("g",)))]
    run, _ = play([*READY, *odd])
    assert isinstance(run.outcome, ss.DeviceDiffers)
    assert "worker 2 (cpu:2): g" in str(run.outcome)
    run, _ = play([*READY, *odd], exact=False)
    assert isinstance(run.outcome, Returned)


def test_what_happened_is_told_by_signal_name():
    from samestep.processes import describe_exit

    assert "SIGTERM (asked to end from outside)" in describe_exit(15)
    assert describe_exit(64 + 0) == "was ended by signal 64" or "SIGRTMAX" in describe_exit(64)
    assert "exit status 7" in describe_exit(7 << 8)


def test_failures_survive_the_way(tmp_path):
    path = tmp_path / "gone.py"
    path.write_text("def f():\n    raise KeyError('k')\n")
    names = {}
    exec(compile(path.read_text(), str(path), "exec"), names)
    try:
        names["f"]()
    except KeyError as error:
        failure = pickle.loads(pickle.dumps(Failure.capture(error).at("here")))
    with pytest.raises(KeyError) as caught:
        raise failure.rebuild()
    assert caught.value.__notes__ == ["here"]
    frames = [(str(e.path), e.lineno + 1, e.name) for e in caught.traceback]
    assert frames[-1] == (str(path), 2, "f")
