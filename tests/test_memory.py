"""What memory is for, predicted and measured."""

from __future__ import annotations

import re
import subprocess
import sys

import pytest
import torch
from torch import nn

import samestep as ss
from samestep.memory import count_buffers
from samestep.stores import CHUNK


def weigh(team, store, kind="Adam"):
    model = nn.Sequential(nn.Linear(500, 800), nn.Tanh(), nn.Linear(800, 500))
    optimizer = getattr(torch.optim, kind)(model.parameters())
    trainer = team.trainer(model, optimizer, lambda m, x: m(x).square().sum(1), store=store)
    found = None
    for batch in team.batches(ss.data.Tensors(torch.randn(64, 500)), 32):
        before = trainer.fingerprint()
        found = trainer.memory(batch)
        assert trainer.fingerprint() == before, "looking changes nothing"
        trainer.step(batch)
    return found, trainer.fingerprint()


@pytest.mark.parametrize("store", ["replicated", "sharded"])
def test_what_is_predicted_is_what_is_measured(store):
    found, _ = ss.launch(weigh, devices="2xcpu", args=(store,))
    predicted, measured = found["predicted"], found["measured"]
    weights = 4 * (500 * 800 + 800 + 800 * 500 + 500)
    assert predicted["weights"] == weights
    for part in ("weights", "gradients", "tree", "optimizer"):
        assert measured[part] == pytest.approx(predicted[part], rel=0.02), part
    state = 2 * weights if store == "replicated" else weights + weights / 2 + 2 * 4 * CHUNK
    assert predicted["optimizer"] == pytest.approx(state, rel=0.2)
    saved = (
        4 * (500 + 800 + 500) * 4
    )  # a lane of 4 samples: inputs, and what tanh and the loss keep
    assert predicted["lane"] == pytest.approx(saved, rel=0.5)


def test_looking_changes_no_bit():
    def main(team):
        model = nn.Sequential(nn.Linear(500, 800), nn.Tanh(), nn.Linear(800, 500))
        trainer = team.trainer(
            model, torch.optim.Adam(model.parameters()), lambda m, x: m(x).square().sum(1)
        )
        for batch in team.batches(ss.data.Tensors(torch.randn(64, 500)), 32):
            trainer.step(batch)
        return trainer.fingerprint()

    assert ss.launch(main, devices="1xcpu") == ss.launch(weigh, args=("replicated",), devices=1)[1]


@pytest.mark.parametrize(
    ("run", "lanes", "buffers"),
    [
        (range(8), 8, (0, 1)),
        (range(1), 8, (0, 1)),
        (range(1, 8), 8, (0, 3)),
        (range(7), 7, (0, 1)),
        (range(0), 8, (0, 0)),
    ],
)
def test_few_buffers_fold_many_lanes(run, lanes, buffers):
    scratch, slots = count_buffers(run, lanes)
    assert slots == buffers[1]
    assert scratch <= lanes.bit_length()


def test_the_command_prints_a_table():
    command = [sys.executable, "-m", "samestep.cli", "memory", "lenet", "--devices", "2xcpu"]
    done = subprocess.run(
        [*command, "--optimizer", "adam", "--store", "sharded", "--lanes", "4"],
        capture_output=True, text=True, check=True,
    )  # fmt: skip
    rows = re.findall(r"worker (\d) \(cpu\) *│ (predicted|measured)", done.stdout)
    assert rows == [(str(w), kind) for w in (0, 1) for kind in ("predicted", "measured")]
