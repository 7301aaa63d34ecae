"""The exchange over `torch.distributed`: several machines, and workers started by torchrun.

`all_to_all_single` hands worker j slice j of every node, worker j adds, `all_gather` hands out the
sums. The library moves bits and adds nothing. With backend "nccl" the same code runs on device
tensors; that has not been run on hardware with several GPUs yet.
"""

from __future__ import annotations

import torch
import torch.distributed as dist

from samestep.exchange import Exchange, Flat, Shape, Work, add_tree, slices
from samestep.lanes import Reduction


class Collectives(Exchange):
    """Uses the default process group, which must exist."""

    def __init__(self, shape: Shape, device: torch.device) -> None:
        self._rank, self._size = dist.get_rank(), dist.get_world_size()
        self._shape, self._device = shape, device
        self._slots: dict[int, Flat] = {}
        # Rounded up so that all slices are equally long, as all_gather wants them.
        self._slices = [slices(n, self._size) for n in shape]
        lengths = [cuts[0].stop for cuts in self._slices]
        self._gathered = Flat.empty(Shape(*(n * self._size for n in lengths)), device)
        self._total = Flat(
            self._gathered.f32[: shape.f32],
            self._gathered.f64[: shape.f64],
        )

    def slot(self, lane: int) -> Flat:
        if lane not in self._slots:
            self._slots[lane] = Flat.empty(self._shape, self._device)
        return self._slots[lane]

    def reduce(self, work: Work) -> Flat:
        reduction = work.reduction(work.runs)
        if self._size == 1:
            return self.slot(reduction.root)
        for part, count in enumerate(self._shape):
            if count:
                self._reduce_part(part, reduction)
        return self._total

    def _reduce_part(self, part: int, reduction: Reduction) -> None:
        cuts, mine = self._slices[part], reduction.owners[self._rank]
        lengths = [cut.stop - cut.start for cut in cuts]
        nodes = [self._slots[slot][part] for slot in mine]
        dtype = self._total[part].dtype
        sent = torch.cat([node[cut] for cut in cuts for node in nodes] or [self._empty(dtype)])
        held = [len(owned) for owned in reduction.owners]
        received = torch.empty(sum(held) * lengths[self._rank], dtype=dtype, device=self._device)
        dist.all_to_all_single(
            received,
            sent,
            output_split_sizes=[count * lengths[self._rank] for count in held],
            input_split_sizes=[len(mine) * length for length in lengths],
        )
        whole, length = self._gathered[part], cuts[0].stop
        out = torch.zeros(length, dtype=dtype, device=self._device)
        if lengths[self._rank]:
            pieces = received.view(len(reduction.slots), lengths[self._rank]).unbind()
            add_tree(
                dict(zip(reduction.slots, pieces, strict=True)),
                reduction,
                out[: lengths[self._rank]],
            )
        dist.all_gather(list(whole.view(self._size, length).unbind()), out)

    def _empty(self, dtype: torch.dtype) -> torch.Tensor:
        return torch.empty(0, dtype=dtype, device=self._device)
