"""Unequal devices: what a team does, against the sum of what its devices do alone.

python benchmarks/unequal.py slowed     cpu,cpu@0.5 and slower, 32 lanes; DDP over gloo beside it
python benchmarks/unequal.py busy       another process on one of two cores
python benchmarks/unequal.py follows    that process starts and stops in the middle of a run
python benchmarks/unequal.py equal      planning against a fixed plan, on equal devices
python benchmarks/unequal.py memory     50 million parameters with Adam on four workers, by store

LeNet on Fashion-MNIST, batch 256. Everything is interleaved in rounds.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F

import samestep as ss
from samestep import forkserver
from samestep.memory import shared_fairly
from samestep.models import cross_entropy

BATCH, LANES, WARM = 256, 32, 25


def spread(values: list[float]) -> str:
    ordered = sorted(values)
    return f"{statistics.median(ordered):.4g} ({ordered[0]:.4g} to {ordered[-1]:.4g})"


def train(team: ss.Team, steps: int, warm: int = WARM) -> dict[str, Any]:
    """Samples per second after the warm-up, the plan at the end, the fingerprint after 20 steps."""
    training, _ = ss.data.fashion_mnist()
    model = ss.models.lenet()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.2)
    trainer = team.trainer(model, optimizer, cross_entropy)
    began, fingerprint = 0.0, ""
    for _ in team.epochs(100):
        for batch in team.batches(training, BATCH):
            if team.position.step == warm:
                began = time.perf_counter()
            trainer.step(batch)
            if team.position.step == 10:
                fingerprint = trainer.fingerprint()[:12]
            if team.position.step == steps + warm:
                speed = steps * BATCH / (time.perf_counter() - began)
                return {"speed": speed, "plan": team.plan, "fingerprint": fingerprint}
    raise AssertionError


def train_ddp(team: ss.Team, folder: str, slowdown: float, steps: int, warm: int = 5) -> float:
    """DDP as its documentation has it, half of the batch on each process. A slower second process
    is imitated by a pause before its backward pass, as long as its own work (three forward
    passes) would be longer."""
    import torch.distributed as dist

    meet = f"file://{folder}/meet"
    dist.init_process_group("gloo", init_method=meet, rank=team.number, world_size=team.size)
    training, _ = ss.data.fashion_mnist()
    model = torch.nn.parallel.DistributedDataParallel(ss.models.lenet())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.2)
    order = torch.randperm(len(training))
    began = 0.0
    for step in range(steps + warm):
        if step == warm:
            began = time.perf_counter()
        start = step * BATCH + team.number * BATCH // team.size
        x, y = training.gather(order[start : start + BATCH // team.size])
        optimizer.zero_grad()
        forward = time.perf_counter()
        loss = F.cross_entropy(model(x), y)
        if team.number == 1:
            time.sleep(3 * (time.perf_counter() - forward) * (1 / slowdown - 1))
        loss.backward()
        optimizer.step()
    speed = steps * BATCH / (time.perf_counter() - began)
    del model
    dist.barrier()
    dist.destroy_process_group()
    return speed


def run_ddp(slowdown: float, steps: int) -> float:
    with tempfile.TemporaryDirectory() as folder:
        result: float = ss.launch(train_ddp, devices="2xcpu", args=(folder, slowdown, steps))
    return result


@contextmanager
def on_cores(cores: set[int]) -> Iterator[None]:
    """Workers started inside are pinned to these cores only."""
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, cores)
    try:
        yield
    finally:
        os.sched_setaffinity(0, before)


def spin(core: int) -> None:
    os.sched_setaffinity(0, {core})
    while True:
        pass


@contextmanager
def busy(core: int) -> Iterator[None]:
    """Another process keeps a core busy."""
    process = multiprocessing.get_context("fork").Process(target=spin, args=(core,), daemon=True)
    process.start()
    try:
        yield
    finally:
        process.kill()
        process.join()


def slowed(rounds: int = 5, steps: int = 80) -> None:
    factors = (0.5, 0.25, 0.1)
    speeds: dict[str, list[float]] = {}
    prints, plans = set(), {}

    def note(name: str, devices: str, steps: int, warm: int = WARM) -> None:
        result = ss.launch(train, devices=devices, lanes=LANES, args=(steps, warm))
        speeds.setdefault(name, []).append(result["speed"])
        prints.add(result["fingerprint"])
        plans[name] = list(result["plan"].values())

    for _ in range(rounds):
        note("alone", "cpu", 40, 10)
        for factor in factors:
            note(f"alone {factor}", f"cpu@{factor}", max(10, int(40 * factor)), 10)
            note(f"team {factor}", f"cpu,cpu@{factor}", steps)
            speeds.setdefault(f"DDP {factor}", []).append(run_ddp(factor, int(60 * factor) + 10))
    for factor in factors:
        ratios = [
            team / (one + two)
            for team, one, two in zip(
                speeds[f"team {factor}"], speeds["alone"], speeds[f"alone {factor}"], strict=True
            )
        ]
        ddp = [
            d / (one + two)
            for d, one, two in zip(
                speeds[f"DDP {factor}"], speeds["alone"], speeds[f"alone {factor}"], strict=True
            )
        ]
        print(
            f"cpu,cpu@{factor}: {spread(speeds[f'team {factor}'])} samples/s, of the sum alone "
            f"{spread(ratios)}; lanes {plans[f'team {factor}']}; DDP "
            f"{spread(speeds[f'DDP {factor}'])}, {spread(ddp)} of it; {rounds} rounds"
        )
    print(f"fingerprints: {prints} (one is right)")


def run_busy(rounds: int = 5, steps: int = 100) -> None:
    first, second = sorted(os.sched_getaffinity(0))[:2]
    speeds: dict[str, list[float]] = {"one": [], "two": [], "team": [], "DDP": []}
    prints, plans = set(), []
    for _ in range(rounds):
        with on_cores({first}):
            speeds["one"].append(
                ss.launch(train, devices="cpu", lanes=LANES, args=(40, 10))["speed"]
            )
        with busy(second):
            with on_cores({second}):
                speeds["two"].append(
                    ss.launch(train, devices="cpu", lanes=LANES, args=(30, 10))["speed"]
                )
            result = ss.launch(train, devices="2xcpu", lanes=LANES, args=(steps,))
            speeds["DDP"].append(run_ddp(1.0, 60))
        speeds["team"].append(result["speed"])
        prints.add(result["fingerprint"])
        plans.append(list(result["plan"].values()))
    for name in ("team", "DDP"):
        ratios = [
            a / (b + c) for a, b, c in zip(speeds[name], speeds["one"], speeds["two"], strict=True)
        ]
        print(f"busy core, {name}: {spread(speeds[name])} samples/s, of the sum {spread(ratios)}")
    print(f"alone: {spread(speeds['one'])} and, on the busy core, {spread(speeds['two'])}")
    print(f"lanes at the end {plans}; fingerprints {prints}; {rounds} rounds")


def train_through(team: ss.Team, core: int) -> list[list[int]]:
    """The plan of each step; another process keeps a core busy from step 100 to 200."""
    training, _ = ss.data.fashion_mnist()
    model = ss.models.lenet()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.2)
    trainer = team.trainer(model, optimizer, cross_entropy)
    plans, child = [], 0
    for _ in team.epochs(2):
        for batch in team.batches(training, BATCH):
            if team.is_first and team.position.step == 100:
                child = os.fork()
                if child == 0:
                    spin(core)
            if team.is_first and team.position.step == 200:
                os.kill(child, signal.SIGKILL)
                os.waitpid(child, 0)
            trainer.step(batch)
            plans.append(list(team.plan.values()))
            if team.position.step == 300:
                return plans
    raise AssertionError


def follows(rounds: int = 5) -> None:
    core = sorted(os.sched_getaffinity(0))[1]
    for _ in range(rounds):
        plans = ss.launch(train_through, devices="2xcpu", lanes=LANES, args=(core,))
        for name, at in (("starts", 100), ("stops", 200)):
            begins = next((i for i in range(at, at + 100) if plans[i] != plans[at - 1]), None)
            after = None if begins is None else begins - at
            print(
                f"{name} at step {at}: {plans[at - 1]} before, first change after {after} steps; "
                f"{plans[at + 20]} after 20 steps, {plans[at + 99]} after 99"
            )


def half_each(lanes: int, step: int) -> list[int]:
    return [lanes - lanes // 2, lanes // 2]


def equal(rounds: int = 9, steps: int = 80) -> None:
    speeds: dict[str, list[float]] = {}
    plans = set()
    for lanes in (8, 32):
        for i in range(rounds):
            for kind in ("planned", "fixed") if i % 2 else ("fixed", "planned"):
                plan = half_each if kind == "fixed" else None
                result = ss.launch(train, devices="2xcpu", lanes=lanes, args=(steps,), plan=plan)
                speeds.setdefault(f"{kind} {lanes}", []).append(result["speed"])
                if kind == "planned":
                    plans.add(tuple(result["plan"].values()))
        ratios = [
            a / b for a, b in zip(speeds[f"planned {lanes}"], speeds[f"fixed {lanes}"], strict=True)
        ]
        medians = [statistics.median(speeds[f"{kind} {lanes}"]) for kind in ("planned", "fixed")]
        print(
            f"{lanes} lanes: planned {spread(speeds[f'planned {lanes}'])}, fixed "
            f"{spread(speeds[f'fixed {lanes}'])}; ratio of medians {medians[0] / medians[1]:.4f}, "
            f"by round {spread(ratios)}; plans at the end {sorted(plans)}; {rounds} rounds"
        )
        plans.clear()


# Memory


def wide() -> torch.nn.Module:
    """50 million parameters."""
    return torch.nn.Sequential(
        torch.nn.Linear(1000, 7000), torch.nn.ReLU(), torch.nn.Linear(7000, 6000), torch.nn.ReLU(),
        torch.nn.Linear(6000, 100),
    )  # fmt: skip


class Peak(threading.Thread):
    """Looks at this process's memory, fairly shared, every 20 ms."""

    def __init__(self) -> None:
        super().__init__(daemon=True)
        self.highest, self.over = 0, threading.Event()

    def run(self) -> None:
        while not self.over.wait(0.02):
            self.highest = max(self.highest, shared_fairly())


