"""A worker, from the fork to the end of `main`."""

from __future__ import annotations

import atexit
import faulthandler
import hashlib
import io
import mmap
import os
import queue
import random
import signal
import socket
import sys
import threading
from typing import Any, NoReturn

import torch

from samestep import seeds, tensors
from samestep.board import Board, Phase, Word
from samestep.devices import numerics_class, set_numerics
from samestep.errors import UsageError
from samestep.exchange import Exchange, Shape
from samestep.exchange.shared_memory import SharedMemory
from samestep.failure import Failure
from samestep.messages import Claim, Done, Failed, Order, Ready, Record, Shared, Wanted
from samestep.payload import HostPickler, as_bytes, unpack
from samestep.processes import Channel, die_with_parent, keep_memory, memory_file
from samestep.team import Settings, StopAt, Team

ONCE = "\x1e"  # before a line that is the whole team's: the launcher shows it without a prefix


def run(order: Order, fds: tuple[int, ...]) -> NoReturn:
    """Everything a worker does; it never returns into the fork server's code."""
    status = 1
    try:
        channel_fd, stdout, stderr, board_fd, payload, crash = fds
        _become(order, stdout, stderr, crash)
        line = _Line(Channel(socket.socket(fileno=channel_fd)), order)
        board = Board(order.size, order.number, board_fd)
        try:
            _work(order, line, board, payload)
            status = 0
        except BaseException as error:
            at = f"worker {order.number} ({order.device}), {place(board, order.number)}"
            line.send(Failed(Failure.capture(error).at(at)))
            line.wait_closed()
        with_exit_functions()
    finally:
        os._exit(status)


def _become(order: Order, stdout: int, stderr: int, crash: int) -> None:
    """Turn the fork into a process of its own."""
    parent = os.getppid()
    os.setpgid(0, 0)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the launcher's to handle
    die_with_parent(parent)
    for fd, target in ((stdout, 1), (stderr, 2)):
        os.dup2(fd, target)
        os.close(fd)
    sys.stdout = open(1, "w", buffering=1, closefd=False, errors="backslashreplace")  # noqa: SIM115
    sys.stderr = open(2, "w", buffering=1, closefd=False, errors="backslashreplace")  # noqa: SIM115
    faulthandler.enable(file=crash)
    keep_memory()
    os.environ.clear()
    os.environ.update(order.environ)
    os.chdir(order.folder)
    sys.path[:], sys.argv = order.path, order.argv
    if order.pins and hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, order.pins)
    set_numerics(order.device, order.threads, order.exact)


def _work(order: Order, line: _Line, board: Board, payload: int) -> None:
    line.send(Ready(numerics_class(order.device)))
    tensors.share_with(line.share)
    main, args, kwargs, settings = unpack(payload)
    team = Team(settings, board, line)
    result = run_main(team, settings, main, args, kwargs)
    board.enter(Phase.FINISHED)
    board.put(Word.FINISHED, 1)
    pickled = _pickled(result) if team.is_first else None
    line.send(Done(pickled, tuple(team.fingerprints())))


def run_main(
    team: Team, settings: Settings, main: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    """Run the user's function with the random numbers that it has on every worker."""
    random.seed(0)
    seeds.reseed("start", settings.seed)
    team.board.enter(Phase.MAIN)
    try:
        return main(team, *args, **kwargs)
    except StopAt:
        return None


def place(board: Board, number: int) -> str:
    """Where worker `number` is: the step, and the lane or what else it is about."""
    step, lane = board.get(number, Word.STEP), board.get(number, Word.LANE)
    phase = Phase(board.get(number, Word.PHASE))
    if phase is Phase.EVALUATE:
        return f"step {step}, in evaluate, chunk {lane}"
    return f"step {step}, lane {lane}" if lane >= 0 else f"step {step}, in {phase.name.lower()}"


def with_exit_functions() -> None:
    """What a normal end would run: loggers and the like rely on it."""
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        stream.flush()


def _pickled(result: Any) -> bytes:
    try:
        stream = io.BytesIO()
        HostPickler(stream).dump(result)
        return stream.getvalue()
    except Exception as error:
        raise UsageError(
            f"main: returned {type(result).__name__}, which cannot be sent to the launcher "
            f"({error}); return numbers, strings, tensors, or lists and dicts of them"
        ) from None


class _Line:
    """The worker's line to the launcher; what a team needs (`Link`).

    A thread listens. When the launcher is gone the worker ends at once, whatever it is doing.
    """

    def __init__(self, channel: Channel, order: Order) -> None:
        self._channel, self._order = channel, order
        self._answers: queue.SimpleQueue[tuple[int, ...]] = queue.SimpleQueue()
        self._closed = threading.Event()
        self._sending = threading.Lock()
        threading.Thread(target=self._listen, daemon=True, name="samestep-line").start()

    def send(self, message: Any, fds: tuple[int, ...] = ()) -> None:
        with self._sending:
            self._channel.send(message, fds)

    def wait_closed(self) -> None:
        """After a failure: stay until the launcher has heard everything and ends this worker."""
        self._closed.wait()

    def _listen(self) -> None:
        try:
            while True:
                _, fds = self._channel.receive()
                self._answers.put(fds)
        except (EOFError, OSError):
            self._closed.set()
            os._exit(1)

    def _ask(self, message: Any) -> tuple[int, ...]:
        self.send(message)
        return self._answers.get()

    def exchange(
        self, board: Board, shape: Shape, lanes: int, kind: int, name: str, about: str
    ) -> Exchange:
        size = SharedMemory.bytes_needed(shape, lanes)
        (fd,) = self._ask(Claim(name, size, about))
        exchange = SharedMemory(board, shape, lanes, fd, kind, self._order.device.torch_device)
        os.close(fd)
        return exchange

    def share(self, tensor: torch.Tensor) -> torch.Tensor:
        """The same tensor in memory that all workers share: whoever has it first gives it."""
        content = as_bytes(tensor)
        digest = hashlib.sha256(content)
        digest.update(f"{tensor.dtype} {tuple(tensor.shape)}".encode())
        fds = self._ask(Wanted(digest.hexdigest()))
        if fds:
            fd = fds[0]
        else:
            fd = memory_file(len(content), "samestep-data")
            with os.fdopen(os.dup(fd), "wb") as file:
                file.write(content)
            self.send(Shared(digest.hexdigest()), (fd,))
        memory = mmap.mmap(fd, len(content), access=mmap.ACCESS_COPY)
        os.close(fd)
        return torch.frombuffer(memory, dtype=tensor.dtype).view(tensor.shape)

    def show(self, text: str) -> None:
        lines = [f"{ONCE}{line}" for line in str(text).split("\n")]
        print("\n".join(lines), flush=True)

    def record(self, values: dict[str, Any]) -> None:
        self.send(Record(values))
