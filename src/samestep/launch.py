"""`launch`: start a worker for each device, carry out what `supervise` decides, return the result.

launcher ──starts──▶ fork server (torch imported once) ──forks──▶ worker 0 … n-1
   ▲   a channel and two output pipes for each worker; one board of shared memory for all
"""

from __future__ import annotations

import inspect
import os
import pickle
import selectors
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from typing import Any

from samestep import forkserver, torchrun
from samestep.board import Board
from samestep.console import Console
from samestep.devices import Machine, inventory, parse, pinning
from samestep.errors import UsageError
from samestep.failure import Failure
from samestep.forkserver import Exited, Fork, ForkServer, Kill
from samestep.messages import Claim, Done, Failed, Order, Ready, Record, Shared, Wanted
from samestep.payload import pack
from samestep.processes import Channel, channels, memory_file
from samestep.runs import RunFolder
from samestep.supervise import End, Instruction, Lost, Outcome, Returned, begin, decide
from samestep.team import Plan, Settings
from samestep.worker import place

__all__ = ["launch", "overridden"]

_OWN = os.path.dirname(__file__)
_TICK_S = 0.1
_LEAVE_S = 30.0  # how long workers may take to leave after `main` has returned on all of them
_READ = 1 << 16


@dataclass(frozen=True)
class Overrides:
    """Settings from outside (`samestep run`, `samestep prove`) that go before the script's."""

    devices: str | int | None = None
    lanes: int | None = None
    seed: int | None = None
    plan: Plan | None = None
    stop_at: int | None = None
    ended: Callable[[Returned], None] | None = None


_overrides = Overrides()


@contextmanager
def overridden(overrides: Overrides) -> Iterator[None]:
    """Let `overrides` hold for every launch inside."""
    global _overrides
    before, _overrides = _overrides, overrides
    try:
        yield
    finally:
        _overrides = before


def launch(
    main: Callable[..., Any],
    *,
    devices: str | int | Sequence[str] = "all",
    lanes: int = 8,
    seed: int = 0,
    exact: bool = True,
    run: str | os.PathLike[str] | None = None,
    resume: bool = False,
    args: tuple[Any, ...] = (),
    kwargs: Mapping[str, Any] | None = None,
    threads: int = 1,
    plan: Plan | None = None,
) -> Any:
    """Run `main(team, *args, **kwargs)` on every device; returns what the first worker returned.

    - `devices`: "all" (every GPU, or else every physical core), a number, or terms joined by
      commas: `cuda:1`, `cpu`, `3xcpu`, `2xcuda`; `cpu@0.25` is a worker slowed to a quarter.
    - `lanes`: into how many parts each global batch is cut. With `seed` it decides the result;
      the devices do not.
    - `exact=False` lets a worker run its lanes as one, and devices of different kinds work
      together; results then agree to rounding only.
    - `run`: a folder for the run's settings, log and result.
    - `threads`: of every CPU worker alike; it belongs to the arithmetic, like the dtype.
    - `plan(lanes, step)`: the number of lanes of each worker, instead of samestep's own plan.

    Under `torchrun` this process joins the others that were started with it.
    """
    over, kwargs = _overrides, dict(kwargs or {})
    devices = devices if over.devices is None else over.devices
    lanes = lanes if over.lanes is None else over.lanes
    seed = seed if over.seed is None else over.seed
    _check(main, args, kwargs, lanes, seed, threads, resume)
    if torchrun.is_joined():
        return torchrun.join(main, devices, lanes, seed, exact, threads, plan, args, kwargs)
    machine = inventory()
    found, notices = parse(devices, machine, lanes)
    settings = Settings(
        found, lanes, seed, exact, threads, over.plan or plan, over.stop_at, machine.cores
    )
    outcome: Outcome
    with forkserver.server() as server:
        folder = _folder(run, settings) if run is not None else None
        payload = pack((main, args, kwargs, settings))
        with _Launch(server, settings, machine, payload, folder) as running:
            for notice in notices:
                running.console.say(f"samestep: {notice}", sys.stderr)
            outcome = running.until_over()
    if isinstance(outcome, Returned):
        result = pickle.loads(outcome.result) if outcome.result is not None else None
        if folder is not None:
            folder.finish("finished", fingerprints=outcome.fingerprints, result=_json(result))
        if over.ended is not None:
            over.ended(outcome)
        return result
    error = outcome.rebuild() if isinstance(outcome, Failure) else outcome
    if folder is not None:
        folder.finish("failed", error=f"{type(error).__name__}: {error}")
    # Not `from` anything: the traceback that is printed is the user's own.
    raise error


