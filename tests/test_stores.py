"""Stores: the same bits wherever the optimizer's state lives; nothing torn when a worker dies."""

from __future__ import annotations

import os
import signal
import time

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

import jobs
import samestep as ss
from conftest import DEADLINE_S
from samestep.stores import CHUNK, chunks_of, owners

OPTIMIZERS = {
    "SGD": {"lr": 0.05},
    "SGD momentum": {"lr": 0.05, "momentum": 0.9, "nesterov": True, "weight_decay": 1e-3},
    "Adam": {"lr": 1e-2, "amsgrad": True, "weight_decay": 1e-3},
    "AdamW": {"lr": 1e-2},
    "AdamW fused": {"lr": 1e-2, "fused": True},
    "AdamW foreach": {"lr": 1e-2, "foreach": True},
    "NAdam": {"lr": 1e-2},
    "RAdam": {"lr": 1e-2},
    "Adamax": {"lr": 1e-2},
    "Adagrad": {"lr": 1e-2, "initial_accumulator_value": 0.1},
    "Adadelta": {"lr": 1.0},
    "RMSprop": {"lr": 1e-3, "momentum": 0.5, "centered": True},
    "Rprop": {"lr": 1e-2},
    "ASGD": {"lr": 1e-2},
}


class Odd(nn.Module):
    """A parameter of several chunks, one of one element, one that is used in few steps only, one
    never, a frozen one, an odd length."""

    def __init__(self, dtype=torch.float32):
        super().__init__()
        self.wide = nn.Linear(100, 1501, dtype=dtype)
        self.scale = nn.Parameter(torch.tensor(1.0, dtype=dtype))
        self.late = nn.Linear(7, 5, dtype=dtype)
        self.never = nn.Linear(3, 3)
        self.frozen = nn.Linear(2, 2).requires_grad_(False)
        self.last = nn.Linear(1501, 5, dtype=dtype)
        self.step = 0

    def forward(self, x):
        hidden = torch.tanh(self.wide(x.flatten(1).to(self.scale.dtype))) * self.scale
        out = self.last(hidden)
        return out + self.late(hidden[:, :7]) if self.step % 3 == 2 else out


def train(team, name="AdamW", store="replicated", steps=7, trouble=None, dtype=torch.float32):
    torch.manual_seed(1)
    model = Odd(dtype)
    kind, options = getattr(torch.optim, name.split()[0]), OPTIMIZERS[name]
    wide = {"params": model.wide.parameters(), "lr": options["lr"] / 2}
    rest = [p for n, p in model.named_parameters() if not n.startswith("wide")]
    optimizer = kind([wide, {"params": rest}], **options)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5)
    trainer = team.trainer(model, optimizer, jobs.cross_entropy, clip_norm=0.5, store=store)
    for _ in team.epochs(50):
        for batch in team.batches(jobs.images(96), 24):
            model.step = team.position.step
            if trouble is not None:
                trouble(team, trainer)
            trainer.step(batch)
            scheduler.step()
            if team.position.step == steps:
                return trainer.fingerprint()
    raise AssertionError


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_every_store_gives_the_same_bits(name):
    expected = ss.launch(train, devices="1xcpu", args=(name,))
    assert ss.launch(train, devices="2xcpu", args=(name,)) == expected
    for devices, store in (("1xcpu", "sharded"), ("2xcpu", "host"), ("3xcpu", "sharded")):
        assert ss.launch(train, devices=devices, args=(name, store)) == expected, (devices, store)


def test_in_float64():
    options = {"dtype": torch.float64}
    expected = ss.launch(train, devices="1xcpu", kwargs=options)
    assert ss.launch(train, devices="3xcpu", args=("AdamW", "sharded"), kwargs=options) == expected


def test_lazy_modules_and_groups():
    def main(team, store="replicated"):
        model = nn.Sequential(nn.Flatten(), nn.LazyLinear(9), nn.Linear(9, 5))
        optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
        trainer = team.trainer(model, optimizer, jobs.cross_entropy, store=store)
        for batch in team.batches(jobs.images(60), 12):
            trainer.step(batch)
        return trainer.fingerprint()

    expected = ss.launch(main, devices="1xcpu")
    assert ss.launch(main, devices="2xcpu", args=("sharded",)) == expected


class Interrupted(Exception):
    """Ends a run in the middle."""


@pytest.mark.parametrize("name", ["SGD momentum", "Adam", "Adagrad", "ASGD"])
@pytest.mark.parametrize("stores", [("sharded", "replicated"), ("replicated", "sharded")])
def test_checkpoints_are_the_same_whichever_store_wrote_or_reads_them(stores, name, tmp_path):
    def stop(team, trainer):
        if team.position.step == 4 and not team.catching_up:
            raise Interrupted

    expected = ss.launch(train, devices="1xcpu", args=(name,))
    options = {"run": tmp_path / "run", "save_every": 1}
    kwargs = {"store": stores[0], "trouble": stop}
    with pytest.raises(Interrupted):
        ss.launch(train, devices="2xcpu", args=(name,), kwargs=kwargs, **options)
    kwargs = {"store": stores[1]}
    result = ss.launch(train, devices="3xcpu", args=(name,), kwargs=kwargs, resume=True, **options)
    assert result == expected


