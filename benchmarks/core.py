"""The core's speed figures, each against its yardstick in the same run, interleaved in rounds.

python benchmarks/core.py scaling     two workers against one: LeNet, batch 256
python benchmarks/core.py exchange    the shared-memory exchange against gloo's all_reduce
python benchmarks/core.py startup     command to first committed step against `import torch`
python benchmarks/core.py survival    what watching, checking and saving cost while nothing happens
"""

from __future__ import annotations

import io
import json
import os
import socket
import statistics
import subprocess
import sys
import tempfile
import textwrap
import time
from contextlib import redirect_stdout
from pathlib import Path
from typing import Any

import torch

import samestep as ss
from samestep import forkserver
from samestep.models import cross_entropy


def spread(values: list[float]) -> str:
    ordered = sorted(values)
    return f"median {statistics.median(ordered):.4g} ({ordered[0]:.4g} to {ordered[-1]:.4g})"


# Two workers against one


def train(team: ss.Team, steps: int) -> float:
    """Samples per second over `steps` steps, after a short warm-up."""
    training, _ = ss.data.fashion_mnist()
    model = ss.models.lenet()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.2)
    trainer = team.trainer(model, optimizer, cross_entropy)
    began = 0.0
    for batch in team.batches(training, 256):
        if team.position.step == 10:
            began = time.perf_counter()
        trainer.step(batch)
        if team.position.step == steps + 10:
            break
    return steps * 256 / (time.perf_counter() - began)


def scaling(rounds: int = 7, steps: int = 60) -> None:
    speeds: dict[str, list[float]] = {"1xcpu": [], "2xcpu": []}
    with forkserver.kept():
        for _ in range(rounds):
            for devices, measured in speeds.items():
                measured.append(ss.launch(train, devices=devices, args=(steps,)))
    ratios = [two / one for one, two in zip(*speeds.values(), strict=True)]
    for devices, measured in speeds.items():
        print(f"LeNet, batch 256, {devices}: samples/s {spread(measured)}")
    one, two = (statistics.median(measured) for measured in speeds.values())
    print(f"ratio of medians {two / one:.3f}; by round {spread(ratios)}; {rounds} rounds")


# Survival, on and off


def survival(rounds: int = 11, steps: int = 200) -> None:
    with tempfile.TemporaryDirectory() as folder:
        kinds: dict[str, dict[str, Any]] = {
            "off": {"check_every": 0, "hang_after": None},
            "on": {"run": Path(folder) / "run"},
            "on, saving every 100 steps": {"run": Path(folder) / "saving", "save_every": 100},
        }
        speeds: dict[str, list[float]] = {name: [] for name in kinds}
        with forkserver.kept(), redirect_stdout(io.StringIO()):
            for i in range(rounds):
                for name in sorted(kinds, reverse=i % 2 == 1):
                    speeds[name].append(
                        ss.launch(train, devices="2xcpu", args=(steps,), **kinds[name])
                    )
    for name, measured in speeds.items():
        ratios = [a / b for a, b in zip(measured, speeds["off"], strict=True)]
        print(f"{name}: samples/s {spread(measured)}; against off, by round, {spread(ratios)}")


# The exchange against gloo


