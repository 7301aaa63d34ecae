"""Runs that stop anywhere and go on anywhere, from checkpoints that may be damaged."""

from __future__ import annotations

import itertools
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import jobs
import samestep as ss
from conftest import DEADLINE_S
from samestep import checkpoint


class Interrupted(Exception):
    """Ends a run in the middle."""


def stop_at(team, step):
    if team.position.step == step and not team.catching_up:
        raise Interrupted


def classifier(team, stop=-1, batch_size=24, hidden=8, samples=96, rate=0.1, epochs=4):
    """BatchNorm, momentum, a schedule that nobody keeps, a kept average of the weights."""
    model = nn.Sequential(
        nn.Flatten(), nn.Linear(100, hidden), nn.BatchNorm1d(hidden), nn.Dropout(0.2),
        nn.Linear(hidden, 5),
    )  # fmt: skip
    optimizer = torch.optim.SGD(model.parameters(), lr=rate, momentum=0.9)
    scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.3, 20)
    average = team.keep("average", torch.optim.swa_utils.AveragedModel(model))
    trainer = team.trainer(model, optimizer, jobs.cross_entropy)
    data, seen = jobs.images(samples), []
    for _ in team.epochs(epochs):
        for batch in team.batches(data, batch_size):
            trainer.step(batch)
            scheduler.step()
            average.update_parameters(model)
            stop_at(team, stop)
        seen.append((trainer.evaluate(data, ss.metrics.accuracy), trainer.epoch_loss()))
        team.log(accuracy=seen[-1][0])
    return trainer.fingerprint(), seen, average.module[1].weight.detach().sum().item()


def lazy(team, stop=-1):
    """Lazily initialised modules, frozen and unused parameters, groups, samples one by one."""
    torch.manual_seed(3)
    model = nn.Sequential(nn.LazyConv2d(3, 3), nn.Flatten(), nn.LazyLinear(8), nn.Linear(8, 5))
    groups = [{"params": model[3].parameters()}, {"params": model[2].parameters(), "lr": 0.02}]
    optimizer = torch.optim.AdamW([*groups, {"params": model[0].parameters()}], lr=0.01)
    trainer = team.trainer(model, optimizer, jobs.cross_entropy, clip_norm=1.0)
    for epoch in team.epochs(3):
        if epoch == 1:
            model[0].requires_grad_(False)
        for batch in team.batches(jobs.Noisy(), 12):
            trainer.step(batch)
            stop_at(team, stop)
    return trainer.fingerprint()


def adversaries(team, stop=-1):
    """Two trainers, two datasets in step, and a second model that is built from a trained one."""
    one, two = nn.Linear(4, 4), nn.Linear(4, 4)

    def loss(model, x):
        return (model(x) - x).square().sum(1)

    trainers = [
        team.trainer(m, torch.optim.Adam(m.parameters(), lr=0.01), loss) for m in (one, two)
    ]
    left, right = ss.data.Tensors(torch.randn(20, 4)), ss.data.Tensors(torch.randn(28, 4))
    for _ in team.epochs(3):
        both = zip(team.batches(left, 4), team.batches(right, 4), strict=False)
        for a, b in both:
            trainers[0].step(a)
            trainers[1].step(b)
            stop_at(team, stop)
        with torch.no_grad():
            two.weight.add_(torch.randn_like(two.weight), alpha=0.01)
    third = nn.Linear(4, 4)
    third.load_state_dict(one.state_dict())
    trainers.append(team.trainer(third, torch.optim.SGD(third.parameters(), lr=0.1), loss))
    for _ in range(2):
        for batch in team.batches(left, 8):
            trainers[2].step(batch)
            stop_at(team, stop)
    return [trainer.fingerprint() for trainer in trainers]