def weigh(team: ss.Team, kind: str, folder: str, steps: int = 6) -> float:
    """The peak of each worker goes to a file."""
    peak = Peak()
    peak.start()
    x = torch.randn(64, 1000, generator=torch.Generator().manual_seed(0))
    model = wide()
    began = 0.0
    if kind.startswith("DDP"):
        import torch.distributed as dist
        from torch.distributed.optim import ZeroRedundancyOptimizer

        meet = f"file://{folder}/meet"
        dist.init_process_group("gloo", init_method=meet, rank=team.number, world_size=team.size)
        parallel = torch.nn.parallel.DistributedDataParallel(model, gradient_as_bucket_view=True)
        if kind == "DDP + ZeRO":
            optimizer: Any = ZeroRedundancyOptimizer(
                model.parameters(), optimizer_class=torch.optim.Adam, lr=1e-4
            )
        else:
            optimizer = torch.optim.Adam(model.parameters(), lr=1e-4)
        for step in range(steps):
            if step == 2:
                began = time.perf_counter()
            optimizer.zero_grad()
            parallel(x[team.number :: team.size]).square().mean().backward()
            optimizer.step()
        seconds = (time.perf_counter() - began) / (steps - 2)
        dist.barrier()
        dist.destroy_process_group()
    else:
        optimizer = torch.optim.Adam(model.parameters(), lr=1e-4)
        trainer = team.trainer(model, optimizer, lambda m, x: m(x).square().mean(1), store=kind)
        for _ in range(steps):
            for batch in team.batches(ss.data.Tensors(x), 64):
                if team.position.step == 2:
                    began = time.perf_counter()
                trainer.step(batch)
        seconds = (time.perf_counter() - began) / (steps - 2)
    peak.over.set()
    peak.join()
    Path(folder, f"{team.number}").write_text(str(peak.highest))
    return seconds


def memory(rounds: int = 3) -> None:
    kinds = ("replicated", "sharded", "host", "DDP", "DDP + ZeRO")
    peaks: dict[str, list[list[float]]] = {kind: [] for kind in kinds}
    seconds: dict[str, list[float]] = {kind: [] for kind in kinds}
    for _ in range(rounds):
        for kind in kinds:
            with tempfile.TemporaryDirectory() as folder:
                took = ss.launch(weigh, devices="4xcpu", lanes=4, args=(kind, folder))
                found = [int(Path(folder, str(n)).read_text()) / 2**20 for n in range(4)]
            seconds[kind].append(took)
            peaks[kind].append(found)
    for kind in kinds:
        mean = [statistics.mean(found) for found in peaks[kind]]
        most = [max(found) for found in peaks[kind]]
        print(
            f"{kind:>12}: peak MiB per worker, mean {spread(mean)}, highest {spread(most)}; "
            f"s per step {spread(seconds[kind])}; {rounds} rounds"
        )


if __name__ == "__main__":
    known = {
        "slowed": slowed, "busy": run_busy, "follows": follows, "equal": equal, "memory": memory,
    }  # fmt: skip
    with forkserver.kept():
        for name in sys.argv[1:] or list(known):
            known[name]()
