"""The command line, as a user types it."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import textwrap

import pytest
import torch

SCRIPT = """
    import sys
    import torch
    import samestep as ss

    def main(team):
        model = torch.nn.Linear(4, 2)
        trainer = team.trainer(
            model, torch.optim.SGD(model.parameters(), lr=0.1), lambda m, x: m(x).square().sum(1)
        )
        {setup}
        for epoch in team.epochs(3):
            for batch in team.batches(ss.data.Tensors(torch.randn(48, 4)), 16):
                trainer.step(batch)
                {step}
        return trainer.fingerprint(), team.size, team.lanes, team.seed

    if __name__ == "__main__":
        print(*ss.launch(main, devices="1xcpu"), *sys.argv[1:])
"""


def samestep(*arguments, cwd, **environment):
    return subprocess.run(
        [sys.executable, "-m", "samestep.cli", *map(str, arguments)],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
        cwd=cwd,
        env={**os.environ, "COLUMNS": "80", **environment},
    )


def write(tmp_path, setup="pass", step="pass"):
    path = tmp_path / "script.py"
    path.write_text(textwrap.dedent(SCRIPT).format(setup=setup, step=step))
    return path


def test_train(tmp_path):
    done = samestep(
        "train", "lenet", "--devices", "2xcpu", "--batch-size", 64, "--lr", 0.1, "--epochs", 2,
        "--lanes", 4, "--seed", 3, "--data", "shapes", "--samples", 640, "--run", "runs/x",
        cwd=tmp_path,
    )  # fmt: skip
    assert re.fullmatch(r"samestep: where time went: compute \d+ %.*\n", done.stderr)
    lines = done.stdout.splitlines()
    assert lines[0] == "lenet on shapes: 640 images, 2000 for testing"
    number = r"\d+\.\d{4}"
    for epoch in (1, 2):
        wanted = rf"epoch {epoch}  loss {number}  accuracy {number}  seconds {number}"
        assert re.fullmatch(wanted, lines[epoch])
    summary = dict(
        line.split("  ", 1) if "  " in line else line.rsplit(" ", 1) for line in lines[3:]
    )
    assert summary["devices"].strip() == "cpu:0, cpu:1"
    fingerprint = summary["fingerprint"].strip()
    assert re.fullmatch("[0-9a-f]{64}", fingerprint)
    assert summary["results in"].strip() == "runs/x"
    record = json.loads((tmp_path / "runs/x/run.json").read_text())
    assert record["fingerprints"] == [fingerprint]
    assert (record["lanes"], record["seed"]) == (4, 3)
    log = [json.loads(line) for line in (tmp_path / "runs/x/log.jsonl").read_text().splitlines()]
    assert [row["epoch"] for row in log] == [1, 2]
    import safetensors.torch

    weights = safetensors.torch.load_file(tmp_path / "runs/x/weights.safetensors")
    assert sum(tensor.numel() for tensor in weights.values()) == 129_068
    assert sorted(os.listdir(tmp_path / "runs/x")) == [
        "events.log", "log.jsonl", "run.json", "steps.jsonl", "weights.safetensors",
    ]  # fmt: skip


def test_devices(tmp_path):
    done = samestep("devices", cwd=tmp_path)
    for word in ("device", "name", "memory", "cores", "numerics class", "cpu", "GiB"):
        assert word in done.stdout


def test_run_gives_devices_lanes_and_seed_from_outside(tmp_path):
    path = write(tmp_path)
    plain = subprocess.run(
        [sys.executable, path, "a"], capture_output=True, text=True, check=True, timeout=60
    ).stdout.split()
    assert plain[1:] == ["1", "8", "0", "a"]
    other = samestep("run", "--devices", "2xcpu", path, "a", "--lanes", "3", cwd=tmp_path)
    assert other.stdout.split() == [plain[0], "2", "8", "0", "a", "--lanes", "3"]
    lanes = samestep("run", "--lanes", 3, "--seed", 5, path, cwd=tmp_path).stdout.split()
    assert lanes[0] != plain[0]
    assert lanes[1:] == ["1", "3", "5"]


def test_a_script_that_fails_shows_its_own_traceback(tmp_path):
    path = write(tmp_path, setup="raise ValueError('in main')")
    done = samestep("run", path, cwd=tmp_path)
    assert done.returncode == 1
    assert done.stderr.count("Traceback") == 1
    lines = done.stderr.splitlines()
    assert str(path) in lines[1]
    assert lines[-2:] == ["ValueError: in main", "worker 0 (cpu:0), step 0, in main"]


def test_prove_a_network(tmp_path):
    done = samestep("prove", "lenet", "--steps", 3, cwd=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    prints = re.findall("[0-9a-f]{64}", done.stdout)
    assert len(prints) == 6
    assert len(set(prints[1:])) == 1
    assert prints[0] != prints[1]
    assert "PROVED: 5 trainings of 3 steps" in done.stdout


def test_prove_a_script(tmp_path):
    done = samestep("prove", write(tmp_path), "--", "x", cwd=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr


def test_prove_finds_a_script_that_depends_on_the_number_of_devices(tmp_path):
    """The training itself is changed by the size of the team."""
    path = write(tmp_path, step="trainer.optimizer.param_groups[0]['lr'] = 0.1 * team.size")
    done = samestep("prove", path, cwd=tmp_path)
    assert done.returncode == 1
    assert "NOT PROVED: the fingerprints differ" in done.stdout


def test_prove_notices_an_equality_that_cannot_fail(tmp_path):
    """Nothing is trained, so that lanes make no difference: the control must catch it."""
    path = write(tmp_path, setup="for p in model.parameters(): p.data.zero_()")
    path.write_text(path.read_text().replace("m(x).square()", "(m(x) * 0)"))
    done = samestep("prove", path, cwd=tmp_path)
    assert done.returncode == 1
    assert "NOT PROVED: the control is equal too" in done.stdout


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["train", "lenet", "--devices", "gpu"], "samestep: devices='gpu': cannot read 'gpu'"),
        (
            ["train", "lenet", "--data", "shapes", "--samples", "0"],
            "--samples 0: must be from 1 to",
        ),
        (["train", "lenet", "--data-dir", "/nowhere"], "samestep: folder='/nowhere': has no train"),
        (["train", "lenet", "--data", "shapes", "--batch-size", "0"], "batch_size=0"),
        (["train", "vgg"], "'vgg' is not one of 'lenet'"),
        (["run", "none.py"], "samestep: none.py: there is no such script"),
        (["prove", "vgg"], "samestep: 'vgg': must be a script, or one of lenet"),
        (["prove", "lenet", "--steps", "0"], "--steps 0 --lanes 8: both must be at least 1"),
    ],
)
@pytest.mark.skipif(torch.cuda.is_available(), reason="the messages are those without a GPU")
def test_wrong_arguments_are_one_line_and_no_traceback(tmp_path, arguments, says):
    done = samestep(*arguments, cwd=tmp_path)
    assert done.returncode in (1, 2)
    assert says in " ".join(done.stderr.replace("│", "").split())
    assert "Traceback" not in done.stderr


def test_a_terminal_shows_a_progress_bar(tmp_path):
    """Through a pseudo-terminal, as a user would see it."""
    import pty

    command = [
        sys.executable, "-m", "samestep.cli", "train", "lenet", "--data", "shapes",
        "--epochs", "3", "--devices", "2xcpu",
    ]  # fmt: skip
    leader, follower = pty.openpty()
    process = subprocess.Popen(
        command,
        cwd=tmp_path,
        stdin=follower,
        stdout=follower,
        stderr=follower,
        env={**os.environ, "TERM": "xterm", "COLUMNS": "120"},
    )
    os.close(follower)
    seen = b""
    while True:
        try:
            data = os.read(leader, 65536)
        except OSError:
            break
        if not data:
            break
        seen += data
    os.close(leader)
    assert process.wait() == 0
    text = seen.decode()
    assert "samples/s" in text
    assert "epoch 3/3" in text
    assert re.search(r"epoch 3  loss", text), "the lines are there too"
