"""Where time goes: shares, the line at the end of a run, and a trace."""

from __future__ import annotations

import json
import subprocess
import sys
import textwrap
import time

import pytest
import torch

import jobs
import samestep as ss
from samestep.clock import Kind, Moment
from samestep.timings import line, shares, trace


def seconds(**kinds):
    return [kinds.get(kind.name.lower(), 0.0) for kind in Kind]


def test_shares_leave_out_what_is_no_step():
    found = shares(seconds(compute=6.0, data=1.0, waiting=2.0, exchange=1.0, other=90, evaluate=5))
    assert found == {"compute": 0.6, "data": 0.1, "waiting": 0.2, "exchange": 0.1, "update": 0.0}


def test_a_line_says_who_was_slowest():
    fast, slow = seconds(compute=5, waiting=5), seconds(compute=10)
    assert line({"cpu:0": fast, "cpu:1": slow}) == (
        "compute 75 %, data 0 %, waiting 25 %, exchange 0 %, update 0 %; slowest: cpu:1"
    )
    assert line({"cpu:0": slow, "cpu:1": slow}).endswith("none was slower than the others")
    assert line({"cpu:0": slow}).startswith("compute 100 %")


def test_a_trace_is_slices_on_tracks():
    moments = {
        "worker 0": [
            Moment(10.0, Kind.COMPUTE, 3, 7),
            Moment(10.5, Kind.WAITING, -1, 7),
            Moment(10.75, Kind.OTHER, -1, 8),
            Moment(11.0, Kind.DATA, 4, 8),
        ],
        "worker 1": [],
    }
    events = trace(moments)["traceEvents"]
    slices = [event for event in events if event["ph"] == "X"]
    assert [(e["name"], e["ts"], e["dur"], e["args"]["step"]) for e in slices] == [
        ("lane 3", 0.0, 5e5, 7),
        ("waiting", 5e5, 2.5e5, 7),
    ]
    names = [e["args"]["name"] for e in events if e["name"] == "thread_name"]
    assert names == ["worker 0", "worker 1"]


def slow_second(team):
    def loss(model, x, y):
        time.sleep(0.004 if team.number else 0.001)
        return jobs.cross_entropy(model, x, y)

    model = ss.models.mlp(100, (8,), 5)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    trainer = team.trainer(model, optimizer, loss)
    for batch in team.batches(jobs.images(320), 32):
        trainer.step(batch)
    return trainer.timings()


def test_a_run_ends_with_a_line_and_keeps_the_seconds(tmp_path, capfd):
    plan = {"plan": lambda lanes, step: [lanes // 2, lanes - lanes // 2]}
    found = ss.launch(slow_second, devices="2xcpu", run=tmp_path / "run", **plan)
    assert found["cpu:0"]["waiting"] > 0.4
    assert found["cpu:1"]["compute"] > 0.7
    said = capfd.readouterr().err
    assert "where time went: compute" in said
    assert "slowest: cpu:1" in said
    record = json.loads((tmp_path / "run" / "run.json").read_text())
    assert record["seconds_spent"]["cpu:1"]["compute"] > 0.1
    lines = (tmp_path / "run" / "steps.jsonl").read_text().splitlines()
    steps = [json.loads(text) for text in lines]
    assert sorted((row["device"], row["step"]) for row in steps) == [
        (f"cpu:{number}", step) for number in (0, 1) for step in range(1, 11)
    ]
    waited = {d: sum(r["waiting"] for r in steps if r["device"] == d) for d in found}
    assert waited["cpu:0"] > waited["cpu:1"]


def test_a_trace_of_a_run_from_outside(tmp_path):
    script = """
        import torch, samestep as ss
        def loss(model, x): return model(x).square().sum(1)
        def main(team):
            model = torch.nn.Linear(4, 4)
            trainer = team.trainer(model, torch.optim.SGD(model.parameters(), lr=0.1), loss)
            for batch in team.batches(ss.data.Tensors(torch.zeros(80, 4)), 8):
                trainer.step(batch)
        ss.launch(main, devices="2xcpu", lanes=4)
    """
    (tmp_path / "train.py").write_text(textwrap.dedent(script))
    command = [sys.executable, "-m", "samestep.cli", "run", "--trace", "t.json"]
    subprocess.run(
        [*command, "--trace-steps", "3", "train.py"], cwd=tmp_path, check=True, capture_output=True
    )
    events = json.loads((tmp_path / "t.json").read_text())["traceEvents"]
    lanes = {e["name"] for e in events if e["ph"] == "X" and e["cat"] == "compute"}
    assert lanes == {"lane 0", "lane 1", "lane 2", "lane 3"}
    assert {e["args"]["step"] for e in events if e["ph"] == "X"} == {0, 1, 2}
    assert {e["tid"] for e in events} == {0, 1}


def test_a_trace_that_cannot_be_written_loses_no_result(capfd):
    assert ss.launch(lambda team: 5, devices="1xcpu", trace="/dev/null/x") == 5
    assert "could not be written" in capfd.readouterr().err


def test_wrong_number_of_steps():
    with pytest.raises(ss.UsageError, match="trace_steps=0: must be a whole number"):
        ss.launch(lambda team: 5, devices="1xcpu", trace="x", trace_steps=0)
