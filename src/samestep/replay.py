"""Looking at one step of a run again: on one device, in this process, with the same bits.

The run's own program is started anew with its newest checkpoint before the step, and trains from
there to the step, of which every lane's loss and gradients are shown. Nothing is written.
"""

from __future__ import annotations

import hashlib
import json
import mmap
import os
import pdb
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from samestep import checkpoint
from samestep.barrier import Barrier, Verdict
from samestep.board import Board, Roster
from samestep.devices import Device, set_numerics
from samestep.errors import UsageError
from samestep.exchange import Exchange, Shape
from samestep.exchange.shared_memory import SharedMemory
from samestep.launch import Overrides, overridden
from samestep.payload import as_bytes
from samestep.processes import memory_file
from samestep.settings import Resumed, Settings, StopAt
from samestep.state import Snapshot, watch_schedulers
from samestep.team import Team
from samestep.worker import run_main

__all__ = ["LaneReport", "replay"]


@dataclass(frozen=True, slots=True)
class LaneReport:
    """One lane of the step: its loss and weight, the norm of each parameter's gradient, and the
    SHA-256 of all gradients."""

    lane: int
    loss: float
    weight: float
    norms: tuple[tuple[str, float], ...]
    digest: str


@dataclass
class Inspector:
    """What a trainer shows its lanes to."""

    step: int
    lane: int | None
    debug: bool
    reports: list[LaneReport] = field(default_factory=list)

    def wants(self, step: int, lane: int) -> bool:
        return step == self.step and self.lane in (None, lane)

    def run(self, loss: Callable[..., Any], *arguments: Any) -> Any:
        """Call the loss function; under the debugger, stop at its first line."""
        return pdb.runcall(loss, *arguments) if self.debug else loss(*arguments)

    def see(self, lane: int, loss: torch.Tensor, weight: torch.Tensor, model: nn.Module) -> None:
        norms, digest = [], hashlib.sha256()
        for name, parameter in model.named_parameters():
            if parameter.grad is not None:
                norms.append((name, parameter.grad.norm().item()))
                digest.update(as_bytes(parameter.grad.cpu()))
        report = LaneReport(lane, loss.item(), float(weight), tuple(norms), digest.hexdigest())
        self.reports.append(report)

    def after_backward(self, step: int) -> None:
        if step == self.step:
            raise StopAt


class _Alone:
    """The link of the only worker, in the process of who looks."""

    def __init__(self, device: Device) -> None:
        self._device = device

    def exchange(
        self, barrier: Barrier, shape: Shape, lanes: int, kind: int, name: str, about: str
    ) -> Exchange:
        fd = memory_file(SharedMemory.bytes_needed(shape, lanes))

        def differ(verdict: Verdict) -> None:
            raise AssertionError("there is nobody to differ from")

        try:
            device = self._device.torch_device
            return SharedMemory(barrier, shape, lanes, fd, kind, device, differ)
        finally:
            os.close(fd)

    def memory(self, name: str, size: int, about: str) -> mmap.mmap:
        return mmap.mmap(-1, size)

    def show(self, text: str) -> None:
        print(text, flush=True)

    def record(self, values: dict[str, Any], text: str, step: int) -> None:
        print(text, flush=True)

    def catch_up(self) -> Snapshot:
        raise NotImplementedError

    def give(self, rows: tuple[int, ...], snapshot: Snapshot) -> None:
        raise NotImplementedError

    def save(self, snapshot: Snapshot, due: bool) -> None:
        raise NotImplementedError

    def tell(self, text: str) -> None:
        pass

    def no_room(self, size: int, lanes: int) -> None:
        raise NotImplementedError

    def wait_end(self) -> None:
        raise NotImplementedError


class _Over(BaseException):
    """Leaves the program once the step has been seen. Not an error that it could catch."""


def replay(
    run: Path,
    step: int,
    lane: int | None,
    debug: bool,
    program: Callable[[Sequence[str], Path], None],
    warn: Callable[[str], None],
) -> list[LaneReport]:
    """The lanes of a step of the run in folder `run`; `program(argv, folder)` starts it anew."""
    record = _record(run)
    found = checkpoint.newest(run / "checkpoints", warn, at_most=step)
    inspector = Inspector(step, lane, debug)
    ended = []

    def here(main: Any, args: Any, kwargs: Any, settings: Settings) -> None:
        resumed = None
        if found is not None:
            snapshot, manifest, path = found
            snapshot.generation = snapshot.operation = 0
            resumed = Resumed(
                snapshot, str(path), False, manifest["log_lines"], manifest["numerics"]
            )
            warn(f"from step {snapshot.step} ({path}) to step {step}")
        else:
            warn(f"there is no checkpoint before step {step}: from the beginning")
        _run_here(main, args, kwargs, replace(settings, resumed=resumed, saves=None), inspector)
        ended.append(True)
        raise _Over

    over = Overrides(
        devices="cuda:0" if record["devices"][0].startswith("cuda") else "cpu",
        lanes=record["lanes"],
        seed=record["seed"],
        within=here,
    )
    with overridden(over), suppress(_Over):
        program(record["argv"], Path(record["folder"]))
    if not ended:
        raise UsageError(f"{run}: its program {record['argv'][0]} did not call samestep.launch")
    if not inspector.reports:
        reached = "" if lane is None else f" or it has no lane {lane}"
        raise UsageError(f"--step {step}: the training ends before this step{reached}")
    return inspector.reports


def _record(run: Path) -> dict[str, Any]:
    try:
        record: dict[str, Any] = json.loads((run / "run.json").read_text())
    except (OSError, ValueError) as error:
        raise UsageError(f"{run}: is not the folder of a run ({error})") from None
    return record


def _run_here(main: Any, args: Any, kwargs: Any, settings: Settings, inspector: Inspector) -> None:
    """Be the only worker of the run, in this process."""
    device = settings.devices[0]
    set_numerics(device, settings.threads, settings.exact)
    watch_schedulers()
    board = Board(1)
    board.publish(Roster.first(1))
    team = Team(settings, board, _Alone(device))
    team.inspector = inspector
    run_main(team, settings, main, args, kwargs)
