"""Lanes' results: writing one into a flat vector, and reading the root.

Every lane starts from the committed buffers. What a lane makes of them goes into its result, and
the buffers get their committed values back, so that no lane sees another.
"""

from __future__ import annotations

from itertools import accumulate
from typing import NamedTuple

import torch
from torch import nn

from samestep.errors import BufferDiffers, LossError
from samestep.exchange import Exchange, Flat, Shape
from samestep.layout import ABSENT, Layout, as_real

_KEPT = 1 << 20  # bytes of a root up to which its memory is kept from step to step


def held_gradients(lane: int, root: int, store: str) -> int:
    """The bytes of the gradients of the lane that runs, and of the root where the whole of it is
    given to the optimizer: large ones take turns in the same memory."""
    if store != "replicated":
        return lane
    return lane + root if root < _KEPT else max(lane, root)


class Scratch:
    """A worker's own buffers, made when first asked for."""

    def __init__(self, shape: Shape, device: torch.device) -> None:
        self._shape, self._device = shape, device
        self._made: list[Flat] = []

    def __len__(self) -> int:
        return len(self._made)

    def __call__(self, number: int) -> Flat:
        while number >= len(self._made):
            self._made.append(Flat.empty(self._shape, self._device))
        return self._made[number]


class Results:
    """What a trainer holds for one layout: the exchange, buffers, and views into them."""

    def __init__(
        self, layout: Layout, model: nn.Module, exchange: Exchange, device: torch.device
    ) -> None:
        self.layout, self.exchange = layout, exchange
        self.scratch = Scratch(layout.shape, device)
        self._views: dict[int, _Views] = {}
        self._device = device
        self._root: Flat | None = None  # where the root's gradients go, if they are few
        # A lane's float buffers in float64, and where they go.
        self._buffers = torch.zeros(
            layout.float_buffers_end - layout.gradients_end, dtype=torch.float64, device=device
        )
        self._floats = _Buffers(model, layout.float_names)
        self._integers = _Buffers(model, layout.integer_names)
        sizes = [buffer.numel() for buffer in self._floats.committed]
        self._buffer_views = [
            self._buffers[end - size : end].view(buffer.shape)
            for buffer, size, end in zip(
                self._floats.committed, sizes, accumulate(sizes), strict=True
            )
        ]
        self._notes = _Notes(layout)

    @property
    def result_bytes(self) -> int:
        """What one result takes: a lane's, a node, or the root."""
        return self.layout.shape.f32 * 4 + self.layout.shape.f64 * 8

    def tree_bytes(self, slots: int, workers: int) -> int:
        """What lanes are folded in here."""
        shared = slots + 1 / workers if workers > 1 else slots
        return int((len(self.scratch) + shared) * self.result_bytes)

    # One lane

    def begin(self) -> None:
        """Before a step's first lane: what the user's code did to the buffers counts."""
        self._floats.refresh()
        self._integers.refresh()

    def begin_run(self) -> None:
        """Before the first lane of a run: nothing is noted yet."""
        self._notes = _Notes(self.layout)

    def write(
        self, flat: Flat, add: bool, lane: int, loss: torch.Tensor, weight: torch.Tensor, size: int
    ) -> None:
        """Write a lane's result to `flat`, or add it to what is there; reset the buffers."""
        notes = self._notes
        views = self._views_of(flat)
        present = self._write_gradients(views.gradients, add)
        loss = loss.to(torch.float64)
        sums = torch.stack((loss, weight))
        if add:
            views.sums.add_(sums)
        else:
            views.sums.copy_(sums)
            views.notes.zero_()
        notes.losses[lane] = loss
        notes.size += size
        notes.presence = [a + b for a, b in zip(notes.presence, present, strict=True)]
        if self._floats.names:
            self._take_floats(views.buffers, add, size)
        if self._integers.names:
            self._take_integers()

    def note(self, flat: Flat, run: range, seconds: list[float], seat: int) -> None:
        """Write to a run's first node what was noted of its lanes, who ran them, and how long each
        took."""
        values = self._notes.values(run, seconds, seat)
        self._views_of(flat).notes.copy_(torch.tensor(values, dtype=torch.float64))

    def _write_gradients(self, views: list[torch.Tensor], add: bool) -> list[bool]:
        grads = [parameter.grad for parameter in self.layout.parameters]
        present = [grad is not None for grad in grads]
        targets = [view for view, here in zip(views, present, strict=True) if here]
        sources = [as_real(grad) for grad in grads if grad is not None]
        if any(source.is_sparse for source in sources):
            raise LossError("loss: gave a sparse gradient; use sparse=False in the embedding")
        if targets:
            put = torch._foreach_add_ if add else torch._foreach_copy_
            put(targets, sources)
        if not add and not all(present):
            for view, here in zip(views, present, strict=True):
                if not here:
                    view.fill_(ABSENT)
        return present

    def _take_floats(self, target: torch.Tensor, add: bool, size: int) -> None:
        floats, notes = self._floats, self._notes
        changed = floats.changed()
        torch._foreach_copy_(self._buffer_views, floats.current())
        self._buffers.mul_(size)
        target.add_(self._buffers) if add else target.copy_(self._buffers)
        notes.changed = [a + b for a, b in zip(notes.changed, changed, strict=True)]
        floats.restore(changed)

    def _take_integers(self) -> None:
        changed, grown = self._integers.changed(), []
        for i, small in enumerate(self.layout.is_small):
            if small:
                committed, current = self._integers.committed[i], self._integers.current()[i]
                grown.append((current.to(torch.int64) - committed.to(torch.int64)).flatten())
            elif changed[i]:
                name, buffer = self.layout.integer_names[i], self._integers.current()[i]
                what = "complex buffer" if buffer.is_complex() else "long integer buffer"
                raise BufferDiffers(
                    f"model: a lane changed the {what} {name!r}, and what lanes make of such a "
                    "buffer cannot be brought together; keep it constant, or make it a float "
                    "buffer (these are averaged)"
                )
        if grown:
            values, notes = torch.cat(grown).tolist(), self._notes
            notes.grown = [a + b for a, b in zip(notes.grown, values, strict=True)]
            notes.grown_squared = [
                a + b * b for a, b in zip(notes.grown_squared, values, strict=True)
            ]
        self._integers.restore(changed)

    # The root

    def agreed_growth(self, notes: list[float], results: int) -> list[torch.Tensor | None]:
        """By how much each small integer buffer grew, in all lanes alike."""
        if not self._integers.names:
            return []
        total = torch.tensor(notes[self.layout.grown], dtype=torch.float64)
        squares = torch.tensor(notes[self.layout.grown_squared], dtype=torch.float64)
        # All values are equal exactly if their variance is zero.
        agree = (squares * results == total.square()).tolist()
        growth: list[torch.Tensor | None] = []
        place = 0
        for name, small, committed in zip(
            self.layout.integer_names, self.layout.is_small, self._integers.committed, strict=True
        ):
            if not small:
                growth.append(None)
                continue
            end = place + committed.numel()
            if not all(agree[place:end]):
                raise BufferDiffers(
                    f"model: the integer buffer {name!r} came out differently in different lanes, "
                    "so there is no one value to go on with; make it a float buffer (these are "
                    "averaged), or let every lane leave the same value"
                )
            growth.append((total[place:end] / results).view(committed.shape))
            place = end
        return growth

    def give_gradients(self, total: Flat, weight: float, present: list[bool]) -> None:
        """`.grad` of each parameter from the root: one division, by the global weight."""
        end = self.layout.gradients_end
        root = self._root or Flat(
            torch.empty(self.layout.shape.f32, dtype=torch.float32, device=self._device),
            torch.empty(self.layout.shape.f64, dtype=torch.float64, device=self._device),
        )
        if self.result_bytes < _KEPT:
            self._root, views = root, self._views_of(root).gradients
        else:
            # The next lane drops these gradients before its forward pass, which then has their
            # memory: so it is not taken twice.
            views = self.layout.gradients(root)
        torch.div(total.f32, weight, out=root.f32)
        if end:
            torch.div(total.f64[:end], weight, out=root.f64[:end])
        for parameter, view, here in zip(self.layout.parameters, views, present, strict=True):
            if not here:
                parameter.grad = None
                continue
            grad = torch.view_as_complex(view) if parameter.is_complex() else view
            parameter.grad = grad if grad.dtype == parameter.dtype else grad.to(parameter.dtype)

    def commit_buffers(
        self, total: Flat, notes: list[float], growth: list[torch.Tensor | None]
    ) -> None:
        """Float buffers become the average over all samples, integer ones what all agreed on."""
        if not self._floats.names and not growth:
            return
        changed, (size,) = notes[self.layout.changed], notes[self.layout.size]
        averages = self.layout.float_buffers(total)
        for i, (average, count) in enumerate(zip(averages, changed, strict=True)):
            if count:
                self._floats.commit(i, average / size)
        for i, grown in enumerate(growth):
            if grown is not None and grown.count_nonzero():
                committed = self._integers.committed[i]
                self._integers.commit(i, committed + grown.to(committed.device))

    def gradients_of(self, flat: Flat) -> list[torch.Tensor]:
        """One view for each parameter."""
        return self._views_of(flat).gradients

    def _views_of(self, flat: Flat) -> _Views:
        key = flat.f64.data_ptr()
        if key not in self._views:
            layout, f64 = self.layout, flat.f64
            self._views[key] = _Views(
                layout.gradients(flat),
                f64[layout.gradients_end : layout.float_buffers_end],
                f64[layout.float_buffers_end : layout.sums_end],
                f64[layout.sums_end :],
            )
        return self._views[key]


