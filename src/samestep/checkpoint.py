"""Checkpoints: a run's state on disk, without pickle, whole or not there at all.

    RUN/checkpoints/step-00000120/
        tensors.safetensors    every tensor, by where it stands in the state
        state.json             everything else, with the places of the tensors
        manifest.json          the SHA-256 of both, and its own: written last

A checkpoint is written beside, synced, and renamed: what has its final name was complete. Reading
checks every byte, and falls back to the newest one that is intact.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import threading
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import safetensors.torch
import torch

from samestep.errors import CheckpointError, UsageError
from samestep.state import Snapshot

__all__ = ["Saver", "find", "newest", "read", "write"]

_FORMAT = 1
_TENSORS, _STATE, _MANIFEST = "tensors.safetensors", "state.json", "manifest.json"
_PREFIX = "step-"
_MARK = "!"


# Values without pickle


def encode(value: Any, path: str, tensors: dict[str, torch.Tensor]) -> Any:
    """`value` as JSON; its tensors go to `tensors` under the path where they stand."""
    if value is None or (isinstance(value, (bool, int, float, str)) and type(value) in _PLAIN):
        return value
    if isinstance(value, torch.Tensor):
        return _encode_tensor(value, path, tensors)
    if isinstance(value, np.ndarray):
        tensors[path] = torch.from_numpy(np.ascontiguousarray(value).view(np.uint8).reshape(-1))
        return {_MARK: "array", "at": path, "dtype": value.dtype.str, "shape": list(value.shape)}
    if isinstance(value, np.generic):
        return {_MARK: "scalar", "dtype": value.dtype.str, "value": value.item()}
    if isinstance(value, (torch.dtype, torch.device)):
        return {_MARK: type(value).__name__, "value": str(value).removeprefix("torch.")}
    if isinstance(value, complex):
        return {_MARK: "complex", "value": [value.real, value.imag]}
    if isinstance(value, bytes):
        return {_MARK: "bytes", "value": value.hex()}
    if type(value) is dict and all(type(key) is str and key != _MARK for key in value):
        return {key: encode(item, f"{path}/{key}", tensors) for key, item in value.items()}
    if type(value) is list:
        return [encode(item, f"{path}/{i}", tensors) for i, item in enumerate(value)]
    for name, kind in _CONTAINERS.items():
        if type(value) is kind or (name == "tuple" and type(value) is torch.Size):
            items: Any = value.items() if isinstance(value, dict) else value
            return {
                _MARK: name,
                "items": [encode(item, f"{path}/{i}", tensors) for i, item in enumerate(items)],
            }
    raise UsageError(
        f"{path}: a {type(value).__qualname__} cannot be saved without pickle; keep numbers, "
        "strings, tensors, arrays, and lists, tuples and dicts of them"
    )


_PLAIN = (bool, int, float, str)
_CONTAINERS: dict[str, type] = {
    "tuple": tuple,
    "dict": dict,
    "OrderedDict": OrderedDict,
    "Counter": Counter,
    "defaultdict": defaultdict,
    "set": set,
    "frozenset": frozenset,
    "deque": deque,
}


def _encode_tensor(value: torch.Tensor, path: str, tensors: dict[str, torch.Tensor]) -> Any:
    value = value.detach().cpu()
    if value.is_sparse or value.is_quantized:
        raise UsageError(f"{path}: a sparse or quantised tensor cannot be saved; keep a dense one")
    is_complex = value.is_complex()
    tensors[path] = (torch.view_as_real(value) if is_complex else value).contiguous()
    return {_MARK: "complex tensor" if is_complex else "tensor", "at": path}


def decode(value: Any, tensors: dict[str, torch.Tensor]) -> Any:
    """What was encoded."""
    if isinstance(value, list):
        return [decode(item, tensors) for item in value]
    if not isinstance(value, dict):
        return value
    mark = value.get(_MARK)
    if mark is None:
        return {key: decode(item, tensors) for key, item in value.items()}
    if mark == "tensor":
        return tensors[value["at"]]
    if mark == "complex tensor":
        return torch.view_as_complex(tensors[value["at"]])
    if mark == "array":
        flat = tensors[value["at"]].numpy().view(np.dtype(value["dtype"]))
        return flat.reshape(value["shape"])
    if mark == "scalar":
        return np.dtype(value["dtype"]).type(value["value"])
    if mark == "dtype":
        return getattr(torch, value["value"])
    if mark == "device":
        return torch.device(value["value"])
    if mark == "complex":
        return complex(*value["value"])
    if mark == "bytes":
        return bytes.fromhex(value["value"])
    items = [decode(item, tensors) for item in value["items"]]
    if mark == "Counter":
        return Counter(dict(items))
    if mark == "defaultdict":
        return dict(items)
    return _CONTAINERS[mark](items)


# Writing


def write(folder: Path, snapshot: Snapshot, about: dict[str, Any], keep: int) -> Path:
    """Write a checkpoint below `folder`, and remove all but the newest `keep`."""
    folder.mkdir(parents=True, exist_ok=True)
    target = folder / f"{_PREFIX}{snapshot.step:08d}"
    beside = folder / f".new-{os.getpid()}-{target.name}"
    _sweep(folder)
    beside.mkdir()
    try:
        tensors: dict[str, torch.Tensor] = {}
        tree = {name: encode(value, name, tensors) for name, value in _fields(snapshot).items()}
        contents = {
            _TENSORS: safetensors.torch.save(tensors),
            _STATE: json.dumps(tree).encode(),
        }
        manifest = {
            "format": _FORMAT,
            **about,
            "step": snapshot.step,
            "files": {name: _sha256(content) for name, content in contents.items()},
        }
        for name, content in contents.items():
            _write_file(beside / name, content)
        # Only now: a checkpoint without its manifest is none.
        _write_file(beside / _MANIFEST, json.dumps(_signed(manifest), indent=2).encode())
        _sync(beside)
        if target.exists():  # the same step, written before a resume
            target.rename(folder / f".old-{os.getpid()}-{target.name}")
        beside.rename(target)
        _sync(folder)
    finally:
        shutil.rmtree(beside, ignore_errors=True)
        _sweep(folder)
    for old in find(folder)[keep:]:
        shutil.rmtree(old, ignore_errors=True)
    return target


def _fields(snapshot: Snapshot) -> dict[str, Any]:
    return {name: getattr(snapshot, name) for name in snapshot.__dataclass_fields__}


def _write_file(path: Path, content: bytes) -> None:
    with path.open("wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())


def _sync(folder: Path) -> None:
    """Make the names in a folder last through a power failure."""
    fd = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def _sweep(folder: Path) -> None:
    """Remove what a writer that died has left."""
    for left in [*folder.glob(".new-*"), *folder.glob(".old-*")]:
        shutil.rmtree(left, ignore_errors=True)


def _sha256(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()


def _signed(manifest: dict[str, Any]) -> dict[str, Any]:
    return {**manifest, "sha256": _sha256(json.dumps(manifest, sort_keys=True).encode())}


# Reading


def find(folder: Path) -> list[Path]:
    """The checkpoints below `folder`, the newest first."""
    return sorted((p for p in folder.glob(f"{_PREFIX}*") if p.is_dir()), reverse=True)


def read(path: Path) -> tuple[Snapshot, dict[str, Any]]:
    """A checkpoint and its manifest, if every byte is as it was written."""
    try:
        manifest = json.loads((path / _MANIFEST).read_bytes())
        signature = manifest.pop("sha256")
        if _signed(manifest)["sha256"] != signature:
            raise CheckpointError(f"{path}: {_MANIFEST} is damaged")
        if manifest["format"] != _FORMAT:
            raise CheckpointError(
                f"{path}: is of format {manifest['format']}, and this samestep reads {_FORMAT}"
            )
        contents = {}
        for name, digest in manifest["files"].items():
            contents[name] = (path / name).read_bytes()
            if _sha256(contents[name]) != digest:
                raise CheckpointError(f"{path}: {name} is damaged")
        if path.name != f"{_PREFIX}{manifest['step']:08d}":
            raise CheckpointError(f"{path}: holds step {manifest['step']}; it was renamed")
        tensors = safetensors.torch.load(contents[_TENSORS])
        tree = json.loads(contents[_STATE])
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise CheckpointError(f"{path}: cannot be read ({type(error).__name__}: {error})") from None
    fields = {name: decode(value, tensors) for name, value in tree.items()}
    return Snapshot(**fields), manifest


def newest(
    folder: Path, warn: Callable[[str], None], at_most: int | None = None
) -> tuple[Snapshot, dict[str, Any], Path] | None:
    """The newest intact checkpoint, at or before step `at_most`; None where there is none."""
    damaged = []
    for path in find(folder):
        if at_most is not None and path.name > f"{_PREFIX}{at_most:08d}":
            continue
        try:
            snapshot, manifest = read(path)
        except CheckpointError as error:
            damaged.append(str(error))
            continue
        for text in damaged:
            warn(f"{text}; going back to {path.name}")
        return snapshot, manifest, path
    if damaged:
        raise CheckpointError(
            "no intact checkpoint: " + "; ".join(damaged) + "; to begin anew, start without resume"
        )
    return None


# In the background


class Saver:
    """Writes snapshots in a thread of the launcher, one after the other; of those that wait, only
    the newest. `load` reads a snapshot that came from a worker; `over` is told the step when its
    writing has ended, well or not."""

    def __init__(
        self,
        folder: Path,
        keep: int,
        load: Callable[[int], Snapshot],
        warn: Callable[[str], None],
        over: Callable[[int], None] = lambda step: None,
    ) -> None:
        self._folder, self._keep, self._load, self._warn = folder, keep, load, warn
        self._over = over
        self._change = threading.Condition()
        self._held: tuple[int, dict[str, Any]] | None = None
        self._wanted = self._busy = self._closing = False
        self.saved: Path | None = None
        self._thread = threading.Thread(target=self._run, daemon=True, name="samestep-saver")
        self._thread.start()

    def hold(self, fd: int, about: dict[str, Any], due: bool) -> None:
        """Take a snapshot; it is written if it is due, or later if the run has to stop."""
        with self._change:
            if self._held is not None:
                os.close(self._held[0])
            self._held = os.dup(fd), about
            self._wanted = self._wanted or due
            self._change.notify_all()

    def flush(self, seconds: float | None = None) -> bool:
        """Write what is held, due or not, and wait until it is there."""
        with self._change:
            self._wanted = self._held is not None
            self._change.notify_all()
            return self._change.wait_for(lambda: not (self._wanted or self._busy), seconds)

    def close(self) -> None:
        """Finish what is being written or due, and leave the rest."""
        with self._change:
            self._closing = True
            self._change.notify_all()
        self._thread.join()
        if self._held is not None:
            os.close(self._held[0])

    def _run(self) -> None:
        for fd, about in self._due():
            try:
                snapshot = self._load(fd)
                self.saved = write(self._folder, snapshot, about, self._keep)
            except Exception as error:
                self._warn(
                    f"the checkpoint could not be written ({error}); training goes on, and the "
                    "last one stays"
                )
            finally:
                os.close(fd)
                self._over(about["step"])

    def _due(self) -> Iterator[tuple[int, dict[str, Any]]]:
        while True:
            with self._change:
                self._busy = False
                self._change.notify_all()
                self._change.wait_for(lambda: self._wanted or self._closing)
                if not self._wanted:
                    return
                assert self._held is not None
                held, self._held = self._held, None
                self._wanted, self._busy = False, True
            yield held
