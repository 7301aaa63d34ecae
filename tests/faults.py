"""Faults that strike for real, once, at a named point of a training; and the training they strike.

A fault that has struck has left the file `fired` behind: a test counts it.
"""

from __future__ import annotations

import contextlib
import os
import signal
import time
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import nn

import samestep as ss

DEADLY = ("SIGKILL", "SIGSEGV", "SIGSTOP", "exit")
RAISING = ("loss", "dataset", "loader")
POINTS = (
    "before the first step",
    "in a lane",
    "before the nodes are written",
    "between nodes and sums",
    "between sums and update",
    "in evaluate",
    "while a checkpoint is written",
    "while a replacement catches up",
    "while the team re-forms",
)
STEPS, STRUCK = 16, 6


@dataclass
class Fault:
    """Strikes the worker of `seat` at `point`. For the last two points, SIGKILL first strikes
    another worker: the fault then meets its replacement, or a survivor."""

    kind: str
    point: str
    folder: str
    seat: int = 1

    def once(self, name):
        """True for the first process that asks."""
        try:
            os.close(os.open(f"{self.folder}/{name}", os.O_CREAT | os.O_EXCL))
        except FileExistsError:
            return False
        return True

    def at(self, point, team, when=True):
        """The training has come to a point."""
        if point == self.point and when and team.number == self.seat:
            self.strike()

    def strike(self):
        if not self.once("fired"):
            return
        Path(self.folder, "fired").write_text(repr(time.monotonic()))
        if self.kind in RAISING:
            Path(self.folder, f"armed {self.kind}").touch()
        elif self.kind == "exit":
            os._exit(3)
        else:
            os.kill(os.getpid(), getattr(signal, self.kind))
            if self.kind != "SIGSTOP":
                time.sleep(60)

    def prepare(self, team):
        """Before the training begins."""
        if self.point == "while a replacement catches up" and team.catching_up:
            self.strike()
        if self.point == "between nodes and sums":
            from samestep.exchange.shared_memory import SharedMemory

            add = SharedMemory._add

            def _add(exchange, reduction):
                self.at(self.point, team, team.position.step == STRUCK)
                add(exchange, reduction)

            SharedMemory._add = _add
        if self.point == "while the team re-forms":
            from samestep.barrier import Barrier

            agree = Barrier.agree

            def strike_and_agree(barrier):
                if team.number == 0:
                    self.strike()
                return agree(barrier)

            Barrier.agree = strike_and_agree

    def is_writing(self):
        """Whether a checkpoint is being written, as it must be within a second."""
        until = time.monotonic() + 1
        if self.point != "while a checkpoint is written" or Path(self.folder, "fired").exists():
            return False
        while time.monotonic() < until:
            with contextlib.suppress(OSError):
                if any(Path(self.folder).glob("run/checkpoints/.new-*")):
                    return True
            time.sleep(0.002)
        return False

    def kill_another(self, team):
        """What the last two points need first."""
        early = self.point in POINTS[-2:] and team.number == 1
        if early and team.position.step == STRUCK and self.once("early"):
            os.kill(os.getpid(), signal.SIGKILL)

    def let_catch_up(self, team):
        """A replacement is slower to come than a few steps take: the others wait for it."""
        until = time.monotonic() + 5
        if self.point == "while a replacement catches up" and team.position.step == STRUCK + 1:
            while not Path(self.folder, "fired").exists() and time.monotonic() < until:
                time.sleep(0.002)

    def is_armed(self, kind):
        return self.kind == kind and os.path.exists(f"{self.folder}/armed {kind}")


class Planted(Exception):
    """What the raising faults raise."""


class Samples(torch.utils.data.Dataset):
    """Loaded in the background, and by the worker itself where a unit was not foreseen."""

    def __init__(self, fault, count=96):
        generator = torch.Generator().manual_seed(5)
        self.x = torch.randn(count, 6, generator=generator)
        self.y = torch.randint(0, 3, (count,), generator=generator)
        self.fault, self.worker = fault, os.getpid()

    def __len__(self):
        return len(self.x)

    def __getitem__(self, index):
        if self.fault is not None:
            if self.fault.is_armed("dataset"):
                raise Planted("in the dataset")
            if self.fault.is_armed("loader") and os.getpid() != self.worker:
                raise Planted("in a loader")
        return self.x[index] + torch.rand(()), self.y[index]


def train(team, fault=None, loaders=0, pace=0.0):
    """Dropout, BatchNorm, momentum, a schedule that nobody keeps, and an evaluation each epoch.
    Returns the fingerprint, what was evaluated, and when each step was committed."""
    if fault is not None:
        fault.prepare(team)
    model = nn.Sequential(
        nn.Linear(6, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Dropout(0.2), nn.Linear(8, 3)
    )
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 3, 0.8)

    def loss(model, x, y):
        if fault is not None:
            fault.at("in a lane", team, team.position.step == STRUCK)
            if fault.is_armed("loss"):
                raise Planted("in the loss")
        return F.cross_entropy(model(x), y, reduction="none")

    class Right(ss.metrics.Metric):
        def count(self, outputs, targets):
            if fault is not None:
                fault.at("in evaluate", team, team.position.step >= STRUCK)
                if fault.is_armed("loss"):
                    raise Planted("in the loss")
            return torch.stack(
                [(outputs.argmax(1) == targets).sum(), targets.new_tensor(len(targets))]
            )

        def value(self, total):
            return (total[0] / total[1]).item()

    trainer = team.trainer(model, optimizer, loss, clip_norm=5.0)
    data, rights, losses, times = Samples(fault), [], [], []
    for _ in team.epochs(STEPS // 4):
        for batch in team.batches(data, 24, loaders=loaders):
            if fault is not None:
                fault.at("before the first step", team, team.position.step == 0)
                fault.kill_another(team)
                fault.let_catch_up(team)
                if team.position.step == 2 and team.number == fault.seat:  # one has been asked for
                    fault.at("while a checkpoint is written", team, fault.is_writing())
            trainer.backward(batch)
            if fault is not None:
                here = team.position.step == STRUCK
                fault.at("before the nodes are written", team, here)
            trainer.exchange()
            if fault is not None:
                fault.at("between sums and update", team, here)
            trainer.update()
            scheduler.step()
            times.append(time.monotonic())
            if pace:
                time.sleep(pace)
        rights.append(trainer.evaluate(data, Right(), chunk=10))
        losses.append(trainer.epoch_loss())
        team.log(right=rights[-1], loss=losses[-1])
    return trainer.fingerprint(), rights, losses, times
