"""Hangs, memory that runs out, weights that go wrong, and looking at a step again."""

from __future__ import annotations

import os
import re
import resource
import shlex
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

import jobs
import samestep as ss
from samestep.board import Phase
from samestep.watch import LANES, LONG, Seen, Watch, look


def small(team, trouble=None, loss=jobs.cross_entropy, steps=16, samples=96):
    """A short training; `trouble(team, model)` is called before each step."""
    model = nn.Sequential(nn.Flatten(), nn.Linear(100, 8), nn.Dropout(0.1), nn.Linear(8, 5))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    trainer = team.trainer(model, optimizer, loss)
    data = jobs.images(samples)
    for _ in team.epochs(100):
        for batch in team.batches(data, 24):
            if trouble is not None:
                trouble(team, model)
            trainer.step(batch)
            if team.position.step == steps:
                return trainer.fingerprint()
    raise AssertionError


def once(path):
    try:
        os.close(os.open(path, os.O_CREAT | os.O_EXCL))
    except FileExistsError:
        return False
    return True


# Hangs


def test_a_hang_is_told_with_its_line_and_who_waits(tmp_path, capfd):
    def loss(model, x, y):
        if os.path.exists(tmp_path / "now") and once(tmp_path / "hung"):
            time.sleep(60)
        return jobs.cross_entropy(model, x, y)

    def trouble(team, model):
        if team.position.step == 5 and team.number == 1:
            (tmp_path / "now").touch()

    began = time.monotonic()
    result = ss.launch(small, devices="3xcpu", args=(trouble, loss), hang_after=0.5)
    assert time.monotonic() - began < 8
    assert (tmp_path / "hung").exists()
    assert result == ss.launch(small, devices="1xcpu")
    said = capfd.readouterr().err
    told = re.search(r"worker (\d) \(cpu:\d\) has not moved for \d\.\d s at step \d, lane \d", said)
    assert told, said
    others = " and ".join(f"worker {i}" for i in range(3) if str(i) != told[1])
    assert all(name in said for name in others.split(" and "))
    assert "wait for it; it is ended" in said
    stack = said[said.index("its Python stack") :]
    assert __file__ in stack.splitlines()[1]
    assert "in loss" in stack.splitlines()[1]
    assert "ended because it hung" in said


def test_long_work_on_the_first_worker_is_no_hang(capfd):
    class Slow(ss.metrics.Metric):
        def count(self, outputs, targets):
            time.sleep(0.7)
            return torch.ones(1)

        def value(self, total):
            return total.item()

    def main(team):
        model = nn.Linear(100, 5)
        trainer = team.trainer(
            model,
            torch.optim.SGD(model.parameters(), lr=0.1),
            lambda m, x, y: jobs.cross_entropy(m, x.flatten(1), y),
        )
        for batch in team.batches(jobs.images(48), 12):
            if team.is_first and team.position.step == 2:
                time.sleep(1)  # a plot, a save
            trainer.step(batch)
        evaluated = ss.data.Tensors(torch.zeros(8, 100), torch.zeros(8, dtype=torch.int64))
        return trainer.evaluate(evaluated, Slow(), chunk=4)

    assert ss.launch(main, devices="2xcpu", hang_after=0.3) == 2
    assert "has not moved" not in capfd.readouterr().err


phases = st.sampled_from(list(Phase))


@given(
    phases,
    st.floats(0, 5),
    st.booleans(),
    st.booleans(),
    st.booleans(),
    st.floats(0.1, 60),
    st.floats(0, 2000),
)
def test_who_hangs_and_who_does_not(phase, lane_s, waits, fresh, stopped, floor, passed):
    seen = Seen(phase, 7, lane_s, 1 if waits else -1, fresh, stopped)
    watch, hung = look(Watch(floor), {0: seen}, 100.0)
    assert not hung
    _, hung = look(watch, {0: seen}, 100.0 + passed)
    usual = max(floor, LANES * lane_s)
    if passed <= usual - 1e-6 or (waits and not stopped):
        assert not hung
    if passed > LONG * usual + 1e-6 and not waits and phase not in (Phase.FINISHED, Phase.CATCH_UP):
        assert hung
    if stopped and passed > usual + 1e-6:
        assert hung, "a stopped process does not come back by itself"
    moved = Seen(phase, 8, lane_s, -1, fresh, stopped)
    assert not look(watch, {0: moved}, 100.0 + passed)[1]


