"""Background loaders: processes of a worker that do something ahead of its use.

    worker ──request──▶ loader: work(request) ──▶ result in memory without a name ──▶ worker

Requests go round the loaders, so the answers come back in the order of the requests. A loader is
forked from its worker: it has the dataset already, and it ends with the worker, however that ends.
"""

from __future__ import annotations

import os
import signal
import warnings
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NoReturn

from samestep.errors import WorkerDied
from samestep.payload import pack, unpack
from samestep.processes import Channel, channels, describe_exit, die_with_parent

_AHEAD = 4  # requests that each loader has at most


class Loaders:
    """Runs `work` on each of `requests` in `count` processes; `next` gives (request, result)."""

    def __init__(
        self,
        work: Callable[[Any], Any],
        requests: Iterator[Any],
        count: int,
        cores: Sequence[int] = (),
    ) -> None:
        self._requests = requests
        self._pending: deque[tuple[Any, int]] = deque()
        self._processes = [_fork(work, cores) for _ in range(count)]
        self._turn = 0
        for _ in range(count * _AHEAD):
            self._ask()

    def next(self) -> tuple[Any, Any] | None:
        """The next request and its result; None when there are no more."""
        if not self._pending:
            return None
        request, loader = self._pending.popleft()
        pid, channel = self._processes[loader]
        try:
            _, (fd,) = channel.receive()
        except EOFError:
            channel.close()
            _, status = os.waitpid(pid, 0)
            del self._processes[loader]
            raise WorkerDied(f"a background loader {describe_exit(status)}") from None
        self._ask()
        try:
            return request, unpack(fd)
        finally:
            os.close(fd)

    def close(self) -> None:
        """End the loaders, whatever they are doing."""
        for pid, channel in self._processes:
            channel.close()
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
        self._processes.clear()
        self._pending.clear()

    def _ask(self) -> None:
        for request in self._requests:
            loader = self._turn % len(self._processes)
            self._processes[loader][1].send(request)
            self._pending.append((request, loader))
            self._turn += 1
            return


def _fork(work: Callable[[Any], Any], cores: Sequence[int]) -> tuple[int, Channel]:
    mine, theirs = channels()
    parent = os.getpid()
    with warnings.catch_warnings():
        # The worker's other thread only ever waits on a socket: it holds no lock at a fork.
        warnings.simplefilter("ignore", DeprecationWarning)
        pid = os.fork()
    if pid == 0:
        mine.close()
        _serve(theirs, work, cores, parent)
    theirs.close()
    return pid, mine


def _serve(
    channel: Channel, work: Callable[[Any], Any], cores: Sequence[int], parent: int
) -> NoReturn:
    try:
        die_with_parent(parent)
        if cores and hasattr(os, "sched_setaffinity"):
            os.sched_setaffinity(0, cores)
        while True:
            request, _ = channel.receive()
            fd = pack(work(request))
            channel.send(None, (fd,))
            os.close(fd)
    except (EOFError, BrokenPipeError):
        pass
    finally:
        os._exit(0)
