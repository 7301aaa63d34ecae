"""Random numbers keyed by what they are for, never by who draws them.

    (seed, step, lane)      the model, in a lane
    (seed, epoch, sample)   the data pipeline, for one sample
    (seed, epoch)           the order of the samples
    (seed, step)            the user's own code between two steps

Python's, NumPy's and torch's global generators are all set.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager
from hashlib import blake2b

import numpy as np
import torch


def key(*parts: int | str) -> int:
    """A 63-bit number that depends on all of `parts`."""
    digest = blake2b(repr(parts).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1


def reseed(*parts: int | str) -> None:
    """Set every global generator from `parts`."""
    number = key(*parts)
    random.seed(number)
    np.random.seed(number & 0xFFFFFFFF)
    torch.default_generator.manual_seed(number)
    if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        torch.cuda.manual_seed(number)


def order(samples: int, seed: int, epoch: int, shuffle: bool) -> torch.Tensor:
    """The order in which an epoch visits the samples."""
    if not shuffle:
        return torch.arange(samples)
    generator = torch.Generator().manual_seed(key("order", seed, epoch))
    return torch.randperm(samples, generator=generator)


@contextmanager
def undisturbed() -> Iterator[None]:
    """Put every generator back where it was: what runs inside cannot be noticed outside."""
    states = random.getstate(), np.random.get_state(), torch.default_generator.get_state()
    used = torch.cuda.is_initialized()  # type: ignore[no-untyped-call]
    cuda = torch.cuda.get_rng_state() if used else None
    try:
        yield
    finally:
        random.setstate(states[0])
        np.random.set_state(states[1])
        torch.default_generator.set_state(states[2])
        if cuda is not None:
            torch.cuda.set_rng_state(cuda)