def test_workers_that_wait_in_a_ring_are_noticed():
    def waits(row):
        return Seen(Phase.EXCHANGE, 7, 0.01, row, False, False)

    ring = {0: waits(2), 1: waits(0), 2: waits(1), 3: waits(0)}
    watch, _ = look(Watch(1.0), ring, 100.0)
    assert not look(watch, ring, 101.5)[1]
    assert set(look(watch, ring, 102.5)[1]) == {0}
    chain = {0: waits(2), 1: waits(0), 2: Seen(Phase.LANE, 7, 10.0, -1, False, False)}
    watch, _ = look(Watch(1.0), chain, 100.0)
    assert not look(watch, chain, 150.0)[1]


# Memory


def hungry(model, x, y):
    """A lane that needs 300 MB for a moment."""
    torch.empty(75_000_000).fill_(1.0)
    return jobs.cross_entropy(model, x, y)


def limit(megabytes):
    used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (used + megabytes * 2**20,) * 2)


def test_a_worker_without_memory_for_a_lane_leaves_it_to_others(capfd):
    def trouble(team, model):
        if team.number == 1 and team.position.step == 0:
            limit(150)

    result = ss.launch(small, devices="2xcpu", args=(trouble, hungry))
    assert result == ss.launch(small, devices="1xcpu", args=(None, hungry))
    said = capfd.readouterr().err
    assert said.count("worker 1 (cpu:1) has no memory for a lane of 3 samples") == 1
    assert "such lanes go to worker 0 (cpu:0)" in said


def test_python_s_memory_error_counts_too(tmp_path):
    def loss(model, x, y):
        if (tmp_path / "now").exists() and once(tmp_path / "raised"):
            raise MemoryError
        return jobs.cross_entropy(model, x, y)

    def trouble(team, model):
        if team.position.step == 3:
            (tmp_path / "now").touch()

    result = ss.launch(small, devices="2xcpu", args=(trouble, loss))
    assert (tmp_path / "raised").exists()
    assert result == ss.launch(small, devices="1xcpu")


def test_no_memory_anywhere_names_the_lanes_that_would_fit():
    def trouble(team, model):
        if team.position.step == 0:
            limit(150)

    with pytest.raises(ss.OutOfMemory, match="a lane of 6 samples; lanes=8 would make lanes of 3"):
        ss.launch(small, devices="2xcpu", args=(trouble, hungry), lanes=4)


# Weights that go wrong


def flip(team, model, seat, step):
    """One bit of one weight of one worker, as a broken memory would."""
    if team.number == seat and team.position.step == step:
        model[1].weight.data.view(torch.int32)[3, 4] ^= 1 << 20


@pytest.mark.parametrize("seat", [0, 2])
def test_a_flipped_bit_is_found_and_its_worker_replaced(seat, tmp_path, capfd):
    def trouble(team, model):
        if team.number == seat and team.position.step == 9 and once(tmp_path / "flipped"):
            flip(team, model, seat, 9)

    ss.launch(small, devices="3xcpu", args=(trouble,), check_every=4, kwargs={"steps": 40})
    assert (tmp_path / "flipped").exists()
    said = capfd.readouterr().err
    assert f"worker {seat} (cpu:{seat}) was ended because it had other weights than" in said
    assert "at step 12" in said
    digests = re.findall(r"worker (\d) \(cpu:\d\): ([0-9a-f]{16})", said)
    assert len({digest for _, digest in digests[:3]}) == 2


def test_with_two_workers_a_flipped_bit_stops_the_run():
    def trouble(team, model):
        flip(team, model, 1, 9)

    with pytest.raises(ss.DeviceDiffers, match=r"step 12: the workers' weights differ") as caught:
        ss.launch(small, devices="2xcpu", args=(trouble,), check_every=4)
    digests = re.findall(r"worker \d \(cpu:\d\): ([0-9a-f]{16})", str(caught.value))
    assert len(set(digests)) == 2