def exchange_times(team: ss.Team, rounds: int, repeats: int, port: int) -> dict[str, list[float]]:
    """Milliseconds of each exchange and each all_reduce, by turns, on the first worker."""
    import torch.distributed as dist

    from samestep.exchange import Flat, Shape, Work
    from samestep.lanes import reduction, share

    pinned, everywhere = os.sched_getaffinity(0), set(range(os.cpu_count() or 1))
    os.sched_setaffinity(0, everywhere)  # for gloo's own threads, which start here
    store = dist.TCPStore("127.0.0.1", port, team.size, team.is_first)
    dist.init_process_group("gloo", store=store, rank=team.number, world_size=team.size)
    runs = share(2, [1.0] * team.size)
    work = Work(runs, lambda runs: reduction(runs, 2), lambda run: None)
    times: dict[str, list[float]] = {}
    for floats in (131_000, 11_000_000):
        many = max(5, repeats * 131_000 // floats)
        exchange = team.exchange(Shape(floats, 16), 2, 0, f"bench {floats}", "")
        mine = exchange.slot(runs[team.number].start)
        grads = torch.randn(floats)
        private = torch.empty(floats)
        last: list[Flat] = []

        # Nodes are new in every step, so they are written each time, outside the clock but for
        # the last kind. A node lies in its slot: a step builds it there.
        def write(mine=mine, grads=grads) -> None:  # type: ignore[no-untyped-def]
            mine.f32.copy_(grads)

        def reduce(exchange=exchange, last=last) -> None:  # type: ignore[no-untyped-def]
            last[:] = [exchange.reduce(work)]

        def copy_out(private=private, last=last) -> None:  # type: ignore[no-untyped-def]
            private.copy_(last[0].f32)

        def gloo(grads=grads) -> None:  # type: ignore[no-untyped-def]
            dist.all_reduce(grads)

        # name, before the clock, on the clock, cores
        kinds = (
            ("exchange", (write,), (reduce,), pinned),
            ("sum copied", (write,), (reduce, copy_out), pinned),
            ("both copied", (), (write, reduce, copy_out), pinned),
            ("gloo pinned", (), (gloo,), pinned),
            ("gloo", (), (gloo,), everywhere),
        )
        for _ in range(rounds):
            for name, before, timed, cores in kinds:
                os.sched_setaffinity(0, cores)
                key = f"{name} {floats}"
                for i in range(many + 3):
                    for call in before:
                        call()
                    began = time.perf_counter()
                    for call in timed:
                        call()
                    if i >= 3:
                        times.setdefault(key, []).append((time.perf_counter() - began) * 1e3)
                grads.normal_()
    dist.destroy_process_group()
    return times


def exchange(rounds: int = 7, repeats: int = 200) -> None:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    times = ss.launch(exchange_times, devices="2xcpu", args=(rounds, repeats, port))
    for name, measured in times.items():
        quarters = statistics.quantiles(measured, n=4)
        print(
            f"{name:>20} floats: {statistics.median(measured):8.3f} ms "
            f"(quartiles {quarters[0]:.3f} to {quarters[2]:.3f}; {len(measured)} runs)"
        )
    for floats in (131_000, 11_000_000):
        ours, summed, both, pinned, free = (
            statistics.median(times[f"{name} {floats}"])
            for name in ("exchange", "sum copied", "both copied", "gloo pinned", "gloo")
        )
        best = min(pinned, free)
        print(
            f"{floats}: of gloo's better median, the exchange takes {ours / best:.3f}; with the "
            f"sum copied to private memory {summed / best:.3f}; and the nodes copied from there "
            f"too {both / best:.3f}"
        )


# Start-up

SCRIPT = """
    import sys, time
    import torch
    import torch.nn.functional as F
    import samestep as ss

    def loss(model, images, labels):
        return F.cross_entropy(model(images), labels, reduction="none")

    def main(team):
        train, test = ss.data.fashion_mnist()
        model = ss.models.lenet()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.2)
        trainer = team.trainer(model, optimizer, loss)
        for batch in team.batches(train, batch_size=256):
            trainer.step(batch)
            return time.time()

    print(ss.launch(main, devices="2xcpu"))
"""


def startup(rounds: int = 9) -> None:
    imports, firsts = [], []
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    with tempfile.TemporaryDirectory() as folder:
        script = Path(folder) / "train.py"
        script.write_text(textwrap.dedent(SCRIPT))
        for _ in range(rounds):
            began = time.time()
            subprocess.run([sys.executable, "-c", "import torch"], check=True, env=environment)
            imports.append(time.time() - began)
            began = time.time()
            command = [sys.executable, str(script)]
            done = subprocess.run(
                command, check=True, env=environment, capture_output=True, text=True
            )
            firsts.append(float(json.loads(done.stdout)) - began)
    allowed = statistics.median(imports) * 1.5 + 1
    print(f"import torch: s {spread(imports)}")
    print(f"first committed step, 2 CPU workers: s {spread(firsts)}; allowed {allowed:.2f}")


if __name__ == "__main__":
    for name in sys.argv[1:] or ["scaling", "exchange", "startup", "survival"]:
        globals()[name]()