class _Views(NamedTuple):
    """The parts of a flat vector: for each parameter its gradient, and the rest."""

    gradients: list[torch.Tensor]
    buffers: torch.Tensor
    sums: torch.Tensor
    notes: torch.Tensor


class _Notes:
    """What is noted of the lanes of one run."""

    def __init__(self, layout: Layout) -> None:
        self._lanes = layout.lanes
        self.size = 0
        self.presence = [0] * len(layout.parameters)
        self.changed = [0] * len(layout.float_names)
        self.grown: list[int] = [0] * layout.small
        self.grown_squared: list[int] = [0] * layout.small
        self.losses: dict[int, torch.Tensor] = {}

    def values(self, run: range, seconds: list[float], seat: int) -> list[float]:
        """The notes at their places (see `Layout`)."""
        losses, times, seats = ([ABSENT] * self._lanes for _ in range(3))
        found = torch.stack(tuple(self.losses.values())).tolist()
        for lane, loss in zip(self.losses, found, strict=True):
            losses[lane] = loss
        times[run.start : run.stop] = seconds
        seats[run.start : run.stop] = [seat + 1.0] * len(run)
        counts = [self.size, *self.presence, *self.changed, *self.grown, *self.grown_squared]
        return [*counts, *losses, *times, *seats]