def _check(
    main: Any, args: Any, kwargs: dict[str, Any], lanes: Any, seed: Any, threads: Any, resume: bool
) -> None:
    if not callable(main):
        raise UsageError(f"main: must be a function main(team), got {main!r}")
    try:
        signature: inspect.Signature | None = inspect.signature(main)
    except ValueError:  # a builtin without one
        signature = None
    try:
        if signature is not None:
            signature.bind(None, *args, **kwargs)
    except TypeError as error:
        name = getattr(main, "__name__", repr(main))
        raise UsageError(
            f"main: {name}{signature} cannot be called as {name}(team, *args, **kwargs) with "
            f"args={args!r}, kwargs={kwargs!r}: {error}"
        ) from None
    for name, value, least in (("lanes", lanes, 1), ("seed", seed, 0), ("threads", threads, 1)):
        if isinstance(value, bool) or not isinstance(value, int) or value < least:
            raise UsageError(f"{name}={value!r}: must be a whole number of at least {least}")
    if resume:
        raise UsageError("resume=True: checkpoints are not built yet; leave it at False")


def _folder(run: str | os.PathLike[str], settings: Settings) -> RunFolder:
    folder = RunFolder(
        run,
        {
            "devices": [str(device) for device in settings.devices],
            "lanes": settings.lanes,
            "seed": settings.seed,
            "exact": settings.exact,
            "threads": settings.threads,
        },
    )
    if folder.kept_as is not None:
        print(f"samestep: {folder.path} held an earlier run, kept as {folder.kept_as}")
    return folder


def _json(result: Any) -> Any:
    """The result where JSON can hold it, else what it looks like."""
    return (
        result
        if isinstance(result, (int, float, str, bool, list, dict, type(None)))
        else repr(result)
    )