def test_any_flipped_bit_changes_the_digest():
    from samestep.layout import digest

    model = nn.Sequential(nn.Linear(3, 5), nn.BatchNorm1d(5), nn.Linear(5, 1, bias=False))
    model.register_buffer("odd", torch.tensor([1, 2, 3], dtype=torch.uint8))
    before = digest(model)
    for value in [*model.parameters(), *model.buffers()]:
        flat = value.data.reshape(-1).view(torch.uint8)
        for byte in range(len(flat)):
            for bit in range(8):
                flat[byte] ^= 1 << bit
                assert digest(model) != before
                flat[byte] ^= 1 << bit
    assert digest(model) == before


# Replay

SCRIPT = """
    import hashlib, os, sys
    sys.path.insert(0, {tests!r})
    import torch, samestep as ss, jobs
    from samestep.results import Results

    def main(team):
        write = Results.write
        def note(self, flat, add, lane, *rest):
            grads = [p.grad for p in self.layout.parameters]
            digest = hashlib.sha256(b"".join(g.numpy().tobytes() for g in grads)).hexdigest()
            with open("lanes", "a") as file:
                file.write(f"{{team.position.step}} {{lane}} {{digest}}\\n")
            return write(self, flat, add, lane, *rest)
        Results.write = note
        model = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(100, 8),
                                    torch.nn.Dropout(0.3), torch.nn.Linear(8, 5))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        trainer = team.trainer(model, optimizer, jobs.cross_entropy)
        data = jobs.images(96)
        data.fields[0][17] = float("inf")
        for epoch in team.epochs(3):
            for batch in team.batches(data, 12, shuffle=epoch == 1):
                if epoch or 17 not in batch.indices:
                    trainer.step(batch)
    ss.launch(main, devices=sys.argv[1], lanes=4, run="run", save_every=3)
"""


@pytest.fixture(scope="module")
def stopped(tmp_path_factory):
    """A run on three workers that has stopped on a NaN."""
    folder = tmp_path_factory.mktemp("stopped")
    text = SCRIPT.format(tests=str(Path(__file__).parent))
    (folder / "train.py").write_text(textwrap.dedent(text))
    done = subprocess.run(
        [sys.executable, "train.py", "3xcpu"],
        cwd=folder,
        capture_output=True,
        text=True,
        check=False,
    )
    return folder, done.stderr


def replayed(folder, command, **options):
    program = [sys.executable, "-m", "samestep.cli", *shlex.split(command)[1:]]
    done = subprocess.run(
        program, cwd=folder, capture_output=True, text=True, check=False, **options
    )
    return done.stdout, done.stderr


def test_a_nan_ends_with_the_command_that_replays_it(stopped):
    folder, stderr = stopped
    last = stderr.strip().splitlines()[-1]
    found = re.fullmatch(r"samestep replay run --step (\d+) --lane (\d)", last)
    assert found, stderr
    assert f"step {found[1]}: the loss is not finite in lane {found[2]}" in stderr
    stdout, said = replayed(folder, last)
    assert f"to step {found[1]}" in said
    assert "from step" in said
    assert f"lane {found[2]}" in stdout
    assert "nan" in stdout


def test_replay_gives_the_bits_of_the_run(stopped):
    folder, stderr = stopped
    step = int(re.search(r"--step (\d+)", stderr)[1])
    seen = {}
    for line in (folder / "lanes").read_text().splitlines():
        number, lane, digest = line.split()
        seen[int(number), int(lane)] = digest
    for wanted in (step, step - 1, 1):
        stdout, said = replayed(folder, f"samestep replay run --step {wanted}")
        for lane in range(4):
            assert seen[wanted, lane][:8] in stdout, (wanted, lane, said)
    assert not list(folder.glob("run.1")), "looking changes nothing"


def test_replay_under_the_debugger(stopped):
    folder, stderr = stopped
    command = stderr.strip().splitlines()[-1] + " --pdb"
    stdout, _ = replayed(folder, command, input="p x.isinf().any()\nc\n")
    assert "jobs.py" in stdout
    assert "tensor(True)" in stdout


@pytest.mark.parametrize(
    ("command", "says"),
    [
        ("samestep replay nowhere --step 3", "nowhere: is not the folder of a run"),
        ("samestep replay run --step 9999", "the loss is not finite in lane"),
        ("samestep replay run --step 1 --lane 7", "it has no lane 7"),
    ],
)
def test_replay_of_what_is_not_there(stopped, command, says):
    _, said = replayed(stopped[0], command)
    assert says in said
    assert "Traceback" not in said
