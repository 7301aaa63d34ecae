"""Stores: where the optimizer's state lives, and who updates what. The bits are the same.

    replicated   every worker has all of it, and updates everything
    sharded      in memory that the workers share, once; each worker updates its chunks
    host         the same for GPUs: in the host's memory, and updated there

A chunk is a fixed part of one parameter. An optimizer that works element by element does not see
where a parameter was cut, as long as cuts stand at whole vectors of the processor.

    state    ┌ exp_avg of parameter 0 ┬ exp_avg_sq of parameter 0 ┬ … ┐   changed in place
    weights  ┌ parameter 0 ┬ parameter 1 ┬ … ┐                            new values, for everyone
    undo     ┌ seat 0 ┬ seat 1 ┬ … ┐          what a chunk's state was before the update of it began
    stamps   ┌ chunk 0 ┬ chunk 1 ┬ … ┐        which update has it done, or has begun

If a worker is lost in the middle of a chunk, another one puts the chunk's state back and does it
again: nothing is torn, and nothing is lost.
"""

from __future__ import annotations

import mmap
from collections import OrderedDict, defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import nn

from samestep.barrier import Barrier
from samestep.board import fence
from samestep.errors import OptimizerError, UsageError
from samestep.lanes import share
from samestep.results import Gradients

__all__ = [
    "CHUNK",
    "STORES",
    "Replicated",
    "Sharded",
    "Store",
    "check",
    "chunks_of",
    "owners",
    "schema",
]

CHUNK = 1 << 16  # elements
STORES = ("replicated", "sharded", "host")

_OPTIMIZERS = (
    "SGD", "Adam", "AdamW", "NAdam", "RAdam", "Adamax", "Adagrad", "Adadelta", "RMSprop", "Rprop",
    "ASGD",
)  # fmt: skip
_ALIGN = 64
_HALF = 1 << 11  # seats in a stamp

Memory = Callable[[int, str], mmap.mmap]


class Store(Protocol):
    """Applies a step, and knows the optimizer's state."""

    def step(self, gradients: Gradients) -> None: ...
    def state_dict(self, is_shared: bool = False) -> dict[str, Any]: ...
    def load_state_dict(self, state: dict[str, Any]) -> None: ...
    def bytes(self) -> int:
        """What this worker holds of the state, and needs to change it."""


