"""Where each number of a lane's result stands.

    float32   gradient of each parameter, in registration order, each padded to 64 bytes
    float64   gradients of float64 parameters
              float buffers, multiplied by the lane's size
              sums: loss, weight

    float64   size
    (notes)   for each parameter: in how many lanes it had a gradient
              for each float buffer: in how many lanes it changed
              for each element of a small integer buffer: by how much it grew, and the square of
              that, which together tell whether all lanes agree
              for each lane its loss, so that a NaN can be named; the seconds it took and the seat
              of who ran it, so that everyone plans from the same numbers

The notes are whole numbers, or belong to one lane, so their sum is the same in any order: they are
counted for a worker's whole run of lanes and written once, into its first node.

A parameter without a gradient counts as absent. In a flat vector that is -0.0, the one number
that changes nothing when it is added, not even the sign of a zero.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import nn

from samestep.errors import UsageError
from samestep.exchange import Flat, Shape
from samestep.payload import as_bytes

__all__ = ["ABSENT", "Layout", "Sums"]

ABSENT = -0.0
_ALIGN = 64
_SMALL = 16  # elements: longer integer buffers (masks, positions) must stay as they are


class Sums(NamedTuple):
    """The scalars at the root."""

    loss: float
    weight: float


class Layout:
    """The layout for `model` as it is now: its parameters that want gradients, and its buffers."""

    def __init__(self, model: nn.Module, lanes: int) -> None:
        self.all = list(model.parameters())
        self._wanted = [parameter.requires_grad for parameter in self.all]
        named = [(n, p) for n, p in model.named_parameters() if p.requires_grad]
        for name, parameter in named:
            if not parameter.is_floating_point() and not parameter.is_complex():
                raise UsageError(f"model: parameter {name!r} has dtype {parameter.dtype}")
        self.names = [name for name, _ in named]
        self.parameters = [parameter for _, parameter in named]
        buffers = list(model.named_buffers())
        self.float_names = [name for name, buffer in buffers if buffer.is_floating_point()]
        integers = [(name, b) for name, b in buffers if not b.is_floating_point()]
        self.integer_names = [name for name, _ in integers]
        self.is_small = [b.numel() <= _SMALL and not b.is_complex() for _, b in integers]
        self.lanes = lanes

        self._strides = [
            real.stride() if is_dense(real) else torch.empty(real.shape, device="meta").stride()
            for real in (as_real(parameter.detach()) for parameter in self.parameters)
        ]
        self._places: list[tuple[bool, int]] = []
        ends = [0, 0]
        for parameter in self.parameters:
            double = parameter.dtype in (torch.float64, torch.complex128)
            count = parameter.numel() * (2 if parameter.is_complex() else 1)
            self._places.append((double, ends[double]))
            step = _ALIGN // (8 if double else 4)
            ends[double] += -(-count // step) * step

        self.gradients_end = end = ends[1]
        values = dict(buffers)
        self._buffer_places: list[tuple[int, int]] = []
        for name in self.float_names:
            count = values[name].numel()
            self._buffer_places.append((end, count))
            end += count

        self.float_buffers_end = end
        self.sums_end = end + len(Sums._fields)

        # Places in the list of notes.
        end = 0

        def span(count: int) -> slice:
            nonlocal end
            end += count
            return slice(end - count, end)

        self.size = span(1)
        self.presence = span(len(self.parameters))
        self.changed = span(len(self.float_names))
        self.small = sum(b.numel() for (_, b), s in zip(integers, self.is_small, strict=True) if s)
        self.grown, self.grown_squared = span(self.small), span(self.small)
        self.lane_losses, self.lane_seconds, self.lane_seats = (span(lanes) for _ in range(3))
        self.shape = Shape(ends[0], self.sums_end + end)

    @property
    def is_current(self) -> bool:
        """Whether the same parameters want gradients as when it was made."""
        return [parameter.requires_grad for parameter in self.all] == self._wanted

    def gradients(self, flat: Flat) -> list[torch.Tensor]:
        """One view for each parameter, real and in its shape; in its order of memory too, where
        that is without gaps (channels last)."""
        return [
            flat[double][start:].as_strided(as_real(parameter.detach()).shape, stride)
            for parameter, (double, start), stride in zip(
                self.parameters, self._places, self._strides, strict=True
            )
        ]

    def float_buffers(self, flat: Flat) -> list[torch.Tensor]:
        """One flat view for each float buffer."""
        return [flat.f64[start : start + count] for start, count in self._buffer_places]

    def root(self, flat: Flat) -> tuple[Sums, list[float]]:
        """The scalars and the notes of a root, on the host."""
        values = flat.f64[self.float_buffers_end :].tolist()
        count = len(Sums._fields)
        return Sums(*values[:count]), values[count:]

    def describe(self) -> str:
        """A digest of names, shapes and types: what all workers must agree on."""
        digest = hashlib.sha256(str(self.lanes).encode())
        for name, parameter, stride in zip(self.names, self.parameters, self._strides, strict=True):
            about = tuple(parameter.shape), stride, parameter.dtype
            digest.update(f"{name} {about}\n".encode())
        for name in (*self.float_names, *self.integer_names):
            digest.update(f"{name}\n".encode())
        return digest.hexdigest()


def as_real(tensor: torch.Tensor) -> torch.Tensor:
    return torch.view_as_real(tensor) if tensor.is_complex() else tensor


def is_dense(tensor: torch.Tensor) -> bool:
    """Whether its elements fill its memory, each place once."""
    size = 1
    for stride, length in sorted(
        (stride, length) for stride, length in zip(tensor.stride(), tensor.shape, strict=True)
    ):
        if length == 1:
            continue
        if stride != size:
            return False
        size *= length
    return True


def tensors_of(model: nn.Module, state: dict[int, Any]) -> Iterator[tuple[str, object]]:
    """Everything a fingerprint covers, by name and in a fixed order."""
    for name, parameter in model.named_parameters():
        yield f"parameter {name}", parameter
    for name, buffer in model.named_buffers():
        yield f"buffer {name}", buffer
    for index in sorted(state):
        for name in sorted(state[index]):
            yield f"optimizer {index} {name}", state[index][name]


def fingerprint(model: nn.Module, state: dict[int, Any]) -> str:
    """SHA-256 over parameters, buffers and the optimizer's state (by a parameter's number)."""
    digest = hashlib.sha256()
    for name, value in tensors_of(model, state):
        if isinstance(value, torch.Tensor):
            digest.update(f"{name} {value.dtype} {tuple(value.shape)}\n".encode())
            digest.update(as_bytes(value.cpu()))
        else:
            digest.update(f"{name} {value!r}\n".encode())
    return digest.hexdigest()


def digest(model: nn.Module) -> int:
    """A cheap number that one changed bit of the weights changes: the sum of their bytes as whole
    numbers, with wrap-around. Read at the speed of memory."""
    total = 0
    for value in [*model.parameters(), *model.buffers()]:
        flat = value.detach().reshape(-1).view(torch.uint8)
        words = flat[: flat.numel() // 4 * 4]
        if words.data_ptr() % 4 == 0:
            total = total * 31 + int(words.view(torch.int32).sum(dtype=torch.int64).item())
            flat = flat[words.numel() :]
        total = (total * 31 + int(flat.sum(dtype=torch.int64).item())) % (1 << 62)
    return total
