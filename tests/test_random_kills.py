"""Forty SIGKILLs at random moments of one run: the same hash, and how long it takes to go on."""

from __future__ import annotations

import os
import random
import signal
import statistics
import struct
import threading
import time
from pathlib import Path

import pytest
import torch

import jobs
import samestep as ss

KILLS, STEPS = 40, 1050
EVENT = struct.Struct("<dqqq")  # when, process, seat, step (-1: has begun)


def long(team, folder="", pace=0.0):
    """Dropout, momentum and a schedule; each worker notes when it commits a step."""

    def note(step):
        if folder:
            os.write(events, EVENT.pack(time.monotonic(), os.getpid(), team.number, step))

    events = os.open(f"{folder}/events", os.O_APPEND | os.O_WRONLY) if folder else -1
    note(-1)
    model = torch.nn.Sequential(
        torch.nn.Flatten(), torch.nn.Linear(100, 24), torch.nn.ReLU(), torch.nn.Dropout(0.1),
        torch.nn.Linear(24, 5),
    )  # fmt: skip
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 100, 0.7)

    def loss(model, x, y):
        if pace:
            time.sleep(pace)  # a lane's own time
        return jobs.cross_entropy(model, x, y)

    trainer = team.trainer(model, optimizer, loss)
    data, accuracies = jobs.images(700), []
    for _ in team.epochs(STEPS // 35):
        for batch in team.batches(data, 20):
            trainer.step(batch)
            scheduler.step()
            note(team.position.step)
        accuracies.append(trainer.evaluate(data, ss.metrics.accuracy))
    return trainer.fingerprint(), accuracies


def read(folder):
    return list(EVENT.iter_unpack((folder / "events").read_bytes()))


class Killer(threading.Thread):
    """Kills at random moments, and never the last worker that has the run's state."""

    def __init__(self, folder, seed):
        super().__init__(daemon=True)
        self.folder, self.random = folder, random.Random(seed)
        self.kills: list[tuple[float, int, int]] = []
        self.ended: set[int] = set()  # by the launcher: what they waited for was lost
        self.over = threading.Event()

    def run(self):
        while len(self.kills) < KILLS and not self.over.is_set():
            self.over.wait(self.random.uniform(0.02, 0.35))
            events = read(self.folder)
            dead = self.ended | {pid for _, pid, _ in self.kills}
            seats = {pid: seat for _, pid, seat, _ in events if pid not in dead}
            live = {pid for _, pid, _, step in events if step > 0 and pid not in dead}
            able = [pid for pid in seats if pid not in live or len(live) > 1]
            if not live or not able:
                continue
            pid = self.random.choice(able)
            now = time.monotonic()
            try:
                os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:
                self.ended.add(pid)
            else:
                self.kills.append((now, pid, seats[pid]))


@pytest.fixture(scope="module")
def undisturbed():
    return ss.launch(long, devices="1xcpu", lanes=6)


@pytest.mark.parametrize("seed", [1, 2, 3])
def test_forty_kills(seed, undisturbed, tmp_path, record_property):
    (tmp_path / "events").touch()
    killer, lane_s = Killer(tmp_path, seed), 0.004
    killer.start()
    try:
        result = ss.launch(
            long,
            devices="3xcpu",
            lanes=6,
            args=(str(tmp_path), lane_s),
            max_losses=KILLS,
        )
    finally:
        killer.over.set()
        killer.join()
    assert result == undisturbed
    assert len(killer.kills) == KILLS, "each of them has struck"
    events = read(tmp_path)
    to_step, back = [], []
    for when, _, seat in killer.kills:
        later = [t for t, _, _, step in events if t > when and step > 0]
        if later:
            to_step.append(min(later) - when)
        # Back: the first step of the next process in this seat, if that one was not killed before.
        begun = [(t, pid) for t, pid, s, step in events if t > when and s == seat and step < 0]
        if begun:
            pid = min(begun)[1]
            first = [t for t, p, _, step in events if p == pid and step > 0]
            back += [min(first) - when] if first else []
    figures = {
        "kill to next step, median ms": statistics.median(to_step) * 1e3,
        "kill to next step, longest ms": max(to_step) * 1e3,
        "back, median s": statistics.median(back),
        "back, longest s": max(back),
        "kills, returns": (len(to_step), len(back)),
    }
    record_property("figures", figures)
    Path(tmp_path / "figures").write_text(repr(figures))
    print(figures)
    assert statistics.median(to_step) <= 6 * lane_s + 0.1
    assert statistics.median(back) <= 2
