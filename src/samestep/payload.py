"""The user's function on its way to the workers: by value, large tensors through shared memory."""

from __future__ import annotations

import functools
import hashlib
import importlib
import inspect
import io
import os
import pickle
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from mmap import ACCESS_COPY, mmap
from types import CodeType, ModuleType
from typing import Any

import cloudpickle
import torch

from samestep.processes import memory_file

_LARGE_BYTES = 1 << 16
_ALIGN = 64


def pack(value: Any) -> int:
    """Pickle `value` into a memory file: the pickle, then the tensors it refers to.

    Functions and classes of `__main__` and of notebooks go by value. A worker maps the file
    copy-on-write: it may change its tensors, and what nobody changes is in memory once.
    """
    stream = io.BytesIO()
    pickler = _Pickler(stream)
    with _by_value("<run_path>"):  # where runpy.run_path puts a script
        pickler.dump(value)
    head = pickle.dumps((len(stream.getbuffer()), pickler.places))
    start = _aligned(8 + len(head) + len(stream.getbuffer()))
    fd = memory_file(start + pickler.size, "samestep-payload")
    with os.fdopen(os.dup(fd), "wb") as file:
        file.write(len(head).to_bytes(8, "little") + head + stream.getbuffer())
        for tensor, (offset, _, _) in zip(pickler.tensors, pickler.places, strict=True):
            file.seek(start + offset)
            file.write(as_bytes(tensor))
    return fd


@contextmanager
def _by_value(name: str) -> Iterator[None]:
    """Ship what a module defines by value, where it is one that workers cannot import."""
    module = sys.modules.get(name)
    if module is None:
        yield
        return
    cloudpickle.register_pickle_by_value(module)
    try:
        yield
    finally:
        cloudpickle.unregister_pickle_by_value(module)


def unpack(fd: int) -> Any:
    """What was packed."""
    memory = mmap(fd, 0, access=ACCESS_COPY)
    head_end = 8 + int.from_bytes(memory[:8], "little")
    size, places = pickle.loads(memory[8:head_end])
    start = _aligned(head_end + size)
    return _Unpickler(io.BytesIO(memory[head_end : head_end + size]), memory, start, places).load()


def as_bytes(tensor: torch.Tensor) -> memoryview:
    """The bytes of a tensor on the CPU, in logical order; a copy only where it is not so stored."""
    flat = tensor.detach().contiguous().flatten().view(torch.uint8)
    return memoryview(flat.numpy())  # type: ignore[arg-type]


def digest_of_code(function: Any) -> str:
    """A digest of what a function does, by its byte code: not of its line numbers or comments."""
    while isinstance(function, functools.partial):
        function = function.func
    function = inspect.unwrap(function)
    code = getattr(function, "__code__", None) or getattr(type(function).__call__, "__code__", None)
    if code is None:
        return repr(type(function))
    return hashlib.sha256(_code_bytes(code)).hexdigest()[:8]


def _code_bytes(code: CodeType) -> bytes:
    constants = b"".join(
        _code_bytes(item) if isinstance(item, CodeType) else repr(item).encode()
        for item in code.co_consts
        if not isinstance(item, frozenset)  # its order is not fixed
    )
    names = repr((code.co_names, code.co_varnames)).encode()
    return code.co_code + constants + names


def _aligned(place: int) -> int:
    return -(-place // _ALIGN) * _ALIGN


class HostPickler(cloudpickle.Pickler):  # type: ignore[misc]
    """cloudpickle, and: tensors of a GPU become tensors of the CPU, so that a launcher needs no GPU
    to read them; modules that are objects of a class of their own go by name."""

    def reducer_override(self, value: Any) -> Any:
        if isinstance(value, torch.Tensor) and value.is_cuda:
            host = value.detach().cpu()
            return host.__reduce_ex__(pickle.HIGHEST_PROTOCOL)  # type: ignore[no-untyped-call]
        if isinstance(value, ModuleType) and type(value) is not ModuleType:
            # cloudpickle knows plain modules; torch.backends.cudnn and its like are objects.
            return importlib.import_module, (value.__name__,)
        return super().reducer_override(value)


class _Pickler(HostPickler):
    def __init__(self, stream: io.BytesIO) -> None:
        super().__init__(stream)
        self.tensors: list[torch.Tensor] = []
        self.places: list[tuple[int, torch.dtype, torch.Size]] = []
        self.size = 0
        self._seen: dict[int, int] = {}

    def persistent_id(self, value: Any) -> int | None:
        plain = type(value) is torch.Tensor and not value.requires_grad and not value.is_sparse
        if not plain or value.device.type != "cpu" or value.nbytes < _LARGE_BYTES:
            return None
        if id(value) not in self._seen:
            self._seen[id(value)] = len(self.tensors)
            self.places.append((self.size, value.dtype, value.shape))
            self.tensors.append(value.contiguous())
            self.size += _aligned(value.nbytes)
        return self._seen[id(value)]


class _Unpickler(pickle.Unpickler):
    def __init__(self, stream: io.BytesIO, memory: mmap, start: int, places: Any) -> None:
        super().__init__(stream)
        self._memory, self._start, self._places = memory, start, places
        self._made: dict[int, torch.Tensor] = {}

    def persistent_load(self, number: int) -> torch.Tensor:
        if number not in self._made:
            offset, dtype, shape = self._places[number]
            self._made[number] = torch.frombuffer(
                self._memory, dtype=dtype, count=shape.numel(), offset=self._start + offset
            ).view(shape)
        return self._made[number]
