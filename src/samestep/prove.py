"""Proving it: one short training on different devices and plans, and a control that differs."""

from __future__ import annotations

import runpy
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from samestep import forkserver, models, seeds
from samestep.devices import Machine
from samestep.errors import UsageError
from samestep.launch import Overrides, launch, overridden
from samestep.settings import Plan
from samestep.supervise import Returned

Job = Callable[[], Any]


@dataclass(frozen=True, slots=True)
class Case:
    """One training of the proof."""

    name: str
    devices: str
    lanes: int
    plan: Plan | None = None


@dataclass(frozen=True, slots=True)
class Row:
    """What it gave: one fingerprint for each trainer."""

    case: Case
    fingerprints: tuple[str, ...]


class _Ended(BaseException):
    """Leaves a script once its first launch is over. Not an error that a script could catch."""


def uneven(workers: int, lanes: int, step: int) -> list[int]:
    """A plan that is lopsided and changes with every step; some workers get nothing at times."""
    cuts = sorted(seeds.key("uneven", step, i) % (lanes + 1) for i in range(workers - 1))
    return [b - a for a, b in zip([0, *cuts], [*cuts, lanes], strict=True)]


def cases(machine: Machine, lanes: int) -> list[Case]:
    """The control first, then one device, several, and several with uneven plans."""
    kind, most = ("cuda", machine.gpus) if machine.gpus else ("cpu", 3)
    several = [n for n in (2, 3, 4) if n <= most]
    control = Case(f"control: {lanes + 1} lanes", f"1x{kind}", lanes + 1)
    even = [Case("one device" if n == 1 else "even", f"{n}x{kind}", lanes) for n in (1, *several)]
    odd = [Case("uneven", f"{n}x{kind}", lanes, partial(uneven, n)) for n in several]
    return [control, *even, *odd]


def prove(job: Job, machine: Machine, lanes: int, seed: int | None, steps: int) -> Iterator[Row]:
    """Train each case and yield what it gave, one by one."""
    with forkserver.kept():
        for case in cases(machine, lanes):
            ended: list[Returned] = []

            def end(outcome: Returned, ended: list[Returned] = ended) -> None:
                ended.append(outcome)
                raise _Ended

            over = Overrides(case.devices, case.lanes, seed, case.plan, steps, end)
            with overridden(over), suppress(_Ended):
                job()
            if not ended:
                raise UsageError("prove: the script did not call samestep.launch")
            if not ended[0].fingerprints:
                raise UsageError(
                    "prove: the training made no trainer, so there is nothing to compare"
                )
            yield Row(case, ended[0].fingerprints)


def holds(rows: list[Row]) -> bool:
    """All trainings gave the same, and the control something else."""
    control, *others = rows
    return len({row.fingerprints for row in others}) == 1 and (
        control.fingerprints != others[0].fingerprints
    )


def model_job(model: str, steps: int) -> Job:
    """A recipe's training on drawn shapes."""
    recipe = models.Recipe(model=model, data="shapes", batch_size=64, lr=0.05, epochs=steps)
    return partial(launch, models.train, args=(recipe,))


def script_job(path: Path, arguments: list[str]) -> Job:
    """A script's first launch; what the script does after that is left out."""

    return partial(run_script, path, arguments)


def run_script(path: Path, arguments: list[str]) -> None:
    """Run a script as `python script.py arguments` would."""
    with _as_program(path, arguments):
        runpy.run_path(str(path), run_name="__main__")


@contextmanager
def _as_program(path: Path, arguments: list[str]) -> Iterator[None]:
    argv, first = sys.argv, sys.path[0]
    sys.argv, sys.path[0] = [str(path), *arguments], str(path.resolve().parent)
    try:
        yield
    finally:
        sys.argv, sys.path[0] = argv, first
