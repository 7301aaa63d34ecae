"""The launcher: serves the workers of one launch and carries out what `supervise` decides.

launcher ──starts──▶ fork server (torch imported once) ──forks──▶ worker 0 … n-1
   ▲   a channel and two output pipes for each worker; one board of shared memory for all
"""

from __future__ import annotations

import os
import selectors
import signal
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from samestep.board import Board, Head, Phase, Word
from samestep.checkpoint import Saver
from samestep.clock import Moment
from samestep.console import Console
from samestep.devices import Machine, pinning
from samestep.forkserver import Exited, Fork, Forked, ForkServer, Kill
from samestep.messages import Done, Leave, Note, Order, Ready, Record, Shared, State, Tell, Wanted
from samestep.payload import unpack
from samestep.processes import Channel, channels, memory_file, out_of_memory_kills
from samestep.runs import RunFolder
from samestep.settings import Settings
from samestep.supervise import (
    Ask,
    Dismiss,
    End,
    Event,
    Give,
    Grant,
    Instruction,
    Lost,
    Outcome,
    Policy,
    Publish,
    Returned,
    Say,
    Stage,
    Start,
    Stuck,
    begin,
    decide,
)
from samestep.watch import Seen, Watch, look
from samestep.worker import STACK_SIGNAL, place

_OWN = os.path.dirname(__file__)
_TICK_S = 0.1
_LOOK_S = 0.25
_LEAVE_S = 30.0  # how long workers may take to leave after `main` has returned on all of them
_GRACE_S = 4.0  # how long a signal waits for the open step; batch systems give 5 s and more
_STACK_S = 1.0
_READ = 1 << 16


@dataclass(frozen=True, slots=True)
class Stopped:
    """The run was stopped by a signal, after its state was saved."""

    signal: int


@dataclass
class _Worker:
    """What the launcher holds for one worker."""

    seat: int
    channel: Channel
    outputs: tuple[int, int]
    crash: int
    pid: int | None = None


