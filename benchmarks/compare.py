"""samestep and its peers on the same jobs, in one run, interleaved in rounds.

    python benchmarks/compare.py [--rounds N] [--out FOLDER] [JOB ...]

All contenders of a job are started once, then take turns of a few steps each, round after round, in
an order that is turned round by round; who is not at its turn blocks. So a noisy neighbour hits all
alike, and compiling is not measured. What is reported is the median of the rounds and their spread.
Writes FOLDER/compare.json and FOLDER/compare.md.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import sys
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass, field
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from stage import Actor, Contender

from jobs import JOBS

WORKERS = 2

PACKAGES = ("torch", "accelerate", "lightning-fabric", "deepspeed", "ray", "transformers")


def ours(workers: int, lanes: int, compile: int = 0, exact: int = 1) -> Contender:
    plural = "" if workers == 1 else "s"
    title = f"samestep, {workers} worker{plural}, {lanes} lane{'' if lanes == 1 else 's'}"
    options = f"workers={workers}", f"lanes={lanes}", f"compile={compile}", f"exact={exact}"
    return Contender(title if exact else f"{title}, exact=False", "samestep", workers, options)


EAGER = (
    Contender("plain PyTorch, one process, two threads", "plain", 1),
    Contender("DDP over gloo", "ddp", WORKERS),
    Contender("Accelerate", "accelerate", WORKERS),
    Contender("Lightning Fabric", "fabric", WORKERS),
    Contender("DeepSpeed", "deepspeed", WORKERS),
    Contender("Ray Train", "ray", WORKERS),
    Contender("from scratch (ss.scratch)", "scratch", 1),
    Contender("control: plain PyTorch, one thread", "plain", 1, ("threads=1",)),
    Contender("control: two of those, which do not speak to each other", "strangers", WORKERS),
    ours(1, 8),
    ours(1, 1),
    ours(2, 8),
    ours(2, 2),
    ours(2, 8, exact=0),
)
COMPILED = (
    Contender("plain PyTorch, one process, two threads", "plain", 1, ("compile=1",)),
    Contender("DDP over gloo, module compiled", "ddp", WORKERS, ("compile=1",)),
    Contender("DDP over gloo, wrapper compiled", "ddp", WORKERS, ("compile=1", "outer=1")),
    ours(1, 8, compile=1),
    ours(2, 8, compile=1),
    ours(2, 2, compile=1),
    ours(2, 8, compile=1, exact=0),
)
NOT_FOR = {  # what the tutorials' loop does not do: buffers, and losses with weights of their own
    "scratch": ("resnet18", "transformer"),
}


@dataclass
class Found:
    """What one contender did: seconds of each turn, and its losses (at the start of the
    measurement and at its end)."""

    contender: Contender
    seconds: list[float] = field(default_factory=list)
    losses: list[float] = field(default_factory=list)
    error: str = ""


@contextmanager
def stage(contenders: tuple[Contender, ...], job: str) -> Iterator[tuple[list[Actor], list[Found]]]:
    """Start contenders, one after the other so that they do not hold each other up."""
    with tempfile.TemporaryDirectory() as folder, ExitStack() as stack:
        actors, found = [], [Found(contender) for contender in contenders]
        for i, contender in enumerate(contenders):
            place = Path(folder, str(i))
            place.mkdir()
            actor = Actor(contender, job, place)
            stack.callback(actor.close)
            try:
                actor.meet()
                actors.append(actor)
            except RuntimeError as error:
                found[i].error = str(error)
                print((place / "log").read_text() if os.environ.get("BENCH_LOUD") else "")
                print(f"  {contender.title}: {error}", file=sys.stderr)
        yield actors, found


def measure(job: str, contenders: tuple[Contender, ...], rounds: int, warm: int) -> list[Found]:
    """Turns in rounds, after `warm` turns that are not counted."""
    steps = JOBS[job].steps
    with stage(contenders, job) as (actors, found):
        by_title = {f.contender.title: f for f in found}
        for turn in range(-warm, rounds):
            # Turned round, so that nobody always comes after the same one.
            for actor in actors[turn % len(actors) :] + actors[: turn % len(actors)]:
                mine = by_title[actor.contender.title]
                if mine.error:
                    continue
                try:
                    seconds = actor.turn(steps)
                    if turn >= 0:
                        mine.seconds.append(seconds)
                    if turn in (-1, rounds - 1):
                        mine.losses.append(actor.loss())
                except RuntimeError as error:
                    mine.error = str(error)
    return found


# Tables


def speed(job: str, found: Found) -> list[float]:
    return [JOBS[job].steps * JOBS[job].batch / seconds for seconds in found.seconds]


def table(job: str, found: list[Found]) -> list[str]:
    """A Markdown table: samples per second, and that over the best peer's, by round and overall."""
    there = [f for f in found if f.seconds]
    peers = [f for f in there if f.contender.is_peer] or there  # with --only there may be none
    best = max(peers, key=lambda f: statistics.median(speed(job, f)))
    wanted = statistics.median([f.losses[-1] for f in peers])
    lines = [
        "| | processes | samples/s, median (lowest to highest) | of the best peer | loss after "
        "the first and last turn |",
        "| --- | --- | --- | --- | --- |",
    ]
    for f in found:
        if not f.seconds:
            lines.append(f"| {f.contender.title} | {f.contender.processes} | {f.error} | | |")
            continue
        mine = speed(job, f)
        ratio = statistics.median(mine) / statistics.median(speed(job, best))
        is_apart = f.contender.function == "strangers"
        far = 0.0 if is_apart else abs(f.losses[-1] - wanted) / wanted
        losses = ", ".join(f"{loss:.4f}" for loss in f.losses)
        if far > JOBS[job].close:
            losses += f" (**{100 * far:.0f} % off**)"
        lines.append(
            f"| {f.contender.title} | {f.contender.processes} | {statistics.median(mine):,.0f} "
            f"({min(mine):,.0f} to {max(mine):,.0f}) | {ratio:.3f} | {losses} |"
        )
    return [*lines, "", *ratios(job, there)]


