"""What a worker's memory is for: predicted before a training, measured after it.

weights      parameters and buffers
gradients    those of the lane that runs, and the root's; large ones take turns in the same memory
tree         what lanes are folded in, this worker's nodes, and its part of the sum
optimizer    its state, and what a store needs to change it safely
lane         what is saved for the backward pass of one lane; measured: its peak
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import nn

from samestep.exchange import Flat, Shape
from samestep.layout import Layout
from samestep.results import held_gradients
from samestep.stores import CHUNK, chunks_of, owners, schema
from samestep.tree import Tree

__all__ = ["PARTS", "count_saved", "peak", "predict", "shared_fairly"]

PARTS = ("weights", "gradients", "tree", "optimizer", "lane")


def bytes_of(tensors: Any) -> int:
    """The bytes of distinct tensors."""
    return sum({id(t): t.numel() * t.element_size() for t in tensors}.values())


def predict(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    layout: Layout,
    store: str,
    runs: tuple[range, ...],
    place: int,
    lanes: int,
    saved: int,
) -> dict[str, int]:
    """The bytes of one worker, by part."""
    result = layout.shape.f32 * 4 + layout.shape.f64 * 8
    gradients = bytes_of(p for p in model.parameters() if p.requires_grad)
    scratch, slots = count_buffers(runs[place], lanes)
    return {
        "weights": bytes_of([*model.parameters(), *model.buffers()]),
        "gradients": held_gradients(gradients, result, store),
        "tree": result * (scratch + slots) + (result // len(runs) if len(runs) > 1 else 0),
        "optimizer": _optimizer(optimizer, store, len(runs), place),
        "lane": saved,
    }


def count_buffers(run: range, lanes: int) -> tuple[int, int]:
    """How many buffers of its own, and how many slots, a worker folds a run of lanes in."""
    empty = Flat.empty(Shape(0, 0), torch.device("cpu"))
    scratch: set[int] = set()
    slots: set[int] = set()

    def noted(where: set[int]) -> Callable[[int], Flat]:
        return lambda number: where.add(number) or empty  # type: ignore[func-returns-value]

    tree = Tree(run, lanes, noted(slots), noted(scratch))
    for lane in run:
        tree.leaf(lane)
        tree.fold(lane)
    return max(scratch, default=-1) + 1, len(slots)


def _optimizer(optimizer: torch.optim.Optimizer, store: str, workers: int, place: int) -> int:
    owned: list[tuple[dict[str, Any], torch.Tensor]] = [
        (group, p) for group in optimizer.param_groups for p in group["params"]
    ]
    arrays = [
        sum(e.dtype.itemsize for e in schema(optimizer, group, p) if e.is_array and e.dtype)
        for group, p in owned
    ]
    if store == "replicated":
        return sum(size * p.numel() for size, (_, p) in zip(arrays, owned, strict=True))
    chunks = chunks_of([p.numel() for _, p in owned])
    mine = owners(chunks, workers)[place]
    return CHUNK * max(arrays, default=0) + sum(
        chunk.size * (arrays[chunk.parameter] + owned[chunk.parameter][1].element_size())
        for chunk in chunks[mine.start : mine.stop]
    )


def count_saved(run: Callable[[], Any], model: nn.Module) -> int:
    """The bytes that are saved for the backward pass while `run` is called."""
    known = {t.untyped_storage().data_ptr() for t in [*model.parameters(), *model.buffers()]}
    found: dict[int, int] = {}

    def see(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in known:
            found[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(see, lambda tensor: tensor):
        kept = run()
    del kept
    return sum(found.values())


@contextmanager
def peak(device: torch.device) -> Iterator[list[int]]:
    """Measures by how much memory has grown inside, at its highest: one number, at the end."""
    grown: list[int] = []
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
        before = torch.cuda.memory_allocated(device)
        yield grown
        grown.append(torch.cuda.max_memory_allocated(device) - before)
        return
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)  # what malloc keeps would hide what is needed
    Path("/proc/self/clear_refs").write_text("5")  # the highest is what it is now
    before = _resident("VmRSS")
    yield grown
    grown.append(max(0, _resident("VmHWM") - before))


def _resident(name: str) -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(name + ":"):
            return int(line.split()[1]) * 1024
    return 0


def shared_fairly() -> int:
    """This process's memory, with what it shares divided between those that share it."""
    try:
        text = Path("/proc/self/smaps_rollup").read_text()
    except OSError:
        return 0
    return next(
        int(line.split()[1]) * 1024 for line in text.splitlines() if line.startswith("Pss:")
    )