@pytest.mark.parametrize("stop", [1, 4, 5, 11, 15])
@pytest.mark.parametrize("before", ["1xcpu", "3xcpu"])
def test_a_run_goes_on_on_other_devices_with_the_same_bits(before, stop, tmp_path):
    expected = ss.launch(classifier, devices="2xcpu")
    options = {"run": tmp_path / "run", "save_every": 1}
    with pytest.raises(Interrupted):
        ss.launch(classifier, devices=before, args=(stop,), **options)
    assert ss.launch(classifier, devices="2xcpu", resume=True, **options) == expected
    lines = (tmp_path / "run" / "log.jsonl").read_text().splitlines()
    assert [json.loads(line)["accuracy"] for line in lines] == [a for a, _ in expected[1]]
    assert len(checkpoint.find(tmp_path / "run" / "checkpoints")) == 3


@pytest.mark.parametrize("main", [lazy, adversaries], ids=lambda main: main.__name__)
def test_all_kinds_of_state(main, tmp_path):
    expected = ss.launch(main, devices="2xcpu")
    for stop in (2, 6, 10, 12, 16, 32, 34):
        options = {"run": tmp_path / str(stop), "save_every": 1}
        with pytest.raises(Interrupted):
            ss.launch(main, devices="2xcpu", args=(stop,), **options)
            raise Interrupted  # it is over before that
        assert ss.launch(main, devices="1xcpu", resume=True, **options) == expected, stop


def test_resuming_a_finished_run_gives_its_result_again(tmp_path):
    options = {"run": tmp_path / "run", "save_every": 2}
    expected = ss.launch(classifier, devices="2xcpu", **options)
    assert ss.launch(classifier, devices="3xcpu", resume=True, **options) == expected


def test_resume_without_a_checkpoint_starts_afresh_and_says_so(tmp_path, capfd):
    options = {"run": tmp_path / "run", "resume": True}
    ss.launch(classifier, devices="1xcpu", **options)
    assert "has no checkpoint, so this run starts from its beginning" in capfd.readouterr().err


def test_while_catching_up_nothing_is_printed_or_skipped_code_called_first(tmp_path, capfd):
    def main(team, stop=-1):
        model = nn.Linear(100, 5)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        trainer = team.trainer(model, optimizer, lambda m, x, y: F.cross_entropy(
            m(x.flatten(1)), y, reduction="none"))  # fmt: skip
        seen = [(team.catching_up, team.is_first)]
        for epoch in team.epochs(3):
            for batch in team.batches(jobs.images(24), 8):
                trainer.step(batch)
                stop_at(team, stop)
            team.print(f"epoch {epoch} is over")
            seen.append((team.catching_up, team.is_first))
        return seen

    options = {"run": tmp_path / "run", "save_every": 1, "devices": "1xcpu"}
    with pytest.raises(Interrupted):
        ss.launch(main, args=(8,), **options)
    assert capfd.readouterr().out.count("is over") == 2
    seen = ss.launch(main, resume=True, **options)
    assert seen == [(True, True), (True, False), (True, False), (False, True)]
    assert capfd.readouterr().out.split("\n")[:1] == ["epoch 2 is over"]


# Another training