class Replicated:
    """The optimizer as it is."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self._optimizer = optimizer

    def step(self, gradients: Gradients) -> None:
        gradients.give()
        self._optimizer.step()

    def state_dict(self, is_shared: bool = False) -> dict[str, Any]:
        return self._optimizer.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._optimizer.load_state_dict(state)

    def bytes(self) -> int:
        state = self._optimizer.state.values()
        tensors = [v for entries in state for v in entries.values() if torch.is_tensor(v)]
        return sum(v.numel() * v.element_size() for v in tensors if v.numel() > 1)


def check(
    store: str, device: torch.device, model: nn.Module, optimizer: torch.optim.Optimizer
) -> None:
    """Refuse an optimizer that looks at more than one element at a time, by name."""
    if store == "replicated":
        return
    if store == "sharded" and device.type != "cpu":
        raise UsageError(
            "store='sharded': its state is in the host's memory, which is that of CPU workers; "
            "for GPUs say store='host', or store='replicated'"
        )
    kind = type(optimizer)
    known = [getattr(torch.optim, name) for name in _OPTIMIZERS if hasattr(torch.optim, name)]
    if kind not in known:
        why = {
            "Adafactor": "it keeps rows and columns of whole matrices",
            "Muon": "it orthogonalises whole matrices",
        }.get(kind.__name__, "it is not known to work element by element")
        raise OptimizerError(
            f"store={store!r}: {kind.__name__} cannot be cut into chunks: {why}; use "
            f"store='replicated', or one of torch.optim's {', '.join(_OPTIMIZERS)}"
        )
    for name, parameter in model.named_parameters():
        if parameter.is_complex():
            raise OptimizerError(
                f"store={store!r}: parameter {name!r} is complex; use store='replicated'"
            )


@dataclass(frozen=True, slots=True)
class Chunk:
    """Elements [start, stop) of a parameter, by its number in the optimizer."""

    number: int
    parameter: int
    start: int
    stop: int

    @property
    def size(self) -> int:
        return self.stop - self.start


def chunks_of(sizes: Sequence[int]) -> list[Chunk]:
    """All chunks of parameters of these sizes, in order."""
    found: list[Chunk] = []
    for parameter, size in enumerate(sizes):
        for start in range(0, size, CHUNK):
            found.append(Chunk(len(found), parameter, start, min(size, start + CHUNK)))
    return found


def owners(chunks: Sequence[Chunk], workers: int) -> tuple[range, ...]:
    """Which chunks each worker updates: contiguous, and nobody has more than one chunk above the
    mean, however large any one parameter is."""
    whole = sum(chunk.size for chunk in chunks)
    runs, start, end, below = [], 0, 0, 0
    for worker in range(workers):
        while end < len(chunks) and below + chunks[end].size // 2 < whole * (worker + 1) / workers:
            below += chunks[end].size
            end += 1
        if worker == workers - 1:
            end = len(chunks)
        runs.append(range(start, end))
        start = end
    return tuple(runs)


@dataclass(frozen=True)
class _Entry:
    """One thing an optimizer keeps for a parameter: an array with a value for each element, or a
    number, which is in a tensor if it has a dtype."""

    name: str
    dtype: torch.dtype | None
    is_array: bool


class Sharded:
    """State in memory that all workers of the team share."""

    def __init__(
        self, optimizer: torch.optim.Optimizer, barrier: Barrier, kind: int, seat: int, seats: int,
        memory: Memory,
    ) -> None:  # fmt: skip
        self._optimizer, self._barrier, self._kind, self._seat = optimizer, barrier, kind, seat
        # Numbers and not the groups themselves: loading a state puts others in their place.
        self._groups = [i for i, g in enumerate(optimizer.param_groups) for _ in g["params"]]
        self._parameters: list[nn.Parameter] = [
            p for g in optimizer.param_groups for p in g["params"]
        ]
        self._chunks = chunks_of([p.numel() for p in self._parameters])
        self._schemas = [
            schema(optimizer, optimizer.param_groups[group], parameter)
            for group, parameter in zip(self._groups, self._parameters, strict=True)
        ]
        # What the optimizer has already (after a resume, or made when it was made): a chunk takes
        # its part of it when it is first updated.
        self._before: dict[int, dict[str, Any]] = optimizer.state_dict()["state"]
        optimizer.state.clear()
        self._reserve(seats, memory)

    def _reserve(self, seats: int, memory: Memory) -> None:
        end = 0

        def place(count: int, dtype: torch.dtype) -> tuple[torch.dtype, int, int]:
            nonlocal end
            start, end = end, end + -(-count * dtype.itemsize // _ALIGN) * _ALIGN
            return dtype, start, count

        numbers = max((_count_numbers(schema) for schema in self._schemas), default=0)
        stamps = place(len(self._chunks), torch.int64)
        kept = place(len(self._chunks) * numbers, torch.float64)
        weights = [place(p.numel(), p.dtype) for p in self._parameters]
        arrays = [
            {e.name: place(p.numel(), e.dtype) for e in schema if e.is_array and e.dtype}
            for p, schema in zip(self._parameters, self._schemas, strict=True)
        ]
        largest = max(
            (sum(CHUNK * dtype.itemsize for dtype, _, _ in mine.values()) for mine in arrays),
            default=0,
        )
        undo = [place(largest + 8 * numbers, torch.uint8) for _ in range(seats)]
        shared = memory(max(end, mmap.PAGESIZE), f"{len(self._chunks)}/{end}")

        def view(where: tuple[torch.dtype, int, int]) -> torch.Tensor:
            dtype, start, count = where
            if not count:
                return torch.empty(0, dtype=dtype)
            return torch.frombuffer(shared, dtype=dtype, count=count, offset=start)

        self._stamps = memoryview(shared).cast("B")[: 8 * len(self._chunks)].cast("q")
        assert stamps[1] == 0
        self._numbers = view(kept).view(len(self._chunks), numbers)
        self._weights = [view(where) for where in weights]
        self._arrays = [{name: view(w) for name, w in mine.items()} for mine in arrays]
        self._undo = [view(where) for where in undo]

    # A step

    def step(self, gradients: Gradients) -> None:
        """Update this worker's chunks, wait for the others', and take over all new values."""
        barrier = self._barrier
        update = barrier.operation + 1
        present = [gradients.is_present(parameter) for parameter in self._parameters]
        runs = owners(self._chunks, len(barrier.roster))

        def do(run: range) -> None:
            for number in run:
                if present[self._chunks[number].parameter]:
                    self._do(self._chunks[number], update, gradients)

        do(runs[barrier.place])
        barrier.begin(self._kind)
        over = barrier.all_written() and barrier.all_summed()
        while not over:
            if barrier.agree():
                break
            helpers = barrier.helpers(0)
            lost = [number for place in sorted(barrier.missing()) for number in runs[place]]
            shares = share(len(lost), [1.0] * len(helpers))
            if barrier.started_place in helpers:
                mine = shares[helpers.index(barrier.started_place)]
                for number in lost[mine.start : mine.stop]:
                    do(range(number, number + 1))
            over = barrier.all_written() and barrier.all_summed()
        barrier.end()
        with torch.no_grad():
            for parameter, weights, here in zip(
                self._parameters, self._weights, present, strict=True
            ):
                parameter.grad = None
                if here:
                    parameter.copy_(weights.view(parameter.shape))
        self._before = {
            number: mine
            for number, mine in self._before.items()
            if not present[number]  # its chunks have taken it over
        }
        # What a scheduler looks at, to warn who calls it too early.
        self._optimizer._opt_called = True  # type: ignore[attr-defined]

    def _do(self, chunk: Chunk, update: int, gradients: Gradients) -> None:
        """Update one chunk, so that whoever finds it half done can do it again."""
        stamp = self._stamps[chunk.number]
        began, seat, is_first, is_done = _read_stamp(stamp)
        if began == update and is_done:
            return
        if began == update and not is_first:
            self._put_back(chunk, seat)  # the one who began it was lost
        exists = stamp != 0 and not (began == update and is_first)
        if exists:
            self._set_aside(chunk)
        fence()
        self._stamps[chunk.number] = _stamp(update, self._seat, not exists, False)
        fence()
        weights = self._weights[chunk.parameter][chunk.start : chunk.stop]
        parameter = self._parameters[chunk.parameter]
        weights.copy_(parameter.detach().reshape(-1)[chunk.start : chunk.stop])
        weights.grad = gradients.part(parameter, chunk.start, chunk.stop).to("cpu", weights.dtype)
        state = self._state(chunk) if exists else self._state_before(chunk)
        group = self._optimizer.param_groups[self._groups[chunk.parameter]]
        clone = _clone(self._optimizer, group, weights, state)
        type(clone).step(clone)
        self._keep(chunk, clone.state[weights])
        fence()
        self._stamps[chunk.number] = _stamp(update, self._seat, False, True)

    # A chunk's state

    def _views(self, chunk: Chunk) -> Iterator[tuple[str, torch.Tensor]]:
        for name, whole in self._arrays[chunk.parameter].items():
            yield name, whole[chunk.start : chunk.stop]

    def _state(self, chunk: Chunk) -> dict[str, Any]:
        """As the optimizer wants it; arrays are views of the shared memory."""
        state: dict[str, Any] = dict(self._views(chunk))
        numbers = iter(self._numbers[chunk.number].tolist())
        for entry in self._schemas[chunk.parameter]:
            if not entry.is_array:
                number = next(numbers)
                is_tensor = entry.dtype is not None
                state[entry.name] = torch.tensor(number, dtype=entry.dtype) if is_tensor else number
        return state

    def _state_before(self, chunk: Chunk) -> dict[str, Any]:
        """The chunk's part of what the optimizer had before this store was made."""
        state = {}
        for name, value in self._before.get(chunk.parameter, {}).items():
            if name in self._arrays[chunk.parameter]:
                state[name] = value.reshape(-1)[chunk.start : chunk.stop].to("cpu", copy=True)
            else:
                state[name] = value.to("cpu", copy=True) if torch.is_tensor(value) else value
        return state

    def _keep(self, chunk: Chunk, state: dict[str, Any]) -> None:
        """Put what an update has made into the shared memory."""
        for name, target in self._views(chunk):
            if state[name].data_ptr() != target.data_ptr():
                target.copy_(state[name])
        numbers = [float(state[e.name]) for e in self._schemas[chunk.parameter] if not e.is_array]
        if numbers:
            self._numbers[chunk.number, : len(numbers)] = torch.tensor(numbers, dtype=torch.float64)

    def _set_aside(self, chunk: Chunk) -> None:
        for target, source in self._undo_views(chunk, self._seat):
            target.copy_(source)

    def _put_back(self, chunk: Chunk, seat: int) -> None:
        for source, target in self._undo_views(chunk, seat):
            target.copy_(source)

    def _undo_views(self, chunk: Chunk, seat: int) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """Pairs of where a chunk's state is set aside, and where it is."""
        start = 0
        rest = [view for _, view in self._views(chunk)]
        for view in [self._numbers[chunk.number], *rest]:
            flat = view.view(torch.uint8)
            yield self._undo[seat][start : start + flat.numel()], flat
            start += flat.numel()

    # The whole

    def state_dict(self, is_shared: bool = False) -> dict[str, Any]:
        """As the optimizer's own would be; its tensors are views of the shared memory. `is_shared`:
        without what who is given it has in that memory, too."""
        state: dict[int, dict[str, Any]] = {}
        first: dict[int, Chunk] = {}
        for chunk in self._chunks:
            first.setdefault(chunk.parameter, chunk)
        for number, chunk in first.items():
            if not self._stamps[chunk.number]:
                if number in self._before:
                    state[number] = self._before[number]
            elif not is_shared and self._schemas[number]:
                shape = self._parameters[number].shape
                arrays = {name: a.view(shape) for name, a in self._arrays[number].items()}
                state[number] = {**self._state(chunk), **arrays}
        return {**self._optimizer.state_dict(), "state": state}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Only before the first step: later the shared memory is what counts."""
        self._optimizer.load_state_dict(state)
        self._before = self._optimizer.state_dict()["state"]
        self._optimizer.state.clear()

    def bytes(self) -> int:
        mine = owners(self._chunks, len(self._barrier.roster))[self._barrier.place]
        chunks = [self._chunks[number] for number in mine]
        held = [self._weights[c.parameter][c.start : c.stop] for c in chunks]
        held += [view for c in chunks for _, view in self._views(c)]
        return self._undo[self._seat].numel() + sum(v.numel() * v.element_size() for v in held)


def _stamp(update: int, seat: int, is_first: bool, is_done: bool) -> int:
    return (update * _HALF + seat) * 4 + 2 * is_first + is_done


def _read_stamp(stamp: int) -> tuple[int, int, bool, bool]:
    update, seat = divmod(stamp >> 2, _HALF)
    return update, seat, bool(stamp & 2), bool(stamp & 1)


def _clone(
    optimizer: torch.optim.Optimizer, group: dict[str, Any], parameter: Any, state: dict[str, Any]
) -> torch.optim.Optimizer:
    """The same optimizer for one tensor, without what users have hung on it."""
    clone: torch.optim.Optimizer = object.__new__(type(optimizer))
    attributes = {name: v for name, v in vars(optimizer).items() if name != "step"}
    clone.__dict__.update(attributes)
    clone.__dict__.update(
        _optimizer_step_pre_hooks=OrderedDict(), _optimizer_step_post_hooks=OrderedDict()
    )
    clone.param_groups = [{**group, "params": [parameter]}]
    clone.state = defaultdict(dict)
    if state:
        clone.state[parameter] = state
    return clone


def schema(
    optimizer: torch.optim.Optimizer, group: dict[str, Any], parameter: torch.Tensor
) -> tuple[_Entry, ...]:
    """What it keeps for such a parameter, found by letting it update another one."""
    probe = torch.zeros(2, dtype=parameter.dtype)
    probe.grad = torch.zeros_like(probe)
    known = optimizer.state.get(parameter, {})
    state = {
        name: torch.zeros(2, dtype=value.dtype)
        if torch.is_tensor(value) and value.shape == parameter.shape and name != "step"
        else (value.to("cpu", copy=True) if torch.is_tensor(value) else value)
        for name, value in known.items()
    }
    clone = _clone(optimizer, group, probe, state)
    type(clone).step(clone)
    entries = []
    for name, value in clone.state[probe].items():
        if isinstance(value, torch.Tensor):
            entries.append(_Entry(name, value.dtype, value.numel() == 2))
        elif value is not None:
            entries.append(_Entry(name, None, False))
    return tuple(entries)


def _count_numbers(schema: Sequence[_Entry]) -> int:
    return sum(not entry.is_array for entry in schema)