def all_buffers(model: nn.Module) -> _Buffers:
    """All buffers, with their present values."""
    return _Buffers(model, [name for name, _ in model.named_buffers()])


class Gradients:
    """The root's gradients, to be given to the parameters, or part by part."""

    def __init__(self, built: Results, total: Flat, weight: float, notes: list[float]) -> None:
        self._built, self._total, self._weight = built, total, weight
        self._present = [bool(count) for count in notes[built.layout.presence]]
        views = zip(built.layout.parameters, built.gradients_of(total), self._present, strict=True)
        self._views = {id(parameter): view for parameter, view, here in views if here}
        self._coefficient: torch.Tensor | None = None

    def clip(self, norm: float) -> torch.Tensor:
        """Have them clipped to a norm of the whole; returns what it is before that."""
        norms = [
            torch.linalg.vector_norm(self.part(parameter, 0, parameter.numel()))
            for parameter in self._built.layout.parameters
            if self.is_present(parameter)
        ]
        # As torch.nn.utils.clip_grad_norm_ has it, to the last bit.
        whole: torch.Tensor = torch.linalg.vector_norm(torch.stack(norms))
        self._coefficient = torch.clamp(norm / (whole + 1e-6), max=1.0)
        return whole

    def is_present(self, parameter: torch.Tensor) -> bool:
        """Whether any lane had a gradient for it."""
        return id(parameter) in self._views

    def part(self, parameter: torch.Tensor, start: int, stop: int) -> torch.Tensor:
        """Elements [start, stop) of a parameter's gradient, in its dtype."""
        flat = self._views[id(parameter)]
        if parameter.is_complex():
            flat = torch.view_as_complex(flat)
        grad: torch.Tensor = (flat.reshape(-1)[start:stop] / self._weight).to(parameter.dtype)
        if self._coefficient is not None:
            grad.mul_(self._coefficient)
        return grad

    def give(self) -> None:
        """Set `.grad` of every parameter."""
        self._built.give_gradients(self._total, self._weight, self._present)
        if self._coefficient is not None:
            for parameter in self._built.layout.parameters:
                if parameter.grad is not None:
                    parameter.grad.mul_(self._coefficient)


class _Buffers:
    """Some of a model's buffers, with the values they were committed with.

    Values are compared, not version counters: batch normalisation writes its running statistics
    without counting.
    """

    def __init__(self, model: nn.Module, names: list[str]) -> None:
        self.names = names
        owners = [name.rpartition(".") for name in names]
        self._places = [(model.get_submodule(path), key) for path, _, key in owners]
        self._tensors = self.current()
        self.committed = [tensor.detach().clone() for tensor in self._tensors]

    def current(self) -> list[torch.Tensor]:
        return [getattr(module, key) for module, key in self._places]

    def changed(self) -> list[bool]:
        """Whether each is no longer what was committed."""
        return [
            not torch.equal(now, committed)
            for now, committed in zip(self.current(), self.committed, strict=True)
        ]

    def refresh(self) -> None:
        """Take the present values as the committed ones."""
        for i, here in enumerate(self.changed()):
            if here:
                self._tensors[i] = self.current()[i]
                self.committed[i] = self._tensors[i].detach().clone()

    def restore(self, changed: list[bool] | None = None) -> None:
        """Put the committed values back."""
        which = self.changed() if changed is None else changed
        self._set([i for i, here in enumerate(which) if here])

    def commit(self, i: int, value: torch.Tensor) -> None:
        self.committed[i].copy_(value.view(self.committed[i].shape))
        self._set([i])

    def _set(self, numbers: list[int]) -> None:
        if not numbers:
            return
        with torch.no_grad():
            torch._foreach_copy_(
                [self._tensors[i] for i in numbers], [self.committed[i] for i in numbers]
            )
        for i in numbers:
            module, key = self._places[i]
            if getattr(module, key) is not self._tensors[i]:
                setattr(module, key, self._tensors[i])