@pytest.mark.parametrize(
    ("changes", "row"),
    [
        ({"lanes": 4}, "lanes"),
        ({"seed": 1}, "seed"),
        ({"kwargs": {"batch_size": 12}}, "batch_size"),
        ({"kwargs": {"samples": 90}}, "samples"),
        ({"kwargs": {"hidden": 9}}, "parameters"),
        ({"threads": 2}, "threads"),
        ({"exact": False}, "exact"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_the_checkpoint_of_another_training_is_refused_with_what_differs(changes, row, tmp_path):
    options = {"run": tmp_path / "run", "save_every": 1, "devices": "2xcpu"}
    with pytest.raises(Interrupted):
        ss.launch(classifier, args=(6,), **options)
    with pytest.raises(ss.CheckpointDiffers, match="is of another training") as caught:
        ss.launch(classifier, resume=True, **options, **changes)
    rows = [line.split()[0] for line in str(caught.value).splitlines()[1:-1]]
    assert row in rows
    assert len(rows) <= 2


def test_other_code_is_refused_unless_the_change_is_meant(tmp_path):
    train = classifier  # by the closure: `main` is what is compared, not what it calls

    def main(team, stop=-1):
        return train(team, stop)

    def edited(team, stop=-1):
        team.print("edited")
        return train(team, stop)

    options = {"run": tmp_path / "run", "save_every": 1, "devices": "1xcpu"}
    with pytest.raises(Interrupted):
        ss.launch(main, args=(6,), **options)
    with pytest.raises(ss.CheckpointDiffers) as caught:
        ss.launch(edited, resume=True, **options)
    rows = str(caught.value).splitlines()
    assert rows[1].split()[:3] == ["code", "of", "main"]
    assert 'say resume="edited"' in rows[-1]
    expected = ss.launch(classifier, devices="1xcpu")
    assert ss.launch(edited, resume="edited", **options) == expected


def test_a_refused_resume_changes_nothing(tmp_path):
    run = tmp_path / "run"
    options = {"run": run, "save_every": 1, "devices": "2xcpu"}
    ss.launch(classifier, **options)
    before = [(run / name).read_text() for name in ("run.json", "log.jsonl")]
    with pytest.raises(ss.CheckpointDiffers):
        ss.launch(classifier, resume=True, seed=5, **options)
    assert [(run / name).read_text() for name in ("run.json", "log.jsonl")] == before


def test_each_checkpoint_knows_the_log_of_its_own_moment(tmp_path, monkeypatch):
    """Records of other workers may come before a snapshot that was taken earlier."""
    found = []
    monkeypatch.setattr(
        checkpoint, "write", lambda folder, snapshot, about, keep: found.append((snapshot, about))
    )

    def main(team):
        model = nn.Linear(100, 5)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        trainer = team.trainer(
            model, optimizer, lambda m, x, y: jobs.cross_entropy(m, x.flatten(1), y)
        )
        for _ in team.epochs(30):
            for batch in team.batches(jobs.images(24), 8):
                trainer.step(batch)
                team.log(loss=0.0)

    ss.launch(main, devices="3xcpu", run=tmp_path / "run", save_every=1)
    assert len(found) > 3
    assert [about["log_lines"] for _, about in found] == [s.step for s, _ in found]


def test_who_counts_by_itself_in_a_loop_is_told_what_to_do(tmp_path):
    """A replacement does not see batches that are over, so its own count is another one."""
    mark = tmp_path / "killed"

    def main(team):
        model = nn.Linear(100, 5)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        trainer = team.trainer(
            model, optimizer, lambda m, x, y: jobs.cross_entropy(m, x.flatten(1), y)
        )
        count = 0
        for _ in team.epochs(40):
            for batch in team.batches(jobs.images(24), 8):
                if team.number == 1 and team.position.step == 8 and not mark.exists():
                    mark.touch()
                    os.kill(os.getpid(), signal.SIGKILL)
                optimizer.param_groups[0]["lr"] = 0.1 / (1 + count)
                count += 1
                trainer.step(batch)

    with pytest.raises(ss.DeviceDiffers, match=r"count with team.position.step"):
        ss.launch(main, devices="2xcpu", check_every=1)


def test_next_instead_of_a_loop_is_told_what_to_do(tmp_path):
    def main(team, stop=-1):
        model = nn.Linear(100, 5)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        trainer = team.trainer(
            model, optimizer, lambda m, x, y: jobs.cross_entropy(m, x.flatten(1), y)
        )
        for _ in range(6):
            batches = team.batches(jobs.images(24), 8)
            for _ in range(3):
                trainer.step(next(batches))
                stop_at(team, stop)

    options = {"run": tmp_path / "run", "save_every": 1, "devices": "1xcpu"}
    with pytest.raises(Interrupted):
        ss.launch(main, args=(8,), **options)
    with pytest.raises(Exception) as caught:
        ss.launch(main, resume=True, **options)
    assert "not next()" in "".join(caught.value.__notes__)


# Damage


def flip(path):
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 4
    path.write_bytes(bytes(content))


DAMAGES = {
    "truncated": lambda path, other: path.write_bytes(path.read_bytes()[:-7]),
    "empty": lambda path, other: path.write_bytes(b""),
    "one bit": lambda path, other: flip(path),
    "missing": lambda path, other: path.unlink(),
    "swapped": lambda path, other: shutil.copy(other / path.name, path),
}
FILES = ("tensors.safetensors", "state.json", "manifest.json")


@pytest.fixture(scope="module")
def interrupted(tmp_path_factory):
    folder = tmp_path_factory.mktemp("interrupted")
    with pytest.raises(Interrupted):
        ss.launch(classifier, devices="2xcpu", args=(9,), run=folder / "run", save_every=1)
    return folder / "run", ss.launch(classifier, devices="2xcpu")


@pytest.mark.parametrize("file", FILES)
@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_checkpoint_is_passed_over(damage, file, interrupted, tmp_path, capfd):
    run, expected = interrupted
    shutil.copytree(run, tmp_path / "run")
    newest, older, _ = checkpoint.find(tmp_path / "run" / "checkpoints")
    DAMAGES[damage](newest / file, older)
    result = ss.launch(classifier, devices="1xcpu", run=tmp_path / "run", resume=True)
    assert result == expected
    said = capfd.readouterr().err
    assert f"going back to {older.name}" in said
    assert f"going on from step {int(older.name[5:])}" in said


def test_a_whole_checkpoint_under_another_name_is_passed_over(interrupted, tmp_path, capfd):
    run, expected = interrupted
    shutil.copytree(run, tmp_path / "run")
    newest, older, _ = checkpoint.find(tmp_path / "run" / "checkpoints")
    shutil.rmtree(newest)
    shutil.copytree(older, newest)
    assert ss.launch(classifier, run=tmp_path / "run", devices="1xcpu", resume=True) == expected
    assert "it was renamed" in capfd.readouterr().err


def test_every_bit_counts(interrupted, tmp_path):
    """A checkpoint in which any one byte differs is never read as if it were whole."""
    path = checkpoint.find(interrupted[0] / "checkpoints")[0]
    draw = random.Random(0)
    for file in FILES:
        whole = (path / file).read_bytes()
        for _ in range(60):
            shutil.copytree(path, tmp_path / path.name)
            content = bytearray(whole)
            content[draw.randrange(len(content))] ^= 1 << draw.randrange(8)
            (tmp_path / path.name / file).write_bytes(bytes(content))
            with pytest.raises(ss.CheckpointError):
                checkpoint.read(tmp_path / path.name)
            shutil.rmtree(tmp_path / path.name)


def test_all_damaged_is_an_error_and_not_a_new_start(interrupted, tmp_path):
    shutil.copytree(interrupted[0], tmp_path / "run")
    for path in checkpoint.find(tmp_path / "run" / "checkpoints"):
        flip(path / "state.json")
    with pytest.raises(ss.CheckpointError, match=r"no intact checkpoint: .*start without resume"):
        ss.launch(classifier, devices="1xcpu", run=tmp_path / "run", resume=True)


@pytest.fixture
def tiny_disk(tmp_path):
    disk = tmp_path / "disk"
    disk.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", "size=64k", "tmpfs", str(disk)]
    if os.geteuid() != 0 or subprocess.run(command, capture_output=True, check=False).returncode:
        pytest.skip("needs the right to mount a small file system")
    yield disk
    subprocess.run(["umount", str(disk)], check=True)


def test_a_full_disk_is_a_warning_and_the_last_checkpoint_stays(tiny_disk, capfd):
    expected = ss.launch(classifier, devices="2xcpu")
    options = {"run": tiny_disk / "run", "save_every": 1, "devices": "2xcpu"}
    (tiny_disk / "ballast").write_bytes(b"x" * 20_000)
    assert ss.launch(classifier, **options) == expected
    said = capfd.readouterr().err
    assert "the checkpoint could not be written" in said
    assert "No space left on device" in said
    assert not list(tiny_disk.glob("run/checkpoints/.*"))
    for path in checkpoint.find(tiny_disk / "run" / "checkpoints"):
        checkpoint.read(path)
    (tiny_disk / "ballast").unlink()
    again = ss.launch(
        classifier, resume=bool(list(tiny_disk.glob("run/checkpoints/s*"))), **options
    )
    assert again == expected


def test_what_cannot_be_saved_is_said_at_once():
    class Odd:
        def state_dict(self):
            return {"function": lambda: 0}

        def load_state_dict(self, state):
            pass

    with pytest.raises(ss.UsageError, match=r"kept/odd/function: a function cannot be saved"):
        ss.launch(lambda team: team.keep("odd", Odd()), devices="1xcpu")


# Signals, with a launcher of its own

SCRIPT = """
    import sys, os, time
    sys.path.insert(0, {tests!r})
    import torch, samestep as ss, jobs
    def main(team):
        torch.manual_seed(team.seed)
        model = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(100, 40), torch.nn.ReLU(),
                                    torch.nn.Dropout(0.1), torch.nn.Linear(40, 5))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
        trainer = team.trainer(model, optimizer, jobs.cross_entropy)
        data = jobs.images(240)
        for epoch in team.epochs({epochs}):
            for batch in team.batches(data, 24):
                trainer.step(batch)
                if team.number == 0:
                    os.write(1, f"step {{team.position.step}}\\n".encode())
                {extra}
            trainer.evaluate(data, ss.metrics.accuracy)
        return trainer.fingerprint()
    if __name__ == "__main__":
        print(ss.launch(main, devices=sys.argv[1], run="run", save_every={save_every}, resume=True,
                        seed=int(sys.argv[2])))
"""


def program(tmp_path, extra="time.sleep(0.01)", save_every=5, epochs=6):
    import textwrap

    tests = str(Path(__file__).parent)
    text = SCRIPT.format(tests=tests, extra=extra, save_every=save_every, epochs=epochs)
    (tmp_path / "train.py").write_text(textwrap.dedent(text))

    def start(devices="2xcpu", seed=0):
        return subprocess.Popen(
            [sys.executable, "train.py", devices, str(seed)],
            cwd=tmp_path,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    return start


def steps_until(process, step):
    """Read its output up to a step; returns the first step it says."""
    first = None
    for line in process.stdout:
        if "step " in line:
            number = int(line.rpartition(" ")[2])
            first = first or number
            if number >= step:
                return first
    raise AssertionError(process.stderr.read())


@pytest.mark.parametrize("seed", range(4))
def test_the_launcher_is_killed_five_times_in_one_run(seed, tmp_path):
    """Twenty in all; each time on another number of devices, checkpoint writes included."""
    start, draw = program(tmp_path), random.Random(seed)
    devices = itertools.cycle(["2xcpu", "1xcpu", "3xcpu"])
    reached, repeated = 0, []
    for _ in range(5):
        process = start(next(devices), seed)
        first = steps_until(process, reached + draw.randint(1, 9))
        if reached:
            repeated.append(reached + 1 - first)
        time.sleep(draw.uniform(0, 0.03))
        process.kill()
        said = process.communicate()[0]
        reached = max(
            [
                reached,
                *(int(line.rpartition(" ")[2]) for line in said.splitlines() if "step" in line),
            ]
        )
    last = start(next(devices), seed)
    stdout, stderr = last.communicate(timeout=DEADLINE_S)
    assert last.returncode == 0, stderr
    shutil.rmtree(tmp_path / "run")
    whole, _ = start("1xcpu", seed).communicate(timeout=DEADLINE_S)
    assert stdout.splitlines()[-1] == whole.splitlines()[-1]
    assert max(repeated) <= 5, f"save_every is 5, repeated were {repeated}"


@pytest.mark.parametrize(("number", "status"), [(signal.SIGTERM, 143), (signal.SIGINT, -2)])
def test_a_signal_finishes_the_step_saves_and_leaves(number, status, tmp_path):
    start = program(tmp_path, save_every='"10 min"')
    process = start()
    steps_until(process, 12)
    began = time.monotonic()
    process.send_signal(number)
    stdout, stderr = process.communicate(timeout=DEADLINE_S)
    assert time.monotonic() - began < 5
    assert process.returncode in (status, 128 + number)
    assert "stopping after the open step" in stderr
    assert "resume=True goes on from there" in stderr
    last = max([12, *(int(s.rpartition(" ")[2]) for s in stdout.splitlines() if "step" in s)])
    (path,) = checkpoint.find(tmp_path / "run" / "checkpoints")
    assert path.name == f"step-{last:08d}", "not one step is lost"
    assert json.loads((tmp_path / "run" / "run.json").read_text())["state"] == "stopped"
    again = start("3xcpu")
    first = steps_until(again, last + 1)
    assert first == last + 1
    result = again.communicate(timeout=DEADLINE_S)[0].splitlines()[-1]
    shutil.rmtree(tmp_path / "run")
    assert start("1xcpu").communicate(timeout=DEADLINE_S)[0].splitlines()[-1] == result


def test_a_second_signal_stops_at_once(tmp_path):
    start = program(tmp_path, extra="time.sleep(20 if team.position.step == 3 else 0)")
    process = start()
    steps_until(process, 3)
    process.send_signal(signal.SIGINT)
    for line in process.stderr:
        if "stopping after" in line:
            break
    began = time.monotonic()
    process.send_signal(signal.SIGINT)
    process.communicate(timeout=DEADLINE_S)
    assert time.monotonic() - began < 1


def test_a_step_that_does_not_end_does_not_outlast_the_grace_period(tmp_path):
    start = program(tmp_path, extra="time.sleep(60 if team.position.step == 8 else 0)")
    process = start()
    steps_until(process, 8)
    began = time.monotonic()
    process.send_signal(signal.SIGTERM)
    _, stderr = process.communicate(timeout=DEADLINE_S)
    assert time.monotonic() - began < 5
    assert process.returncode == 143
    assert "step-00000005; resume=True" in stderr


def test_every_worker_killed_is_reported_and_resumed_from_disk(tmp_path):
    mark = tmp_path / "killed"

    def main(team):
        model = nn.Linear(100, 5)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        trainer = team.trainer(model, optimizer, lambda m, x, y: F.cross_entropy(
            m(x.flatten(1)), y, reduction="none"))  # fmt: skip
        for _ in team.epochs(3):
            for batch in team.batches(jobs.images(60), 12):
                if team.position.step == 8 and not mark.exists():
                    time.sleep(0.3)  # nobody sees the mark before all have looked
                    mark.touch()
                    os.kill(os.getpid(), signal.SIGKILL)
                trainer.step(batch)
        return trainer.fingerprint()

    options = {"run": tmp_path / "run", "save_every": 3}
    with pytest.raises(ss.WorkerDied, match="no worker is left") as caught:
        ss.launch(main, devices="3xcpu", **options)
    for seat in range(3):
        assert f"worker {seat} (cpu:{seat}) was ended by SIGKILL" in str(caught.value)
    assert "step 8" in str(caught.value)
    result = ss.launch(main, devices="2xcpu", resume=True, **options)
    assert result == ss.launch(main, devices="1xcpu")
