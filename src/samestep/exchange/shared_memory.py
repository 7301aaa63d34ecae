"""The exchange between workers of one machine, through one mapping that all of them share.

    ┌ slot 0 ┬ slot 1 ┬ … ┬ slot L-1 ┬ total ┐      slot: the node whose first lane is that number
    └────────┴────────┴───┴──────────┴───────┘

Nodes are built in their slots, so writing them costs nothing on the CPU. Slots that hold no node
are never touched and take no memory.

Invariant: slot s of a step is read before anyone passes `wait_summed`, and written again only
after; the total is written only between `wait_written` and `wait_summed` of the next exchange,
which every reader of the last one has had to reach first. So one set of buffers is enough.
"""

from __future__ import annotations

import mmap

import torch

from samestep.board import Board
from samestep.exchange import Exchange, Flat, Shape, add_tree, slices
from samestep.lanes import Reduction

_PAGE = 4096


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
        self, board: Board, shape: Shape, lanes: int, fd: int, kind: int, device: torch.device
    ) -> None:
        self._board, self._shape, self._kind, self._device = board, shape, kind, device
        self._memory = mmap.mmap(fd, self.bytes_needed(shape, lanes))
        self._host: dict[int, Flat] = {}
        self._on_device: dict[int, Flat] = {}
        self._total = self._view(lanes)
        self._sliced: dict[Reduction, list[tuple[dict[int, torch.Tensor], torch.Tensor]]] = {}
        self._slices = [slices(n, board.size)[board.me] for n in shape]
        self._device_total = Flat.empty(shape, device) if device.type == "cuda" else None

    def slot(self, lane: int) -> Flat:
        if self._device.type == "cpu":
            return self._view(lane)
        if lane not in self._on_device:
            self._on_device[lane] = Flat.empty(self._shape, self._device)
        return self._on_device[lane]

    def reduce(self, reduction: Reduction) -> Flat:
        board, mine = self._board, reduction.owners[self._board.me]
        if board.size == 1:
            return self.slot(reduction.root)
        if self._device.type == "cuda":
            self._write(mine)
        board.wait_written(self._kind)
        self._add(reduction)
        board.wait_summed(self._kind)
        return self._total if self._device_total is None else self._read(self._device_total)

    def _add(self, reduction: Reduction) -> None:
        """Add this worker's slice of every node."""
        if reduction not in self._sliced:
            nodes = {slot: self._view(slot) for slot in reduction.slots}
            self._sliced[reduction] = [
                (
                    {slot: flat[part][where] for slot, flat in nodes.items()},
                    self._total[part][where],
                )
                for part, where in enumerate(self._slices)
                if where.start < where.stop
            ]
        for pieces, out in self._sliced[reduction]:
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
