"""The fork server: a process that has torch imported and forks workers from there.

It never computes anything and has one thread, so forking it is safe; the launcher, which may have
threads, a CUDA context or a notebook inside, is never forked. It lives exactly as long as the
launcher holds the other end of its socket, and takes its workers with it.
"""

from __future__ import annotations

import gc
import json
import os
import selectors
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any, NoReturn

from samestep.errors import SamestepError
from samestep.processes import Channel, channels


@dataclass(frozen=True, slots=True)
class Fork:
    """To the server: fork a worker; descriptors come with it."""

    number: int
    order: Any


@dataclass(frozen=True, slots=True)
class Kill:
    """To the server: send a signal to a worker; to end it means to end all it has started."""

    number: int
    signal: int = signal.SIGKILL


@dataclass(frozen=True, slots=True)
class Forked:
    """From the server: the process id of a new worker."""

    number: int
    pid: int


@dataclass(frozen=True, slots=True)
class Exited:
    """From the server: a worker is gone; `status` is what wait gave."""

    number: int
    status: int


class ForkServer:
    """The launcher's end."""

    def __init__(self) -> None:
        self.channel, theirs = channels()
        environment = dict(os.environ)
        # Read when torch is imported: the number of threads must not change while it runs.
        environment |= {"OMP_DYNAMIC": "false", "MKL_DYNAMIC": "false"}
        environment.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
        code = (
            "import gc, json, sys; gc.disable(); sys.path[:] = json.loads(sys.argv[1]); "
            "from samestep.forkserver import serve; serve(int(sys.argv[2]))"
        )
        warnings = [f"-W{option}" for option in sys.warnoptions]
        self._process = subprocess.Popen(
            [sys.executable, *warnings, "-c", code, json.dumps(sys.path), str(theirs.fileno())],
            env=environment,
            stdin=subprocess.DEVNULL,
            pass_fds=[theirs.fileno()],
            start_new_session=True,  # Ctrl-C in a terminal is the launcher's to handle
        )
        theirs.close()

    def close(self) -> None:
        """End it, and with it every worker that is left."""
        self.channel.close()
        self._process.wait()

    def died(self) -> SamestepError:
        status = self._process.wait()
        if status < 0:
            return SamestepError(
                "the fork server, which starts and watches the workers, was ended by "
                f"{signal.Signals(-status).name}; start the run again (with a run folder, "
                "resume=True goes on from its newest checkpoint)"
            )
        return SamestepError(
            f"the fork server ended with status {status} (what it printed stands above): can "
            f"{sys.executable} import torch?"
        )


_kept: ForkServer | None = None


@contextmanager
def kept() -> Iterator[None]:
    """Use one fork server for all launches inside: they start without importing torch again."""
    global _kept
    if _kept is not None:
        yield
        return
    _kept = ForkServer()
    try:
        yield
    finally:
        server, _kept = _kept, None
        server.close()


@contextmanager
def server() -> Iterator[ForkServer]:
    """The kept fork server, or one for a single launch."""
    if _kept is not None:
        yield _kept
        return
    made = ForkServer()
    try:
        yield made
    finally:
        made.close()


def serve(fd: int) -> None:
    """The server's own main; ends when the launcher is gone."""
    import torch  # noqa: F401

    from samestep import lazy_dynamo, worker

    lazy_dynamo.install()
    gc.collect()
    gc.freeze()  # so that a worker's collector does not copy the pages it shares with the others
    gc.enable()
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    channel = Channel(socket.socket(fileno=fd))
    _Server(channel, worker.run).loop()
    os._exit(0)  # taking torch down properly would only take time


class _Server:
    def __init__(self, channel: Channel, run: Callable[[Any, tuple[int, ...]], NoReturn]) -> None:
        self._channel, self._run = channel, run
        self._workers: dict[int, int] = {}  # pid → number
        self._wakeup = os.pipe()
        for end in self._wakeup:
            os.set_blocking(end, False)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        signal.set_wakeup_fd(self._wakeup[1], warn_on_full_buffer=False)

    def loop(self) -> None:
        with selectors.DefaultSelector() as selector:
            selector.register(self._channel, selectors.EVENT_READ)
            selector.register(self._wakeup[0], selectors.EVENT_READ)
            while True:
                ready = [key.fileobj for key, _ in selector.select()]
                if self._wakeup[0] in ready:
                    with suppress(BlockingIOError):
                        os.read(self._wakeup[0], 4096)
                try:
                    self._reap()
                    if self._channel in ready:
                        for message, fds in self._channel.ready():
                            self._obey(message, fds)
                except (EOFError, BrokenPipeError):
                    for pid in self._workers:
                        _kill(pid)
                    return

    def _obey(self, message: Fork | Kill, fds: tuple[int, ...]) -> None:
        if isinstance(message, Kill):
            for pid, number in self._workers.items():
                if number == message.number and message.signal == signal.SIGKILL:
                    _kill(pid)
                elif number == message.number:
                    os.kill(pid, message.signal)
            return
        pid = os.fork()
        if pid == 0:
            signal.set_wakeup_fd(-1)
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            self._channel.close()
            for end in self._wakeup:
                os.close(end)
            self._run(message.order, fds)
        self._workers[pid] = message.number
        self._channel.send(Forked(message.number, pid))
        for fd in fds:
            os.close(fd)

    def _reap(self) -> None:
        while self._workers:
            pid, status = os.waitpid(-1, os.WNOHANG)
            if pid == 0:
                return
            number = self._workers.pop(pid, None)
            if number is not None:
                _kill_group(pid)  # what it has started, such as background loaders
                self._channel.send(Exited(number, status))


def _kill(pid: int) -> None:
    """Kill a worker that is there, and all that it has started."""
    _kill_group(pid)
    with suppress(ProcessLookupError):  # it may not have come to leading its group yet
        os.kill(pid, signal.SIGKILL)


def _kill_group(pid: int) -> None:
    with suppress(ProcessLookupError, PermissionError):
        os.killpg(pid, signal.SIGKILL)
