"""Joining workers that torchrun has started: the same training over `torch.distributed`."""

from __future__ import annotations

import mmap
import os
import sys
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import torch.distributed as dist

from samestep.barrier import Barrier
from samestep.board import Board, Roster
from samestep.devices import (
    Device,
    compare,
    inventory,
    numerics_class,
    parse,
    pinning,
    set_numerics,
)
from samestep.errors import OutOfMemory, UsageError
from samestep.exchange import Exchange, Shape
from samestep.exchange.collectives import Collectives
from samestep.settings import Plan, Settings
from samestep.state import Snapshot
from samestep.supervise import odd_one_out, unlike
from samestep.team import Team
from samestep.worker import place, run_main


def is_joined() -> bool:
    """Whether torchrun's environment variables are set."""
    return all(name in os.environ for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR"))


def join(
    main: Callable[..., Any],
    devices: Any,
    lanes: int,
    seed: int,
    exact: bool,
    threads: int,
    plan: Plan | None,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
) -> Any:
    """Be the worker that torchrun's variables say; returns what the first one returned."""
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    local, here = int(os.environ["LOCAL_RANK"]), int(os.environ.get("LOCAL_WORLD_SIZE", size))
    machine = inventory()
    mine = choose(devices, local, here, machine.gpus)
    pins = pinning([Device(mine.kind, i) for i in range(here)], machine, threads)[local]
    if pins and hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, pins)
    with suppress(RuntimeError):  # the script has computed something already
        set_numerics(mine, threads, exact)
    # Imported after the process group is made, it leaves a thread behind that aborts the process
    # at its exit (torch 2.13; seen in 3 of 6 runs of a script without samestep). Making an
    # optimizer imports it.
    import torch._dynamo  # noqa: F401

    made = not dist.is_initialized()
    if made:
        dist.init_process_group("nccl" if mine.kind == "cuda" else "gloo")
    try:
        team_devices: list[Device] = _gather(mine)
        names = [f"{device} (rank {i})" for i, device in enumerate(team_devices)]
        error = compare(names, _gather(numerics_class(mine)))
        if exact and error is not None:
            raise error
        settings = Settings(tuple(team_devices), lanes, seed, exact, threads, plan)
        board = Board(size, rank)
        board.publish(Roster.first(size))
        team = Team(settings, board, _Link(mine, rank), rank)
        try:
            result = run_main(team, settings, main, args, kwargs)
        except Exception as error:
            error.add_note(f"worker {rank} ({mine}), {place(board, rank)}")
            raise
        ends = _gather(tuple(team.fingerprints()))
        if exact and (differs := odd_one_out(ends, names)) is not None:
            raise differs
        results = [result if rank == 0 else None]
        dist.broadcast_object_list(results)
        return results[0]
    finally:
        if made and sys.exc_info()[0] is None:
            dist.destroy_process_group()


def choose(devices: Any, local: int, here: int, gpus: int) -> Device:
    """The device of local rank `local` of `here`. torchrun says how many; `devices` says which."""
    if devices == "all" or isinstance(devices, int):
        kind = "cuda" if gpus else "cpu"
        found: tuple[Device, ...] = tuple(Device(kind, i) for i in range(here))
    else:
        found, _ = parse(devices, inventory(), lanes=here)
        if len(found) != here and len({(d.kind, d.speed) for d in found}) == 1:
            found = tuple(Device(found[0].kind, i, found[0].speed) for i in range(here))
    if len(found) != here:
        raise UsageError(
            f"devices={devices!r}: names {len(found)} devices, but torchrun started {here} workers "
            "on this machine; give --nproc-per-node the same number"
        )
    if found[local].kind == "cuda" and found[local].number >= gpus:
        raise UsageError(
            f"torchrun started {here} workers for {gpus} GPUs; lower --nproc-per-node, or say "
            "devices='cpu'"
        )
    return found[local]


def _gather(value: Any) -> list[Any]:
    values: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(values, value)
    return values


class _Link:
    """What a team needs, over the process group."""

    def __init__(self, device: Device, rank: int) -> None:
        self._device, self._rank = device, rank

    def exchange(
        self, barrier: Barrier, shape: Shape, lanes: int, kind: int, name: str, about: str
    ) -> Exchange:
        for other, theirs in enumerate(_gather(about)):
            if theirs != about:
                raise unlike(self._rank, other, about, theirs)
        return Collectives(shape, self._device.torch_device)

    def memory(self, name: str, size: int, about: str) -> mmap.mmap:
        raise UsageError(
            "store: what workers share is the memory of one machine; under torchrun use "
            "store='replicated', or start the script without torchrun"
        )

    def show(self, text: str) -> None:
        print(text, flush=True)

    def record(self, values: dict[str, Any], text: str, step: int) -> None:
        """A run's folder belongs to a launcher; under torchrun there is none."""
        if self._rank == 0:
            print(text, flush=True)

    def catch_up(self) -> Snapshot:
        raise NotImplementedError  # nobody joins workers that torchrun started

    def give(self, rows: tuple[int, ...], snapshot: Snapshot) -> None:
        raise NotImplementedError

    def save(self, snapshot: Snapshot, due: bool) -> None:
        raise NotImplementedError

    def tell(self, text: str) -> None:
        print(f"samestep: {text}", file=sys.stderr, flush=True)

    def no_room(self, size: int, lanes: int) -> None:
        raise OutOfMemory(
            f"rank {self._rank} ({self._device}) has no memory for a lane of {size} samples; "
            f"lanes={2 * lanes} would make smaller ones"
        )

    def wait_end(self) -> None:
        raise NotImplementedError
