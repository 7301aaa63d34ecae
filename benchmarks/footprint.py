"""The memory of four workers against that of four DDP processes, on the same jobs.

    python benchmarks/footprint.py [ROUNDS]

Proportional set size (what processes share is divided between them), summed: over the workers, and
over all processes that were started, launchers included. Read after the same number of steps, and
at its highest while they are made. Nobody else on the machine has torch's files open.
"""

from __future__ import annotations

import json
import statistics
import sys
import tempfile
import threading
from contextlib import suppress
from pathlib import Path

from stage import Actor, Contender

STEPS = {"lenet-256": 20, "mlp": 10, "transformer": 5, "resnet18": 2}
CONTENDERS = (
    Contender("DDP over gloo", "ddp", 4),
    Contender("samestep, 4 lanes", "samestep", 4, ("workers=4", "lanes=4")),
    Contender("samestep, 8 lanes", "samestep", 4, ("workers=4", "lanes=8")),
)


def fair_share(pid: int) -> float:
    """MiB."""
    with suppress(OSError):
        for line in Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines():
            if line.startswith("Pss:"):
                return int(line.split()[1]) / 1024
    return 0.0


class Peak(threading.Thread):
    """The highest sum over some processes, read every 20 ms."""

    def __init__(self, pids: list[int]) -> None:
        super().__init__(daemon=True)
        self._pids, self.highest, self.over = pids, 0.0, threading.Event()

    def run(self) -> None:
        while not self.over.wait(0.02):
            self.highest = max(self.highest, sum(map(fair_share, self._pids)))


def weigh(contender: Contender, job: str) -> tuple[float, float, float]:
    """MiB of the workers at their highest and after the steps, and of all processes then."""
    with tempfile.TemporaryDirectory() as folder:
        actor = Actor(contender, job, Path(folder))
        try:
            actor.meet()
            actor.turn(1)
            peak = Peak(actor.workers)
            peak.start()
            actor.turn(STEPS[job])
            peak.over.set()
            peak.join()
            return (
                peak.highest,
                sum(map(fair_share, actor.workers)),
                sum(map(fair_share, actor.processes())),
            )
        finally:
            actor.close()


def main(rounds: int = 3) -> None:
    found: dict[str, dict[str, list[tuple[float, float, float]]]] = {}
    for job in STEPS:
        found[job] = {contender.title: [] for contender in CONTENDERS}
        for _ in range(rounds):
            for contender in CONTENDERS:
                found[job][contender.title].append(weigh(contender, job))
    print("| job | | workers, highest | after | with launchers | of DDP: highest, after, all |")
    print("| --- | --- | --- | --- | --- | --- |")
    for job, contenders in found.items():
        base = [statistics.median(part) for part in zip(*contenders["DDP over gloo"], strict=True)]
        for title, values in contenders.items():
            parts = [statistics.median(part) for part in zip(*values, strict=True)]
            spread = max(v[1] for v in values) - min(v[1] for v in values)
            ratios = ", ".join(f"{a / b:.2f}" for a, b in zip(parts, base, strict=True))
            print(
                f"| {job} | {title} | {parts[0]:,.0f} MiB | {parts[1]:,.0f} (spread {spread:,.0f}) "
                f"| {parts[2]:,.0f} | {ratios} |"
            )
    print(f"\n{rounds} rounds.")
    Path("runs/bench").mkdir(parents=True, exist_ok=True)
    Path("runs/bench/footprint.json").write_text(json.dumps(found))


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
