"""Workers that die, hang or raise, at every point of a training: the run's end and its hash."""

from __future__ import annotations

import json
import os
import re
import signal
import time
from functools import partial
from pathlib import Path

import pytest

import samestep as ss
from conftest import DEADLINE_S
from faults import DEADLY, POINTS, RAISING, Fault, Planted, train
from samestep import checkpoint
from samestep.lanes import share

FLOOR_S = 0.4  # of the watch for hanging workers


@pytest.fixture(scope="module")
def undisturbed():
    return ss.launch(train, devices="1xcpu", lanes=6)[:3]


def alike(workers, lanes, step):
    """Lanes as small as these are no measure, and the one who is to be struck must have some."""
    return [len(run) for run in share(lanes, [1.0] * workers)]


def strike(fault, workers, tmp_path, **options):
    return ss.launch(
        train,
        devices=f"{workers}xcpu",
        plan=partial(alike, workers),
        lanes=6,
        args=(fault,),
        run=tmp_path / "run",
        save_every=2,
        hang_after=FLOOR_S,
        **options,
    )


@pytest.fixture
def slow_disk(monkeypatch, tmp_path):
    """A checkpoint that is being written stays so until the fault has struck."""
    write = checkpoint._write_file

    def write_file(path, content):
        until = time.monotonic() + 5
        while not (tmp_path / "fired").exists() and time.monotonic() < until:
            time.sleep(0.005)
        write(path, content)

    monkeypatch.setattr(checkpoint, "_write_file", write_file)


@pytest.mark.parametrize("workers", [2, 3])
@pytest.mark.parametrize("point", POINTS)
@pytest.mark.parametrize("kind", DEADLY)
def test_a_worker_is_lost(kind, point, workers, undisturbed, tmp_path, request, capfd):
    if point == "while a checkpoint is written":
        request.getfixturevalue("slow_disk")
    fault = Fault(kind, point, str(tmp_path))
    slow = ("while a checkpoint is written", "while a replacement catches up")
    pace = 0.08 if point in slow else 0.0
    if point == "while the team re-forms" and workers == 2:
        with pytest.raises(ss.WorkerDied, match="no worker is left") as caught:
            strike(fault, workers, tmp_path)
        assert (tmp_path / "fired").exists()
        assert "worker 0 (cpu:0)" in str(caught.value)
        assert "worker 1 (cpu:1)" in str(caught.value)
        return
    *result, times = strike(fault, workers, tmp_path, kwargs={"pace": pace})
    assert tuple(result) == undisturbed
    fired = float((tmp_path / "fired").read_text())
    later = [moment - fired for moment in times if moment > fired]
    if point not in ("in evaluate", "while a replacement catches up"):
        assert min(later) < (FLOOR_S + 2.0 if kind == "SIGSTOP" else 0.5)
    said = capfd.readouterr().err
    assert f"{fault_name(fault)}" in said
    lines = (tmp_path / "run" / "log.jsonl").read_text().splitlines()
    assert [json.loads(line)["right"] for line in lines] == undisturbed[1]
    assert not list(tmp_path.glob("run/checkpoints/.*"))


def fault_name(fault):
    return {
        "SIGKILL": "was ended by SIGKILL",
        "SIGSEGV": "was ended by SIGSEGV",
        "SIGSTOP": "has not moved for",
        "exit": "left with exit status 3",
    }[fault.kind]


@pytest.mark.parametrize("workers", [2, 3])
@pytest.mark.parametrize("point", POINTS)
@pytest.mark.parametrize("kind", RAISING)
def test_the_users_code_raises(kind, point, workers, tmp_path, request):
    if point == "while a checkpoint is written":
        request.getfixturevalue("slow_disk")
    fault = Fault(kind, point, str(tmp_path))
    pace = 0.05 if point == "while a checkpoint is written" else 0.0
    loaders = 1 if kind == "loader" else 0
    with pytest.raises(Planted, match=f"in (the|a) {kind}") as caught:
        strike(fault, workers, tmp_path, kwargs={"pace": pace, "loaders": loaders})
    assert (tmp_path / "fired").exists()
    assert re.match(r"worker \d \(cpu:\d\), ", caught.value.__notes__[0])
    assert not list(Path(tmp_path).glob("run/checkpoints/.*"))


class Late:
    """Unpacked by a worker before it joins the team: the first one to do so waits there until the
    replacement of a lost one has come as far."""

    number = -1

    def __init__(self, folder):
        self.folder = folder

    def __setstate__(self, state):
        self.__dict__.update(state)
        for number in range(9):
            try:
                os.close(os.open(f"{self.folder}/{number}", os.O_CREAT | os.O_EXCL))
            except FileExistsError:
                continue
            Late.number = number
            break
        until = time.monotonic() + DEADLINE_S
        while Late.number == 0 and not Path(self.folder, "3").exists():
            assert time.monotonic() < until
            time.sleep(0.005)


def lost_early(team, late):
    if Late.number == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    return train(team)[:3]


def test_a_worker_that_starts_after_another_is_lost(undisturbed, tmp_path):
    """It begins with the team that the others began with, though that is no more."""
    result = ss.launch(lost_early, devices="3xcpu", lanes=6, args=(Late(str(tmp_path)),))
    assert (tmp_path / "3").exists()
    assert result == undisturbed