# Workers that die


@pytest.mark.parametrize("moment", ["before a chunk", "in a chunk", "in a first chunk", "after"])
@pytest.mark.parametrize("workers", [2, 3])
def test_a_worker_killed_in_an_update_tears_nothing(workers, moment, tmp_path, capfd):
    """Half of the chunk's state is new, half old, when it dies."""
    strike_at = 0 if moment == "in a first chunk" else 4

    def trouble(team, trainer):
        if team.number != 1 or team.position.step != strike_at or (tmp_path / "fired").exists():
            return
        store = trainer._store

        def die():
            (tmp_path / "fired").touch()
            os.kill(os.getpid(), signal.SIGKILL)
            time.sleep(DEADLINE_S)

        if moment == "before a chunk":
            store._set_aside = lambda chunk: die()
        elif moment == "after":
            store._barrier.all_written = die
        else:
            keep = store._keep

            def tear(chunk, state):
                for _, view in store._views(chunk):
                    view[: len(view) // 2] = 77.0
                if chunk.number:
                    keep(chunk, state)
                    die()

            store._keep = tear

    expected = ss.launch(train, devices="1xcpu", kwargs={"steps": 40})
    kwargs = {"store": "sharded", "trouble": trouble, "steps": 40}
    assert ss.launch(train, devices=f"{workers}xcpu", kwargs=kwargs) == expected
    assert (tmp_path / "fired").exists()
    assert "was ended by SIGKILL" in capfd.readouterr().err


def test_many_kills(tmp_path):
    """Each worker dies now and then, at random moments; replacements find the state where it is."""

    def trouble(team, trainer):
        time.sleep(0.01)  # a replacement is back within some ten steps
        if not team.catching_up and team.number and team.position.step % 11 == 3 * team.number:
            mark = tmp_path / f"{team.number} {team.position.step}"
            if not mark.exists():
                mark.touch()
                delay = 0.001 * (team.position.step % 7)
                worker, pid = os.getpid(), os.fork()
                if pid == 0:
                    time.sleep(delay)
                    os.kill(worker, signal.SIGKILL)
                    os._exit(0)

    kwargs = {"steps": 60, "name": "Adam"}
    expected = ss.launch(train, devices="1xcpu", kwargs=kwargs)
    kwargs |= {"store": "sharded", "trouble": trouble}
    assert ss.launch(train, devices="3xcpu", kwargs=kwargs) == expected
    assert len(list(tmp_path.glob("[12] *"))) >= 4


# Balance, and who is refused


@given(st.lists(st.integers(1, 40 * CHUNK), min_size=1, max_size=8), st.integers(1, 9))
def test_nobody_has_more_than_one_chunk_above_the_mean(sizes, workers):
    chunks = chunks_of(sizes)
    runs = owners(chunks, workers)
    assert [number for run in runs for number in run] == [chunk.number for chunk in chunks]
    assert sum(chunk.size for chunk in chunks) == sum(sizes)
    assert all(chunk.start % CHUNK == 0 for chunk in chunks)
    loads = [sum(chunks[number].size for number in run) for run in runs]
    assert max(loads) <= sum(sizes) / workers + CHUNK


def test_a_large_embedding_does_not_land_on_the_first():
    """The tutorials' warning: 8 million of 8.1 million parameters are one tensor."""
    loads = [
        sum(chunk.size for chunk in chunks_of([8_000_000, 90_000, 300])[run.start : run.stop])
        for run in owners(chunks_of([8_000_000, 90_000, 300]), 4)
    ]
    assert max(loads) - min(loads) <= 2 * CHUNK


def test_state_is_in_memory_once():
    def main(team, store):
        model = nn.Linear(2000, 1000)
        optimizer = torch.optim.Adam(model.parameters())
        trainer = team.trainer(model, optimizer, lambda m, x: m(x).square().sum(1), store=store)
        for batch in team.batches(ss.data.Tensors(torch.randn(16, 2000)), 8):
            trainer.step(batch)
        return sum(s.numel() for state in optimizer.state.values() for s in state.values())

    assert ss.launch(main, devices="2xcpu", args=("replicated",)) > 4_000_000
    assert ss.launch(main, devices="2xcpu", args=("sharded",)) == 0


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (lambda p: torch.optim.Adafactor(p), "Adafactor cannot be cut into chunks: it keeps rows"),
        (lambda p: type("Mine", (torch.optim.SGD,), {})(p), "Mine cannot be cut .*not known"),
    ],
    ids=["Adafactor", "a class of one's own"],
)
def test_optimizers_that_look_at_whole_parameters_are_refused_by_name(make, says):
    def main(team):
        model = nn.Linear(3, 3)
        team.trainer(model, make(model.parameters()), jobs.cross_entropy, store="sharded")

    with pytest.raises(ss.OptimizerError, match=says):
        ss.launch(main, devices="1xcpu")