class _Launch:
    """The processes and descriptors of one launch; all are gone when the `with` block ends."""

    def __init__(
        self,
        server: ForkServer,
        settings: Settings,
        machine: Machine,
        payload: int,
        folder: RunFolder | None,
    ) -> None:
        self._server, self._settings, self._machine = server, settings, machine
        self._payload, self._folder = payload, folder
        self._run = begin(settings.devices, settings.exact)
        size = len(settings.devices)
        self._stack = ExitStack()
        self._board_fd = self._own(memory_file(4096 * (1 + size // 16), "samestep-board"))
        self._own(payload)
        self._board = Board(size, fd=self._board_fd)
        self._stack.callback(self._board.close)
        self.console = Console(self._board)
        self._stack.callback(self.console.close)
        self._selector = self._stack.enter_context(selectors.DefaultSelector())
        self._channels: dict[int, Channel] = {}
        self._crashes: dict[int, int] = {}
        self._outputs: dict[int, tuple[int, int]] = {}
        self._segments: dict[str, int] = {}
        self._shared: dict[str, int | None] = {}
        self._waiting: dict[str, list[int]] = {}
        self._present: set[int] = set()

    def __enter__(self) -> _Launch:
        try:
            self._selector.register(self._server.channel, selectors.EVENT_READ, None)
            for number in range(len(self._settings.devices)):
                self._start(number)
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        """End whoever is left, and wait until the kernel says so."""
        with suppress(OSError, EOFError):
            for number in self._present:
                self._server.channel.send(Kill(number))
            while self._present:
                message, _ = self._server.channel.receive()
                self._present.discard(message.number)
        self._stack.close()

    def until_over(self) -> Outcome:
        """Serve the workers until none is left."""
        deadline = None
        while not self._run.is_over:
            for key, _ in self._selector.select(_TICK_S):
                self._serve(key)
            self.console.refresh()
            if isinstance(self._run.outcome, Returned):
                deadline = deadline or time.monotonic() + _LEAVE_S
                if time.monotonic() > deadline:
                    self._obey(tuple(End(number) for number in self._present))
        assert self._run.outcome is not None
        return self._run.outcome

    def _serve(self, key: selectors.SelectorKey) -> None:
        """Something has arrived: from the fork server, a worker's channel, or its output."""
        if key.fileobj is self._server.channel:
            try:
                exits = self._server.channel.ready()
            except EOFError:
                raise self._server.died() from None
            for message, _ in exits:
                self._exited(message)
        elif isinstance(key.fileobj, Channel):
            with suppress(EOFError, BrokenPipeError):
                for message, fds in key.fileobj.ready():
                    self._hear(key.data, message, fds)
                return
            self._selector.unregister(key.fileobj)  # its exit will be heard from the server
        else:
            self._copy_output(*key.data)

    def _hear(self, number: int, message: Any, fds: tuple[int, ...]) -> None:
        match message:
            case Record():
                if self._folder is not None:
                    self._folder.log(message.values)
            case Wanted():
                self._wanted(number, message.digest)
            case Shared():
                self._keep_shared(message.digest, self._own(fds[0]))
            case Ready() | Claim() | Done() | Failed():
                self._decide(number, message)

    def _decide(self, number: int, event: Ready | Claim | Done | Failed | Lost) -> None:
        self._run, instructions = decide(self._run, number, event)
        if self._run.outcome is not None and not isinstance(self._run.outcome, Returned):
            for worker in self._present:
                self._drain(worker)
            self.console.mute()
        self._obey(instructions)

    def _obey(self, instructions: tuple[Instruction, ...]) -> None:
        for instruction in instructions:
            if isinstance(instruction, End):
                self._server.channel.send(Kill(instruction.number))
                continue
            if instruction.key not in self._segments:
                fd = memory_file(instruction.size, "samestep-exchange")
                self._segments[instruction.key] = self._own(fd)
            self._answer(instruction.number, self._segments[instruction.key])

    def _exited(self, exited: Exited) -> None:
        number = exited.number
        self._present.discard(number)
        with suppress(EOFError, BrokenPipeError):
            for message, fds in self._channels[number].ready():
                self._hear(number, message, fds)
        self._drain(number)
        self.console.end(number)
        lost = Lost(exited.status, place(self._board, number), self._crash_report(number))
        self._decide(number, lost)

    # Starting

    def _start(self, number: int) -> None:
        mine, theirs = channels()
        self._stack.callback(mine.close)
        (out, out_w), (err, err_w) = os.pipe(), os.pipe()
        crash = memory_file(0, "samestep-crash")
        settings, device = self._settings, self._settings.devices[number]
        order = Order(
            number=number,
            size=len(settings.devices),
            device=device,
            threads=settings.threads,
            exact=settings.exact,
            pins=pinning(settings.devices, self._machine, settings.threads)[number],
            environ=dict(os.environ),
            folder=os.getcwd(),
            path=list(sys.path),
            argv=list(sys.argv),
        )
        fds = (theirs.fileno(), out_w, err_w, self._board_fd, self._payload, crash)
        try:
            self._server.channel.send(Fork(number, order), fds)
        except BrokenPipeError:
            raise self._server.died() from None
        self._present.add(number)
        theirs.close()
        os.close(out_w)
        os.close(err_w)
        self._channels[number] = mine
        self._outputs[number] = self._own(out), self._own(err)
        self._crashes[number] = self._own(crash)
        self._selector.register(mine, selectors.EVENT_READ, number)
        for stream, fd in enumerate(self._outputs[number], start=1):
            os.set_blocking(fd, False)
            self._selector.register(fd, selectors.EVENT_READ, (number, stream, fd))

    def _own(self, fd: int) -> int:
        """Close it with the launch."""
        self._stack.callback(os.close, fd)
        return fd

    # Output

    def _copy_output(self, number: int, stream: int, fd: int) -> bool:
        """Copy what is there; False when there is no more for now."""
        try:
            data = os.read(fd, _READ)
        except BlockingIOError:
            return False
        if data:
            self.console.feed(number, stream, data)
            return True
        with suppress(KeyError):
            self._selector.unregister(fd)
        return False

    def _drain(self, number: int) -> None:
        for stream, fd in enumerate(self._outputs[number], start=1):
            while self._copy_output(number, stream, fd):
                pass

    def _crash_report(self, number: int) -> str:
        """The Python stack that faulthandler left, for a worker that crashed."""
        fd = self._crashes[number]
        text = os.pread(fd, os.fstat(fd).st_size, 0).decode(errors="replace")
        _, _, stack = text.partition("Current thread")
        lines = stack.partition("\n\n")[0].splitlines()[1:]
        # Below the user's `main` there are only the frames that called it.
        user = [line for line in lines if _OWN not in line and '"<string>"' not in line]
        return "\n".join(["its Python stack, most recent call first:", *user]) if user else ""

    # Datasets held once

    def _wanted(self, number: int, digest: str) -> None:
        if digest not in self._shared:
            self._shared[digest] = None
            self._channels[number].send(None)
        elif (fd := self._shared[digest]) is not None:
            self._answer(number, fd)
        else:
            self._waiting.setdefault(digest, []).append(number)

    def _keep_shared(self, digest: str, fd: int) -> None:
        self._shared[digest] = fd
        for number in self._waiting.pop(digest, []):
            self._answer(number, fd)

    def _answer(self, number: int, fd: int) -> None:
        with suppress(BrokenPipeError):
            self._channels[number].send(None, (fd,))
