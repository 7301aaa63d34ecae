"""How a step grows: with workers, with lanes, with parameters; plots, and the cost of each part.

    python benchmarks/growth.py [ROUNDS]

Writes docs/growth.png and prints the fitted costs. More workers than cores take turns on them, so
their seconds are counted on each worker's own clock (what its thread was given), not on the wall.
"""

from __future__ import annotations

import json
import os
import statistics
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

import samestep as ss
from samestep import forkserver
from samestep.exchange.shared_memory import SharedMemory
from samestep.models import cross_entropy
from samestep.results import Results

WORKERS = (1, 2, 3, 4, 6, 8, 12, 16)
LANES = (1, 2, 4, 8, 16, 32, 64)
PARAMETERS = (10_000, 30_000, 100_000, 300_000, 1_000_000, 3_000_000, 10_000_000, 30_000_000,
              100_000_000)  # fmt: skip


class Counted:
    """Seconds that this thread has spent in some methods."""

    def __init__(self, *methods: tuple[type, str]) -> None:
        self.seconds = dict.fromkeys((name for _, name in methods), 0.0)
        for owner, name in methods:
            setattr(owner, name, self._counting(getattr(owner, name), name))

    def _counting(self, method: Any, name: str) -> Any:
        def call(*args: Any, **kwargs: Any) -> Any:
            began = time.thread_time()
            try:
                return method(*args, **kwargs)
            finally:
                self.seconds[name] += time.thread_time() - began

        return call