class Launcher:
    """The processes and descriptors of one launch; all are gone when the `with` block ends."""

    def __init__(
        self,
        server: ForkServer,
        settings: Settings,
        machine: Machine,
        payload: int,
        policy: Policy,
        folder: RunFolder | None,
        keep: int,
        hang_after: float | None,
    ) -> None:
        self._server, self._settings, self._payload = server, settings, payload
        self._folder = folder
        self._pins = pinning(settings.devices, machine, settings.threads)
        self._run = begin(settings.devices, policy)
        seats = len(settings.devices)
        self._stack = ExitStack()
        self._board_fd = self._own(memory_file(Board.bytes_needed(seats), "samestep-board"))
        self._own(payload)
        self._board = Board(seats, fd=self._board_fd)
        self._stack.callback(self._board.close)
        self._board.publish(self._run.roster)
        self.console = Console(self._board)
        self._stack.callback(self.console.close)
        self._selector = self._stack.enter_context(selectors.DefaultSelector())
        self._workers: dict[int, _Worker] = {}
        self._present: set[int] = set()
        self._segments: dict[str, int] = {}
        self._shared: dict[str, int | None] = {}
        self._sharer: dict[str, int] = {}
        self._waiting: dict[str, list[int]] = {}
        self._state_fd: int | None = None
        self._logged: set[tuple[int, str, int]] = set()
        self._numerics = ""
        self._watch = None if hang_after is None else Watch(hang_after)
        self._looked = time.monotonic()
        self.moments: dict[str, tuple[Moment, ...]] = {}
        self._kills = out_of_memory_kills()
        self._signals: list[int] = []
        self._stopped_at: float | None = None
        self._saver: Saver | None = None
        if folder is not None and settings.saves is not None:
            self._saver = Saver(
                folder.path / "checkpoints",
                keep,
                unpack,
                self.say,
                lambda step: self._board.put_head(Head.SAVED, step),
            )
            self._stack.callback(self._saver.close)

    def __enter__(self) -> Launcher:
        try:
            self._selector.register(self._server.channel, selectors.EVENT_READ, None)
            for member in self._run.members:
                self._start(member.row, member.seat)
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        """End whoever is left, and wait until the kernel says so."""
        with suppress(OSError, EOFError):
            for row in self._present:
                self._server.channel.send(Kill(row))
            while self._present:
                message, _ = self._server.channel.receive()
                if isinstance(message, Exited):
                    self._present.discard(message.number)
        self._stack.close()

    def say(self, text: str) -> None:
        """Tell the user, and note it in the run's folder."""
        self.console.say(f"samestep: {text}", sys.stderr)
        if self._folder is not None:
            self._folder.note(text)

    def spent(self) -> dict[str, tuple[float, ...]]:
        """The seconds of each device, by kind: those of its newest worker."""
        names = {member.seat: str(member.device) for member in self._run.members}
        newest = {member.seat: member.row for member in self._run.members}
        return {names[seat]: self._board.spent(row) for seat, row in newest.items()}

    def until_over(self) -> Outcome | Stopped:
        """Serve the workers until none is left."""
        deadline = None
        with self._signals_heard():
            while not self._run.is_over:
                for key, _ in self._selector.select(_TICK_S):
                    self._serve(key)
                self._show_progress()
                self._look_for_hangs()
                if self._is_stopped():
                    return Stopped(self._signals[0])
                if isinstance(self._run.outcome, Returned):
                    deadline = deadline or time.monotonic() + _LEAVE_S
                    if time.monotonic() > deadline:
                        self._obey(tuple(End(row) for row in self._present))
        assert self._run.outcome is not None
        return self._run.outcome

    def _serve(self, key: selectors.SelectorKey) -> None:
        """Something has arrived: from the fork server, a worker's channel, or its output."""
        if key.fileobj is self._server.channel:
            try:
                messages = self._server.channel.ready()
            except EOFError:
                raise self._server.died() from None
            for message, _ in messages:
                if isinstance(message, Forked):
                    self._workers[message.number].pid = message.pid
                else:
                    self._exited(message)
        elif isinstance(key.fileobj, Channel):
            try:
                messages = key.fileobj.ready()
            except EOFError:
                with suppress(KeyError):
                    self._selector.unregister(key.fileobj)  # its exit is heard from the server
                return
            for message, fds in messages:
                self._hear(key.data, message, fds)
        else:
            self._copy_output(*key.data)

    def _hear(self, row: int, message: Any, fds: tuple[int, ...]) -> None:
        try:
            match message:
                case Record():
                    self._log(message)
                case Done():
                    member = self._run.members[row]
                    self.moments[member.name] = message.moments
                    if self._folder is not None:
                        self._folder.keep_steps(str(member.device), message.steps)
                    self._decide(row, message)
                case Note(text):
                    self.say(text)
                case Wanted():
                    self._wanted(row, message.digest)
                case Shared():
                    self._keep_shared(message.digest, self._own(os.dup(fds[0])))
                case State(rows=()):
                    self._save(message, fds[0])
                case State():
                    self._state_fd = fds[0]
                    self._decide(row, message)
                    self._state_fd = None
                case _:
                    if isinstance(message, Ready):
                        self._compare_numerics(message)
                    self._decide(row, message)
        finally:
            for fd in fds:
                os.close(fd)

    def _decide(self, row: int, event: Event) -> None:
        self._run, instructions = decide(self._run, row, event)
        if self._run.outcome is not None and not isinstance(self._run.outcome, Returned):
            for present in self._present:
                self._drain(present)
            self.console.mute()
        self._obey(instructions)

    def _obey(self, instructions: tuple[Instruction, ...]) -> None:
        for instruction in instructions:
            match instruction:
                case End(row):
                    self._tell_server(Kill(row))
                case Start(row, seat):
                    self._start(row, seat)
                case Publish(roster, first):
                    self._board.put_head(Head.FIRST, first)
                    self._board.publish(roster)
                case Grant(row, key, size):
                    if key not in self._segments:
                        fd = memory_file(size, "samestep-exchange")
                        self._segments[key] = self._own(fd)
                    self._answer(row, (self._segments[key],))
                case Give(rows):
                    assert self._state_fd is not None
                    for row in rows:
                        self._answer(row, (self._state_fd,))
                case Ask(row):
                    self._answer(row, message=Tell())
                case Dismiss(row):
                    self._answer(row, message=Leave())
                case Say(text):
                    self.say(text)

    def _exited(self, exited: Exited) -> None:
        row = exited.number
        self._present.discard(row)
        with suppress(EOFError):
            for message, fds in self._workers[row].channel.ready():
                self._hear(row, message, fds)
        self._drain(row)
        self.console.end(row)
        kills = out_of_memory_kills()
        lost = Lost(
            exited.status,
            place(self._board, row),
            self._stack_of(row),
            self._newest_step(),
            kills > self._kills and os.WIFSIGNALED(exited.status),
        )
        self._kills = kills
        self._pass_on_sharing(row)
        self._decide(row, lost)

    def _newest_step(self) -> int:
        return max(self._board.get(row, Word.STEP) for row in self._workers)

    # Starting

    def _start(self, row: int, seat: int) -> None:
        mine, theirs = channels()
        self._stack.callback(mine.close)
        (out, out_w), (err, err_w) = os.pipe(), os.pipe()
        crash = memory_file(0, "samestep-crash")
        settings = self._settings
        self._board.words[self._board.place(row, Word.WAITS_FOR)] = -1
        self._board.words[self._board.place(row, Word.LANE)] = -1
        order = Order(
            row=row,
            seat=seat,
            seats=len(settings.devices),
            joins=row >= len(settings.devices),
            device=settings.devices[seat],
            threads=settings.threads,
            exact=settings.exact,
            pins=self._pins[seat],
            environ=dict(os.environ),
            folder=os.getcwd(),
            path=list(sys.path),
            argv=list(sys.argv),
        )
        fds = (theirs.fileno(), out_w, err_w, self._board_fd, self._payload, crash)
        self._tell_server(Fork(row, order), fds)
        theirs.close()
        os.close(out_w)
        os.close(err_w)
        outputs = self._own(out), self._own(err)
        self._workers[row] = _Worker(seat, mine, outputs, self._own(crash))
        self._present.add(row)
        self.console.seats[row] = seat
        self._selector.register(mine, selectors.EVENT_READ, row)
        for stream, fd in enumerate(outputs, start=1):
            os.set_blocking(fd, False)
            self._selector.register(fd, selectors.EVENT_READ, (row, stream, fd))

    def _tell_server(self, message: Fork | Kill, fds: tuple[int, ...] = ()) -> None:
        try:
            self._server.channel.send(message, fds)
        except BrokenPipeError:
            raise self._server.died() from None

    def _own(self, fd: int) -> int:
        """Close it with the launch."""
        self._stack.callback(os.close, fd)
        return fd

    def _compare_numerics(self, ready: Ready) -> None:
        """Say so if a resumed run's devices are not of the class it was begun with."""
        resumed, first = self._settings.resumed, not self._numerics
        self._numerics = str(ready.numerics)
        if first and resumed is not None and resumed.numerics != self._numerics:
            self.say(
                f"resume: the checkpoint was made on {resumed.numerics}; this is {self._numerics}: "
                "results will agree to rounding, not to the last bit"
            )

    # Saving and stopping

    def _save(self, state: State, fd: int) -> None:
        if self._saver is None:
            return
        about = {"step": state.step, "log_lines": state.logged, "numerics": self._numerics}
        self._saver.hold(fd, about, state.due)
        if self._stopped_at is not None and state.due:
            self._stopped_at = 0.0  # what was waited for is here

    @contextmanager
    def _signals_heard(self) -> Iterator[None]:
        """While a run can be saved, SIGINT and SIGTERM stop it at the end of the open step."""
        numbers = (signal.SIGINT, signal.SIGTERM)
        is_main = threading.current_thread() is threading.main_thread()
        if self._saver is None or not is_main:
            yield
            return
        before = {number: signal.getsignal(number) for number in numbers}
        for number in numbers:
            signal.signal(number, lambda number, _: self._signals.append(number))
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    def _is_stopped(self) -> bool:
        """After a signal: whether the state is saved, or the time for it is over."""
        if not self._signals or self._run.outcome is not None:
            return False
        assert self._saver is not None
        now = time.monotonic()
        if self._stopped_at is None:
            name = signal.Signals(self._signals[0]).name
            self.say(f"{name}: stopping after the open step (once more: at once)")
            self._board.put_head(Head.STOP, 1)
            self._stopped_at = now
        if len(self._signals) == 1 and now - self._stopped_at < _GRACE_S and self._stopped_at:
            return False
        if len(self._signals) == 1:
            self._saver.flush()
        saved = self._saver.saved
        self.say(
            f"stopped; the state is in {saved}; resume=True goes on from there"
            if saved is not None
            else "stopped; there was nothing to save yet"
        )
        return True

    # Hangs

    def _show_progress(self) -> None:
        live = [m.row for m in self._run.members if m.counts and m.is_live]
        self.console.oldest = min(live, default=self.console.oldest)
        self.console.refresh()

    def _look_for_hangs(self) -> None:
        now = time.monotonic()
        if self._watch is None or now - self._looked < _LOOK_S or self._run.outcome is not None:
            return
        self._looked = now
        members = self._run.members
        seen = {
            row: self._seen(row)
            for row in self._present
            if members[row].stage is not Stage.DONE and not members[row].condemned
        }
        self._watch, hung = look(self._watch, seen, now)
        for row, seconds in hung.items():
            self._decide(row, Stuck(self._describe_hang(row, seconds, seen)))

    def _seen(self, row: int) -> Seen:
        get = self._board.get
        return Seen(
            Phase(get(row, Word.PHASE)),
            get(row, Word.ACTIONS),
            get(row, Word.LANE_US) / 1e6,
            get(row, Word.WAITS_FOR),
            bool(get(row, Word.FRESH)),
            self._is_process_stopped(row),
        )

    def _is_process_stopped(self, row: int) -> bool:
        try:
            stat = Path(f"/proc/{self._workers[row].pid}/stat").read_text()
        except OSError:
            return False
        return stat.rpartition(")")[2].split()[0] in "Tt"

    def _describe_hang(self, row: int, seconds: float, seen: dict[int, Seen]) -> str:
        """What hangs, who waits for it, and its Python stack, which it is made to write."""
        member, crash = self._run.members[row], self._workers[row].crash
        before, until = os.fstat(crash).st_size, time.monotonic() + _STACK_S
        for number in (STACK_SIGNAL, signal.SIGCONT):  # a stopped process writes once it goes on
            self._tell_server(Kill(row, number))
        # A stopped process goes on once it has written; what it does until its end is harmless.
        while os.fstat(crash).st_size == before and time.monotonic() < until:
            time.sleep(0.0002)
        waiting = [self._run.members[other].name for other, s in seen.items() if s.waits_for == row]
        why = " (it was stopped by a signal)" if seen[row].is_stopped else ""
        waits = f"; {', '.join(waiting)} wait for it" if waiting else ""
        stack = self._stack_of(row) or "its Python stack could not be had"
        return (
            f"{member.name} has not moved for {seconds:.1f} s at {place(self._board, row)}{why}"
            f"{waits}; it is ended\n{stack}"
        )

    # Output

    def _log(self, record: Record) -> None:
        """Every worker sends what it logs, so that none is lost with one; the first one counts."""
        key = record.step, record.names, record.number
        if key in self._logged:
            return
        self._logged.add(key)
        self.console.say(record.text)
        if self._folder is not None:
            try:
                self._folder.log(record.values)
            except OSError as error:
                self.say(f"{self._folder.path}/log.jsonl could not be written: {error}")

    def _copy_output(self, row: int, stream: int, fd: int) -> bool:
        """Copy what is there; False when there is no more for now."""
        try:
            data = os.read(fd, _READ)
        except BlockingIOError:
            return False
        if data:
            self.console.feed(row, stream, data)
            return True
        with suppress(KeyError):
            self._selector.unregister(fd)
        return False

    def _drain(self, row: int) -> None:
        for stream, fd in enumerate(self._workers[row].outputs, start=1):
            while self._copy_output(row, stream, fd):
                pass

    def _stack_of(self, row: int) -> str:
        """The Python stack that faulthandler left, for a worker that crashed or hung."""
        fd = self._workers[row].crash
        text = os.pread(fd, os.fstat(fd).st_size, 0).decode(errors="replace")
        # A crash shows all threads, this one as the current; when asked for, it is this one only.
        start = max(text.rfind("Current thread"), text.rfind("Stack (most recent"), 0)
        lines = text[start:].partition("\n\n")[0].partition("\nThread ")[0].splitlines()[1:]
        # Below the user's `main` there are only the frames that called it.
        frames = [line for line in lines if line.startswith("  File")]
        user = [line for line in frames if _OWN not in line and '"<string>"' not in line]
        return "\n".join(["its Python stack, most recent call first:", *user]) if user else ""

    # Datasets held once

    def _wanted(self, row: int, digest: str) -> None:
        if digest not in self._shared:
            self._shared[digest], self._sharer[digest] = None, row
            self._answer(row)
        elif (fd := self._shared[digest]) is not None:
            self._answer(row, (fd,))
        else:
            self._waiting.setdefault(digest, []).append(row)

    def _keep_shared(self, digest: str, fd: int) -> None:
        self._shared[digest] = fd
        for row in self._waiting.pop(digest, []):
            self._answer(row, (fd,))

    def _pass_on_sharing(self, lost: int) -> None:
        """What a lost worker was to share, another one shares."""
        for digest, row in self._sharer.items():
            if row == lost and self._shared[digest] is None:
                del self._shared[digest], self._sharer[digest]
                for waiting in self._waiting.pop(digest, []):
                    self._wanted(waiting, digest)
                return self._pass_on_sharing(lost)
        return None

    def _answer(self, row: int, fds: tuple[int, ...] = (), message: Any = None) -> None:
        with suppress(BrokenPipeError):
            self._workers[row].channel.send(message, fds)