def ratios(job: str, found: list[Found]) -> list[str]:
    """What is compared round by round: in one round the machine is the same for both."""
    speeds = {f.contender.title: speed(job, f) for f in found}
    two, fused = "samestep, 2 workers, 8 lanes", "samestep, 2 workers, 8 lanes, exact=False"
    processes = {f.contender.title: f.contender.processes for f in found if f.contender.is_peer}
    wanted = [
        ("two workers, 8 lanes / twice one worker", two, "samestep, 1 worker, 8 lanes", 2),
        (
            "two workers, 2 lanes / twice one worker, 1 lane",
            "samestep, 2 workers, 2 lanes",
            "samestep, 1 worker, 1 lane",
            2,
        ),
        (
            "the same of the controls",
            "control: two of those, which do not speak to each other",
            "control: plain PyTorch, one thread",
            2,
        ),
        ("exact, 8 lanes / exact=False", two, fused, 1),
        ("exact, 2 lanes / exact=False", "samestep, 2 workers, 2 lanes", fused, 1),
    ]
    pairs = [title for title, count in processes.items() if count == WORKERS]
    if pairs:
        best = max(pairs, key=lambda title: statistics.median(speeds[title]))
        wanted += [
            (f"two workers, {lanes} lanes / best of two processes ({best})", title, best, 1)
            for lanes, title in ((8, two), (2, "samestep, 2 workers, 2 lanes"))
        ]
    lines = []
    for name, above, below, times in wanted:
        if above in speeds and below in speeds:
            each = [a / b / times for a, b in zip(speeds[above], speeds[below], strict=False)]
            lines.append(
                f"- {name}: by round {statistics.median(each):.3f} "
                f"({min(each):.3f} to {max(each):.3f})"
            )
    return lines


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "not installed"


def machine() -> dict[str, str]:
    with open("/proc/cpuinfo") as file:
        model = next(line.split(":")[1].strip() for line in file if line.startswith("model name"))
    versions = ", ".join(f"{package} {_version(package)}" for package in PACKAGES)
    return {
        "machine": f"{os.cpu_count()} cores, {model}",
        "python": platform.python_version(),
        "versions": versions,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("jobs", nargs="*", metavar="JOB", help=", ".join(JOBS))
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--warm", type=int, default=2)
    parser.add_argument("--only", default="", help="contenders whose title has one of these words")
    parser.add_argument("--kind", choices=("eager", "compiled"))
    parser.add_argument("--out", type=Path, default=Path("runs/bench"))
    chosen = parser.parse_args()
    unknown = [job for job in chosen.jobs if job not in JOBS]
    if unknown:
        parser.error(f"JOB {', '.join(unknown)}: must be one of {', '.join(JOBS)}")
    chosen.out.mkdir(parents=True, exist_ok=True)
    facts = machine()
    text = [f"{facts['machine']}; Python {facts['python']}; {facts['versions']}.", ""]
    record = {**facts, "rounds": chosen.rounds, "jobs": {}}
    for job in chosen.jobs or JOBS:
        for kind, contenders in (("eager", EAGER), ("compiled", COMPILED)):
            if chosen.kind not in (None, kind):
                continue
            words = [word for word in chosen.only.split(",") if word]
            picked = tuple(
                c
                for c in contenders
                if job not in NOT_FOR.get(c.function, ())
                and (not words or any(word in c.title for word in words))
            )
            found = measure(job, picked, chosen.rounds, chosen.warm)
            part = [f"### {JOBS[job].title}, {kind}", "", *table(job, found), ""]
            print("\n".join(part), flush=True)
            text += part
            record["jobs"][f"{job} {kind}"] = [asdict(f) for f in found]
            (chosen.out / "compare.md").write_text("\n".join(text))
            (chosen.out / "compare.json").write_text(json.dumps(record, indent=1))


if __name__ == "__main__":
    main()
