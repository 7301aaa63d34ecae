"""The exchange between workers of one machine, through one mapping that all of them share.

    ┌ slot 0 ┬ slot 1 ┬ … ┬ slot L-1 ┬ total ┐      slot: the node whose first lane is that number
    └────────┴────────┴───┴──────────┴───────┘

Nodes are built in their slots, so writing them costs nothing on the CPU. Slots that hold no node
are never touched and take no memory.

Invariant: slot s of a step is read before anyone passes `all_summed`, and written again only
after; the total is written only between `all_written` and `all_summed` of the next exchange,
which every reader of the last one has had to reach first. So one set of buffers is enough.

Nodes are not written to while they are added, so when a worker is lost the others can begin again:
what it had written whole is still there, and the rest of its lanes they run themselves.
"""

from __future__ import annotations

import mmap
from collections.abc import Callable
from typing import Any

import torch

from samestep.barrier import Barrier, Verdict
from samestep.exchange import Exchange, Flat, Shape, Work, add_tree, slices
from samestep.lanes import Reduction, reshare

_PAGE = 4096
_PLANS = 64  # reductions for which the views of slices are kept


def _stride(shape: Shape) -> tuple[int, int]:
    """Bytes of the float32 part of a slot, and of the whole slot."""
    f32 = -(-shape.f32 * 4 // 64) * 64
    return f32, -(-(f32 + shape.f64 * 8) // 64) * 64


class SharedMemory(Exchange):
    """`fd` is a mapping of `bytes_needed(shape, lanes)` that all workers of the team hold."""

    @staticmethod
    def bytes_needed(shape: Shape, lanes: int) -> int:
        return max(_PAGE, _stride(shape)[1] * (lanes + 1))

    def __init__(
        self,
        barrier: Barrier,
        shape: Shape,
        lanes: int,
        fd: int,
        kind: int,
        device: torch.device,
        on_difference: Callable[[Verdict], None],
    ) -> None:
        self._barrier, self._shape, self._kind, self._device = barrier, shape, kind, device
        self._on_difference = on_difference
        self._memory = mmap.mmap(fd, self.bytes_needed(shape, lanes))
        self._host: dict[int, Flat] = {}
        self._on_device: dict[int, Flat] = {}
        self._total = self._view(lanes)
        self._sliced: dict[Any, list[tuple[dict[int, torch.Tensor], torch.Tensor]]] = {}
        self._device_total = Flat.empty(shape, device) if device.type == "cuda" else None

    def slot(self, lane: int) -> Flat:
        if self._device.type == "cpu":
            return self._view(lane)
        if lane not in self._on_device:
            self._on_device[lane] = Flat.empty(self._shape, self._device)
        return self._on_device[lane]

    def reduce(self, work: Work) -> Flat:
        barrier, reduction = self._barrier, work.reduction(work.runs)
        if work.is_done:
            self._write(reduction.owners[barrier.place])
        barrier.begin(self._kind, work.is_done, work.digest)
        if len(barrier.roster) == 1 and work.is_done and not reduction.additions:
            barrier.end()
            return self.slot(reduction.root)
        if not work.is_done:
            barrier.wait_changed()
            over = self._again(work)
        else:
            over = self._attempt(reduction)
        while not over:
            over = self._again(work)
        barrier.end()
        return self._total if self._device_total is None else self._read(self._device_total)

    def _attempt(self, reduction: Reduction) -> bool:
        """Add all nodes. False: the team has changed before that was over."""
        barrier = self._barrier
        if not barrier.all_written():
            return False
        if (verdict := barrier.verdict()) is not None:
            self._on_difference(verdict)
            barrier.wait_changed()
            return False
        self._add(reduction)
        return barrier.all_summed()

    def _again(self, work: Work) -> bool:
        """The team has changed: run the lanes that nobody has, and try again with who is left."""
        barrier = self._barrier
        if barrier.agree():
            return True
        runs, mine = reshare(work.runs, barrier.missing(), barrier.helpers(work.size))
        for run in mine.get(barrier.started_place, ()):
            work.do(run)
            self._write(work.reduction((run,)).slots)
        return self._attempt(work.reduction(runs))

    def _add(self, reduction: Reduction) -> None:
        """Add this worker's slice of every node."""
        key = reduction, len(self._barrier.roster), self._barrier.place
        if key not in self._sliced:
            if len(self._sliced) >= _PLANS:
                self._sliced.clear()
            nodes = {slot: self._view(slot) for slot in reduction.slots}
            mine = [slices(n, len(self._barrier.roster))[self._barrier.place] for n in self._shape]
            self._sliced[key] = [
                (
                    {slot: flat[part][where] for slot, flat in nodes.items()},
                    self._total[part][where],
                )
                for part, where in enumerate(mine)
                if where.start < where.stop
            ]
        for pieces, out in self._sliced[key]:
            add_tree(pieces, reduction, out)

    def _view(self, lane: int) -> Flat:
        """The slot of `lane` in the shared mapping."""
        if lane not in self._host:
            f32, whole = _stride(self._shape)
            start = lane * whole
            self._host[lane] = Flat(
                _tensor(self._memory, torch.float32, self._shape.f32, start),
                _tensor(self._memory, torch.float64, self._shape.f64, start + f32),
            )
            if self._device.type == "cuda":
                _pin(self._host[lane])
        return self._host[lane]

    def _write(self, mine: tuple[int, ...]) -> None:
        """On a GPU: copy nodes to the host."""
        if self._device.type != "cuda":
            return
        for slot in mine:
            for target, source in zip(self._view(slot), self._on_device[slot], strict=True):
                target.copy_(source, non_blocking=True)
        torch.cuda.current_stream().synchronize()

    def _read(self, into: Flat) -> Flat:
        for target, source in zip(into, self._total, strict=True):
            target.copy_(source, non_blocking=True)
        # The total must be read before this worker can reach the next exchange.
        torch.cuda.current_stream().synchronize()
        return into


def _tensor(memory: mmap.mmap, dtype: torch.dtype, count: int, offset: int) -> torch.Tensor:
    if count == 0:
        return torch.empty(0, dtype=dtype)
    return torch.frombuffer(memory, dtype=dtype, count=count, offset=offset)


def _pin(flat: Flat) -> None:
    """Page-lock a slot, so that copies to and from the GPU run at full speed."""
    for tensor in flat:
        if tensor.numel():
            size = tensor.numel() * tensor.element_size()
            cudart = torch.cuda.cudart()  # type: ignore[no-untyped-call]
            cudart.cudaHostRegister(tensor.data_ptr(), size, 0)
