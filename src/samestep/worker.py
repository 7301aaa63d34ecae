"""A worker, from the fork to the end of `main`."""

from __future__ import annotations

import atexit
import faulthandler
import hashlib
import io
import mmap
import os
import queue
import signal
import socket
import sys
import threading
from collections import Counter
from typing import Any, NoReturn

import torch

from samestep import seeds, state, tensors
from samestep.barrier import Barrier, Verdict
from samestep.board import Board, Phase, Word
from samestep.devices import numerics_class, set_numerics
from samestep.errors import UsageError
from samestep.exchange import Exchange, Shape
from samestep.exchange.shared_memory import SharedMemory
from samestep.failure import Failure
from samestep.messages import (
    CatchUp,
    Claim,
    Differs,
    Done,
    Failed,
    NoRoom,
    Note,
    Order,
    Ready,
    Record,
    Result,
    Shared,
    State,
    Tell,
    Wanted,
)
from samestep.payload import HostPickler, as_bytes, pack, unpack
from samestep.processes import Channel, die_with_parent, keep_memory, memory_file
from samestep.settings import Settings, StopAt
from samestep.state import Snapshot
from samestep.team import Team

STACK_SIGNAL = signal.SIGRTMIN + 5  # has a worker write its Python stack to its crash report
ONCE = "\x1e"  # before a line that is the whole team's: the launcher shows it without a prefix


def run(order: Order, fds: tuple[int, ...]) -> NoReturn:
    """Everything a worker does; it never returns into the fork server's code."""
    status = 1
    try:
        channel_fd, stdout, stderr, board_fd, payload, crash = fds
        _become(order, stdout, stderr, crash)
        line = _Line(Channel(socket.socket(fileno=channel_fd)), order)
        board = Board(order.seats, order.row, board_fd)
        try:
            _work(order, line, board, payload)
            status = 0
        except BaseException as error:
            at = f"worker {order.seat} ({order.device}), {place(board, order.row)}"
            line.send(Failed(Failure.capture(error).at(at)))
            line.wait_end()
        with_exit_functions()
    finally:
        os._exit(status)


def _become(order: Order, stdout: int, stderr: int, crash: int) -> None:
    """Turn the fork into a process of its own."""
    parent = os.getppid()
    # A session each. It makes a process group, by which all that a worker starts is ended; and
    # Linux shares a core out by session (autogroup), so a worker beside another program gets half
    # of it. Measured: of two workers in one session, the one on a busy core gets a third of that.
    os.setsid()
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the launcher's to handle
    die_with_parent(parent)
    for fd, target in ((stdout, 1), (stderr, 2)):
        os.dup2(fd, target)
        os.close(fd)
    sys.stdout = open(1, "w", buffering=1, closefd=False, errors="backslashreplace")  # noqa: SIM115
    sys.stderr = open(2, "w", buffering=1, closefd=False, errors="backslashreplace")  # noqa: SIM115
    faulthandler.enable(file=crash)
    faulthandler.register(STACK_SIGNAL, file=crash, all_threads=False)
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
    state.watch_schedulers()
    board.clock.traced = settings.traced
    team = Team(settings, board, line, order.seat, order.joins)
    result = run_main(team, settings, main, args, kwargs)
    fingerprints = tuple(team.fingerprints())
    board.enter(Phase.FINISHED)
    board.put(Word.FINISHED, 1)
    clock = board.clock
    line.send(Done(fingerprints, tuple(clock.moments), tuple(clock.steps)))
    while isinstance(line.next_message()[0], Tell):
        line.send(Result(_pickled(result)))


def run_main(
    team: Team, settings: Settings, main: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    """Run the user's function with the random numbers that it has on every worker."""
    seeds.reseed("start", settings.seed)
    team.board.enter(Phase.MAIN)
    try:
        return main(team, *args, **kwargs)
    except StopAt:
        return None
    except Exception as error:
        if team.catching_up:
            error.add_note(
                "this worker was catching up with the run: loops of batches that are over were "
                "empty for it. Use `for batch in team.batches(...)`, not next(), and count with "
                "team.position.step"
            )
        raise


def place(board: Board, row: int) -> str:
    """Where the worker of a row is: the step, and the lane or what else it is about."""
    step, lane = board.get(row, Word.STEP), board.get(row, Word.LANE)
    phase = Phase(board.get(row, Word.PHASE))
    if phase is Phase.EVALUATE:
        return f"step {step}, in evaluate, chunk {lane}"
    if phase is Phase.CATCH_UP:
        return "its start, while catching up"
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
        self._answers: queue.SimpleQueue[tuple[Any, tuple[int, ...]]] = queue.SimpleQueue()
        self._closed = threading.Event()
        self._sending = threading.Lock()
        self._recorded: tuple[int, Counter[str]] = -1, Counter()
        threading.Thread(target=self._listen, daemon=True, name="samestep-line").start()

    def send(self, message: Any, fds: tuple[int, ...] = ()) -> None:
        with self._sending:
            self._channel.send(message, fds)

    def wait_end(self) -> None:
        """Stay until the launcher ends this worker."""
        self._closed.wait()

    def next_message(self) -> tuple[Any, tuple[int, ...]]:
        """Wait for the launcher's next message, and its descriptors."""
        return self._answers.get()

    def _listen(self) -> None:
        try:
            while True:
                self._answers.put(self._channel.receive())
        except (EOFError, OSError):
            self._closed.set()
            os._exit(1)

    def _ask(self, message: Any) -> tuple[int, ...]:
        self.send(message)
        return self.next_message()[1]

    def exchange(
        self, barrier: Barrier, shape: Shape, lanes: int, kind: int, name: str, about: str
    ) -> Exchange:
        size = SharedMemory.bytes_needed(shape, lanes)
        (fd,) = self._ask(Claim(name, size, about))
        device = self._order.device.torch_device

        def differ(verdict: Verdict) -> None:
            step = barrier.board.get(barrier.board.me, Word.STEP)
            self.send(Differs(step, verdict.digests, verdict.odd))

        exchange = SharedMemory(barrier, shape, lanes, fd, kind, device, differ)
        os.close(fd)
        return exchange

    def memory(self, name: str, size: int, about: str) -> mmap.mmap:
        (fd,) = self._ask(Claim(name, size, about))
        try:
            return mmap.mmap(fd, size)
        finally:
            os.close(fd)

    def catch_up(self) -> Snapshot:
        (fd,) = self._ask(CatchUp())
        try:
            snapshot: Snapshot = unpack(fd)
            return snapshot
        finally:
            os.close(fd)

    def give(self, rows: tuple[int, ...], snapshot: Snapshot) -> None:
        self._send_state(State(rows, snapshot.step), snapshot)

    def save(self, snapshot: Snapshot, due: bool) -> None:
        self._send_state(State((), snapshot.step, due, snapshot.logged), snapshot)

    def _send_state(self, message: State, snapshot: Snapshot) -> None:
        fd = pack(snapshot)
        self.send(message, (fd,))
        os.close(fd)

    def tell(self, text: str) -> None:
        self.send(Note(text))

    def no_room(self, size: int, lanes: int) -> None:
        self.send(NoRoom(size, lanes))

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

    def record(self, values: dict[str, Any], text: str, step: int) -> None:
        names = ", ".join(values)
        if self._recorded[0] != step:
            self._recorded = step, Counter()
        self._recorded[1][names] += 1
        self.send(Record(values, text, step, names, self._recorded[1][names]))