def line(parameters: int) -> nn.Module:
    """One linear layer with about so many parameters, on 100 inputs."""
    return nn.Linear(100, max(2, parameters // 101))


def steps_of(team: ss.Team, model: nn.Module, data: Any, batch: int, steps: int) -> dict[str, Any]:
    """The median seconds of a step, the thread's seconds in the exchange's parts, per step."""
    counted = Counted((SharedMemory, "_add"), (Results, "give_gradients"))
    trainer = team.trainer(model, torch.optim.SGD(model.parameters(), lr=1e-3), cross_entropy)
    took: list[float] = []
    before: dict[str, float] = {}
    spent = list(team.board.clock.seconds)
    warm = 3
    for _ in team.epochs(10_000):
        for current in team.batches(data, batch, drop_last=True):
            if len(took) == warm:
                before, spent = dict(counted.seconds), list(team.board.clock.seconds)
            began = time.perf_counter()
            trainer.step(current)
            took.append(time.perf_counter() - began)
            if len(took) == warm + steps:
                parts = {n: (s - before[n]) / steps for n, s in counted.seconds.items()}
                clock = [
                    (a - b) / steps for a, b in zip(team.board.clock.seconds, spent, strict=True)
                ]
                return {
                    "step": statistics.median(took[warm:]),
                    **parts,
                    "compute": clock[1],
                    "exchange": clock[3],
                    "update": clock[4],
                }
    raise AssertionError


def on_lenet(team: ss.Team, steps: int) -> dict[str, Any]:
    return steps_of(team, ss.models.lenet(), ss.data.fashion_mnist()[0], 256, steps)


def on_line(team: ss.Team, parameters: int, steps: int) -> dict[str, Any]:
    x = torch.randn(64, 100, generator=torch.Generator().manual_seed(0))
    data = ss.data.Tensors(x, torch.zeros(64, dtype=torch.int64))
    return steps_of(team, line(parameters), data, 2 * team.size, steps)


def median_of(runs: list[dict[str, Any]]) -> dict[str, float]:
    return {name: statistics.median(run[name] for run in runs) for name in runs[0]}


def measure(rounds: int) -> dict[str, dict[int, dict[str, float]]]:
    found: dict[str, dict[int, list[dict[str, Any]]]] = {
        "workers": {}, "lanes": {}, "parameters": {}, "exchange": {},
    }  # fmt: skip

    def note(what: str, at: int, main: Any, *args: int, **options: Any) -> None:
        result = ss.launch(main, args=args, check_every=0, hang_after=None, **options)
        found[what].setdefault(at, []).append(result)

    with forkserver.kept():
        for _ in range(rounds):
            for workers in WORKERS:
                equal = [16 // workers + (i < 16 % workers) for i in range(workers)]
                options: dict[str, Any] = {
                    "devices": f"{workers}xcpu", "lanes": 16, "plan": lambda *_, e=equal: e,
                }  # fmt: skip
                note("workers", workers, on_lenet, 12, **options)
                if workers > 1:
                    one = {**options, "lanes": workers, "plan": lambda *_, n=workers: [1] * n}
                    note("exchange", workers, on_line, 1_000_000, 12, **one)
            for lanes in LANES:
                note("lanes", lanes, on_lenet, 15, devices="1xcpu", lanes=lanes)
            for parameters in PARAMETERS:
                many = 5 if parameters > 3_000_000 else 30
                note(
                    "parameters", parameters, on_line, parameters, many, devices="2xcpu", lanes=2,
                    plan=lambda *_: [1, 1],
                )  # fmt: skip
    return {
        what: {at: median_of(runs) for at, runs in each.items()} for what, each in found.items()
    }


def fitted(points: dict[int, float]) -> tuple[float, float]:
    """Constant and slope of a line, by least squares of the relative errors."""
    x, y = np.array(list(points)), np.array(list(points.values()))
    slope, constant = np.polyfit(x, y, 1, w=1 / y)
    return float(constant), float(slope)


def report(found: dict[str, dict[int, dict[str, float]]]) -> None:
    def column(what: str, name: str) -> dict[int, float]:
        return {int(at): values[name] for at, values in found[what].items()}

    constant, slope = fitted(column("lanes", "step"))
    print(f"a step of LeNet (batch 256, one worker): {1e3 * constant:.1f} ms "
          f"and {1e3 * slope:.2f} ms for each lane")  # fmt: skip
    for name in ("compute", "exchange", "update", "step"):
        constant, slope = fitted(column("parameters", name))
        print(f"with parameters, two workers: {name} {1e3 * constant:.3f} ms and "
              f"{1e9 * slope:.3f} ns for each")  # fmt: skip
    print("workers: " + ", ".join(
        f"{w}: {1e3 * s:.1f} ms" for w, s in column("workers", "step").items()))  # fmt: skip
    print("exchange of a million floats, ms of each worker's own time, adding / reading the sums: "
          + ", ".join(
        f"{w}: {1e3 * v['_add']:.2f} / {1e3 * v['give_gradients']:.2f}"
        for w, v in found["exchange"].items()))  # fmt: skip


def draw(found: dict[str, dict[int, dict[str, float]]], path: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    def column(what: str, name: str) -> tuple[list[int], list[float]]:
        items = sorted((int(at), values[name] * 1e3) for at, values in found[what].items())
        return [at for at, _ in items], [value for _, value in items]

    cores = os.cpu_count() or 1
    figure, axes = plt.subplots(2, 2, figsize=(11, 8), layout="constrained")
    ax = axes[0][0]
    ax.plot(*column("workers", "step"), "o-")
    ax.axvspan(cores, max(WORKERS), color="0.92")
    ax.text(cores + 0.3, ax.get_ylim()[1] * 0.96, f"more workers than the {cores} cores",
            va="top")  # fmt: skip
    ax.set(title="LeNet, batch 256, 16 lanes", xlabel="workers", ylabel="ms per step")
    ax.set_ylim(bottom=0)
    ax = axes[0][1]
    x, y = column("lanes", "step")
    constant, slope = fitted(dict(zip(x, y, strict=True)))
    ax.plot(x, y, "o", label="measured")
    ax.plot(x, [constant + slope * lanes for lanes in x],
            label=f"{constant:.1f} + {slope:.2f} per lane")  # fmt: skip
    ax.set(title="LeNet, batch 256, one worker", xlabel="lanes", ylabel="ms per step")
    ax.set_ylim(bottom=0)
    ax.legend()
    ax = axes[1][0]
    for name in ("step", "compute", "exchange", "update"):
        ax.loglog(*column("parameters", name), "o-", label=name)
    ax.set(title="One linear layer, two workers, two lanes", xlabel="parameters", ylabel="ms")
    ax.legend()
    ax = axes[1][1]
    ax.plot(*column("exchange", "_add"), "o-", label="adding its slice of all nodes")
    ax.plot(*column("exchange", "give_gradients"), "o-", label="reading the sums")
    ax.set(title="Exchange of a million floats, each worker's own time", xlabel="workers",
           ylabel="ms per step")  # fmt: skip
    ax.set_ylim(bottom=0)
    ax.legend()
    for ax in axes.flat:
        ax.grid(alpha=0.3)
    figure.savefig(path, dpi=110)


def main(rounds: int = 3) -> None:
    found = measure(rounds)
    Path("runs/bench").mkdir(parents=True, exist_ok=True)
    Path("runs/bench/growth.json").write_text(json.dumps(found, indent=1))
    report(found)
    draw(found, Path(__file__).parent.parent / "docs" / "growth.png")


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
