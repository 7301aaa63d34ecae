"""From the command to the end of the first step, for the same script under each launcher.

    python benchmarks/startup.py [ROUNDS]

LeNet, batch 256, two CPU processes. Interleaved in rounds.
"""

from __future__ import annotations

import json
import statistics
import sys
import tempfile
import time
from pathlib import Path

from stage import Actor, Contender

CONTENDERS = (
    Contender("torchrun (DDP)", "ddp", 2),
    Contender("accelerate launch", "accelerate", 2),
    Contender("fabric run", "fabric", 2),
    Contender("samestep", "samestep", 2, ("workers=2", "lanes=8")),
)


def first_step(contender: Contender) -> float:
    """Seconds."""
    with tempfile.TemporaryDirectory() as folder:
        began = time.perf_counter()
        actor = Actor(contender, "lenet-256", Path(folder))
        try:
            actor.meet()
            actor.turn(1)
            return time.perf_counter() - began
        finally:
            actor.close()


def main(rounds: int = 9) -> None:
    seconds: dict[str, list[float]] = {contender.title: [] for contender in CONTENDERS}
    for turn in range(-1, rounds):  # the first one finds nothing in the kernel's cache
        for contender in CONTENDERS:
            took = first_step(contender)
            if turn >= 0:
                seconds[contender.title].append(took)
    ours = statistics.median(seconds["samestep"])
    print("| | s to the first step, median (lowest to highest) | samestep's over it |")
    print("| --- | --- | --- |")
    for title, found in seconds.items():
        median = statistics.median(found)
        print(f"| {title} | {median:.2f} ({min(found):.2f} to {max(found):.2f}) | ", end="")
        print(f"{ours / median:.2f} |")
    print(f"\n{rounds} rounds.")
    Path("runs/bench").mkdir(parents=True, exist_ok=True)
    Path("runs/bench/startup.json").write_text(json.dumps(seconds))


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
