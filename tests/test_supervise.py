"""The launcher's decisions, without a process."""

from __future__ import annotations

import itertools
import pickle

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import samestep as ss
from samestep.devices import Device, NumericsClass
from samestep.failure import Failure
from samestep.messages import (
    CatchUp,
    Claim,
    Differs,
    Done,
    Failed,
    NoRoom,
    Ready,
    Result,
    State,
)
from samestep.supervise import (
    Ask,
    Dismiss,
    End,
    Give,
    Grant,
    Lost,
    Policy,
    Publish,
    Returned,
    Say,
    Stage,
    Start,
    Stuck,
    begin,
    decide,
)

CPU = NumericsClass("cpu", "m", 1, "2", "f", "a")
DEVICES = (Device("cpu", 0), Device("cpu", 1), Device("cpu", 2))
KILLED = Lost(9, "step 4, lane 2", "stack", 4)


def play(events, run=None, **policy):
    run = run or begin(DEVICES, Policy(**policy))
    all_instructions = []
    for row, event in events:
        run, instructions = decide(run, row, event)
        all_instructions.append(instructions)
    return run, all_instructions


READY = [(n, Ready(CPU)) for n in range(3)]
DONE = [(n, Done(("f",))) for n in range(3)]
GONE = [(n, Lost(0, "step 4, in finished", "")) for n in range(3)]


def said(instructions):
    return " ".join(i.text for i in instructions if isinstance(i, Say))


def published(instructions):
    return next((i.roster for i in instructions if isinstance(i, Publish)), None)


def test_a_run_that_ends_well_in_any_order():
    for order in itertools.permutations(range(3)):
        run, instructions = play([*READY, *(DONE[n] for n in order)])
        assert instructions[-1] == (Ask(0),)
        run, instructions = play([(0, Result(b"r"))], run)
        assert run.outcome == Returned(b"r", ("f",))
        assert instructions[-1] == (Dismiss(0), Dismiss(1), Dismiss(2))
        for leaving in itertools.permutations(range(3)):
            ended, _ = play([GONE[n] for n in leaving], run)
            assert ended.is_over
            assert ended.outcome == run.outcome


def test_who_is_done_and_dies_is_asked_no_more():
    run, _ = play([*READY, *DONE, (0, KILLED)])
    assert run.asked == 1
    run, _ = play([(1, Result(b"r"))], run)
    assert run.outcome == Returned(b"r", ("f",))


def test_who_dies_before_the_last_is_done_is_not_needed():
    _, instructions = play([*READY, DONE[0], DONE[1], (2, KILLED)])
    assert instructions[-1] == (Ask(0),)


def test_a_lost_worker_is_replaced_and_joins():
    run, (*_, instructions) = play([*READY, (1, KILLED)])
    assert run.outcome is None
    assert published(instructions).rows == (0, 2)
    assert Start(3, 1) in instructions
    assert "worker 1 (cpu:1) was ended by SIGKILL" in said(instructions)
    run, (_, _, instructions) = play([(0, Ready(CPU)), (3, Ready(CPU)), (3, CatchUp())], run)
    roster = published(instructions)
    assert roster.generation == 3
    assert (roster.rows, roster.seats) == ((0, 3, 2), (0, 1, 2))
    assert not run.members[3].is_live
    run, (instructions,) = play([(0, State((3,), 7))], run)
    assert instructions[0] == Give((3,))
    assert "is back, at step 7" in said(instructions)
    run, _ = play([DONE[0], DONE[2]], run)
    assert run.asked is None, "the replacement is part of the team"
    run, _ = play([(3, Done(("f",)))], run)
    assert run.asked == 0


def test_a_replacement_under_way_is_not_waited_for():
    run, _ = play([*READY, (1, KILLED), (3, Ready(CPU)), (3, CatchUp()), DONE[0], DONE[2]])
    assert run.asked == 0
    run, (instructions,) = play([(0, Result(b"r"))], run)
    assert instructions == (Dismiss(0), Dismiss(2), End(3))


def test_who_waits_for_the_state_from_a_lost_worker_is_ended_and_replaced():
    run, _ = play([*READY, (1, KILLED), (3, Ready(CPU)), (3, CatchUp())])
    run, (instructions,) = play([(0, KILLED)], run)
    assert published(instructions).rows == (3, 2)
    assert End(3) in instructions
    assert Start(4, 0) in instructions
    run, (instructions,) = play([(3, KILLED)], run)
    assert published(instructions).rows == (2,)
    assert Start(5, 1) in instructions


def test_all_lost_ends_with_a_report_of_each():
    run, _ = play([*READY, (1, KILLED), (2, Lost(11, "step 4, lane 5", "", 4)), (0, KILLED)])
    assert isinstance(run.outcome, ss.WorkerDied)
    text = str(run.outcome)
    assert text.startswith("no worker is left; lost since the last step:")
    for line in ("worker 1 (cpu:1) was ended by SIGKILL", "worker 2 (cpu:2) was ended by SIGSEGV"):
        assert line in text
    run, _ = play([(0, KILLED)], begin(DEVICES[:1], Policy()))
    assert str(run.outcome).startswith("worker 0 (cpu:0) was ended by SIGKILL")


def test_too_many_losses_without_a_step():
    run, _ = play([*READY, (1, KILLED)], max_losses=1)
    again, _ = play([(2, Lost(9, "step 4, lane 1", "", 4))], run)
    assert "more than max_losses=1" in str(again.outcome)
    later, _ = play([(2, Lost(9, "step 5, lane 1", "", 5))], run)
    assert later.outcome is None, "there was a step in between"


