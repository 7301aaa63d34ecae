"""What launcher and workers say to each other."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from samestep.devices import Device, NumericsClass
from samestep.failure import Failure


@dataclass(frozen=True, slots=True)
class Order:
    """To a new worker, through the fork server. Its descriptors: channel, stdout, stderr, board,
    payload, crash report."""

    number: int
    size: int
    device: Device
    threads: int
    exact: bool
    pins: tuple[int, ...]
    environ: dict[str, str]
    folder: str
    path: list[str]
    argv: list[str]


@dataclass(frozen=True, slots=True)
class Ready:
    """The worker has set itself up and run the probe lane."""

    numerics: NumericsClass


@dataclass(frozen=True, slots=True)
class Claim:
    """The worker needs memory that all workers share. The answer is a descriptor."""

    key: str
    size: int
    about: str


@dataclass(frozen=True, slots=True)
class Wanted:
    """The worker has a tensor with this digest. The answer is a descriptor if another worker has
    shared it, or none: then this worker is to share it, with `Shared`."""

    digest: str


@dataclass(frozen=True, slots=True)
class Shared:
    """Here is the memory that holds the tensor of this digest; its descriptor comes with it."""

    digest: str


@dataclass(frozen=True, slots=True)
class Record:
    """One record for the run's log."""

    values: dict[str, Any]


@dataclass(frozen=True, slots=True)
class Done:
    """`main` has returned; `result` is its pickled value on the first worker."""

    result: bytes | None
    fingerprints: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Failed:
    """`main` has raised."""

    failure: Failure