def test_without_replacement_the_others_go_on_alone():
    run, (*_, instructions) = play([*READY, (0, KILLED)], replace=False)
    assert not any(isinstance(i, Start) for i in instructions)
    assert run.first == 1
    assert run.outcome is None


def test_replacements_that_never_come_to_life_are_given_up():
    run, _ = play([*READY, (1, KILLED)])
    for row in (3, 4, 5):
        run, (instructions,) = play([(row, Lost(9, "its start", "", row))], run)
        assert Start(row + 1, 1) in instructions
        assert published(instructions) is None, "nobody counted on it"
    run, (instructions,) = play([(6, Lost(9, "its start", "", 9))], run)
    assert not any(isinstance(i, Start) for i in instructions)
    assert "there will be no other" in said(instructions)


def test_a_worker_that_hangs_is_ended_and_told_as_hanging():
    run, (*_, instructions) = play([*READY, (2, Stuck("text"))])
    assert instructions == (Say("text"), End(2))
    run, (instructions,) = play([(2, KILLED)], run)
    assert "worker 2 (cpu:2) was ended because it hung" in said(instructions)


def test_no_room_for_a_lane():
    run, (*_, instructions) = play([*READY, (1, NoRoom(32, 8))])
    assert published(instructions).rooms == (0, 32, 0)
    assert "such lanes go to worker 0 (cpu:0), worker 2 (cpu:2)" in said(instructions)
    run, _ = play([(0, NoRoom(32, 8)), (2, NoRoom(40, 8))], run)
    assert isinstance(run.outcome, ss.OutOfMemory)
    assert "a lane of 40 samples; lanes=16 would make lanes of 20" in str(run.outcome)


def test_a_broken_device_is_dropped_by_majority():
    digests = ((0, 5), (1, 6), (2, 5))
    run, (*_, first, second) = play(
        [*READY, (0, Differs(100, digests, (1,))), (2, Differs(100, digests, (1,)))]
    )
    assert first == (End(1),)
    assert second == (), "it is ended once"
    run, (instructions,) = play([(1, KILLED)], run)
    assert "had other weights than the others at step 100" in said(instructions)
    run, _ = play([*READY, (0, Differs(100, digests[:2], ()))])
    assert isinstance(run.outcome, ss.DeviceDiffers)
    assert "0000000000000005" in str(run.outcome)
    assert "0000000000000006" in str(run.outcome)


def test_the_first_failure_counts():
    first, second = (Failure.capture(ValueError(text)) for text in ("first", "second"))
    run, instructions = play([*READY, (2, Failed(first)), (0, Failed(second)), (1, KILLED)])
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
    late, _ = play([(1, Claim("e", 10, "a "))], run)
    assert late.outcome is None, "who catches up has no weights to compare yet"
    run, _ = decide(run, 1, Claim("e", 10, "a c"))
    assert isinstance(run.outcome, ss.TeamError)
    assert "workers 0 and 1 built different models: they differ in the values" in str(run.outcome)
    run, _ = play([(0, Claim("e", 10, "a b")), (1, Claim("e", 12, "c b"))])
    assert "they differ in parameters or buffers" in str(run.outcome)


def test_other_weights_at_the_end():
    odd = [DONE[0], DONE[1], (2, Done(("g",)))]
    run, _ = play([*READY, *odd])
    assert isinstance(run.outcome, ss.DeviceDiffers)
    assert "worker 2 (cpu:2): g" in str(run.outcome)
    run, _ = play([*READY, *odd], exact=False)
    assert run.asked == 0


@given(st.data())
@settings(max_examples=300, deadline=None)
def test_whatever_happens_the_run_ends_or_somebody_goes_on(data):
    """Random losses, joins and ends: never a team without a live member, never two in a seat."""
    run, _ = play(READY)
    for step in range(data.draw(st.integers(1, 25))):
        there = [m for m in run.members if m.stage is not Stage.GONE]
        if not there:
            break
        member = data.draw(st.sampled_from(there))
        events = [Lost(9, "p", "", step // 3)]
        if not member.joined:
            events += [Ready(CPU), CatchUp()]
        waiting = tuple(m.row for m in there if m.counts and not m.is_live)
        if member.is_live and waiting:
            events.append(State(waiting, step))
        if member.is_live and member.stage is Stage.RUNNING:
            events.append(Done(("f",)))
        if run.asked == member.row:
            events.append(Result(b""))
        run, _ = decide(run, member.row, data.draw(st.sampled_from(events)))
        if run.outcome is None:
            assert any(m.counts and m.is_live for m in run.members)
            assert len(set(run.roster.seats)) == len(run.roster)
    while run.outcome is None:
        live = [m for m in run.members if m.counts and m.is_live and m.stage is not Stage.DONE]
        event = (live[0].row, Done(("f",))) if live else (run.asked, Result(b""))
        run, _ = decide(run, *event)
    assert isinstance(run.outcome, (Returned, ss.WorkerDied))


def test_what_happened_is_told_by_signal_name():
    from samestep.processes import describe_exit

    assert "SIGTERM (asked to end from outside)" in describe_exit(15)
    assert "the kernel's out-of-memory killer)" in describe_exit(9, out_of_memory=True)
    assert "was not at work" in describe_exit(9)
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
