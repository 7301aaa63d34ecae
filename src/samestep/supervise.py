"""What the launcher decides: a pure function from (run, event) to (run, instructions).

It starts no process and reads no clock; `launch` carries the instructions out.

    starting ──Ready──▶ running ──Done──▶ done ──Exited──▶ gone
        └──────────────────┴─ Failed, Exited ─▶ the run has an outcome; everyone is ended
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from enum import Enum

from samestep.devices import Device, NumericsClass, compare
from samestep.errors import DeviceDiffers, SamestepError, TeamError, WorkerDied
from samestep.failure import Failure
from samestep.messages import Claim, Done, Failed, Ready
from samestep.processes import describe_exit


class State(Enum):
    STARTING = "starting"
    RUNNING = "running"
    DONE = "done"
    GONE = "gone"


_UNFINISHED = (State.STARTING, State.RUNNING)


@dataclass(frozen=True, slots=True)
class Member:
    """One worker as the launcher knows it."""

    number: int
    device: Device
    state: State = State.STARTING
    numerics: NumericsClass | None = None
    fingerprints: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Returned:
    """The run is over and well: the pickled result, and a fingerprint for each trainer."""

    result: bytes | None
    fingerprints: tuple[str, ...]


Outcome = Returned | Failure | SamestepError


@dataclass(frozen=True, slots=True)
class Run:
    """The launcher's whole knowledge of a run."""

    members: tuple[Member, ...]
    exact: bool
    claims: dict[str, tuple[int, str]] = field(default_factory=dict)
    result: bytes | None = None
    outcome: Outcome | None = None

    @property
    def is_over(self) -> bool:
        """Nobody is left."""
        return all(member.state is State.GONE for member in self.members)


@dataclass(frozen=True, slots=True)
class End:
    """Instruction: end this worker now."""

    number: int


@dataclass(frozen=True, slots=True)
class Grant:
    """Instruction: give this worker the shared memory that goes by `key`."""

    number: int
    key: str
    size: int


@dataclass(frozen=True, slots=True)
class Lost:
    """An exit with what only the launcher can see: where the worker was, what it left behind."""

    status: int
    place: str
    report: str


Event = Ready | Claim | Done | Failed | Lost
Instruction = End | Grant


def begin(devices: tuple[Device, ...], exact: bool) -> Run:
    return Run(tuple(Member(number, device) for number, device in enumerate(devices)), exact)


def decide(run: Run, number: int, event: Event) -> tuple[Run, tuple[Instruction, ...]]:
    """What an event from worker `number` means."""
    match event:
        case Ready():
            return _ready(run, number, event)
        case Claim():
            return _claim(run, number, event)
        case Done():
            return _done(run, number, event)
        case Failed():
            return _stop(run, event.failure)
        case Lost():
            return _lost(run, number, event)


def _ready(run: Run, number: int, event: Ready) -> tuple[Run, tuple[Instruction, ...]]:
    run = _change(run, number, state=State.RUNNING, numerics=event.numerics)
    known = [member for member in run.members if member.numerics is not None]
    if run.exact and len(known) == len(run.members):
        error = compare(
            [f"{member.device} (worker {member.number})" for member in known],
            [member.numerics for member in known if member.numerics is not None],
        )
        if error is not None:
            return _stop(run, error)
    return run, ()


def _claim(run: Run, number: int, event: Claim) -> tuple[Run, tuple[Instruction, ...]]:
    first, about = run.claims.get(event.key, (number, event.about))
    if about != event.about:
        return _stop(run, unlike(first, number, about, event.about))
    run = replace(run, claims={**run.claims, event.key: (first, about)})
    return run, (Grant(number, event.key, event.size),)


def unlike(first: int, second: int, one: str, other: str) -> TeamError:
    """Two workers have not built the same thing."""
    same_layout = one.split()[0] == other.split()[0]
    what = "the values of their weights" if same_layout else "parameters or buffers"
    return TeamError(
        f"workers {first} and {second} built different models: they differ in {what}; `main` must "
        "do the same on every worker (random numbers from Python's, NumPy's and torch's global "
        "generators are alike there; the time, the process id or /dev/urandom are not)"
    )


def _done(run: Run, number: int, event: Done) -> tuple[Run, tuple[Instruction, ...]]:
    run = _change(run, number, state=State.DONE, fingerprints=event.fingerprints)
    if event.result is not None:
        run = replace(run, result=event.result)
    # Those who were done first may be gone by now.
    if run.outcome is not None or any(m.state in _UNFINISHED for m in run.members):
        return run, ()
    error = odd_one_out([m.fingerprints for m in run.members], [str(m.device) for m in run.members])
    if run.exact and error is not None:
        return _stop(run, error)
    return replace(run, outcome=Returned(run.result, run.members[0].fingerprints)), ()


def odd_one_out(fingerprints: list[tuple[str, ...]], devices: list[str]) -> DeviceDiffers | None:
    """The error for workers whose weights are not the same at the end."""
    if len(set(fingerprints)) <= 1:
        return None
    rows = "; ".join(
        f"worker {i} ({device}): {', '.join(f[:16] for f in mine) or 'no trainer'}"
        for i, (mine, device) in enumerate(zip(fingerprints, devices, strict=True))
    )
    return DeviceDiffers(
        f"the workers ended with different weights ({rows}): a device computes wrongly, or `main` "
        "changes weights on some workers only"
    )


def _lost(run: Run, number: int, event: Lost) -> tuple[Run, tuple[Instruction, ...]]:
    device, was = run.members[number].device, run.members[number].state
    run = _change(run, number, state=State.GONE)
    if run.outcome is not None or was is State.DONE:
        # Workers leave one by one at the end; a late non-zero status changes no result.
        return run, ()
    error = WorkerDied(f"worker {number} ({device}) {describe_exit(event.status)} at {event.place}")
    if event.report:
        error.add_note(event.report)
    return _stop(run, error)


def _stop(run: Run, outcome: Outcome) -> tuple[Run, tuple[Instruction, ...]]:
    """The first outcome counts; everyone who is still there is ended."""
    if run.outcome is None:
        run = replace(run, outcome=outcome)
    left = [member for member in run.members if member.state is not State.GONE]
    return run, tuple(End(member.number) for member in left)


def _change(run: Run, number: int, **changes: object) -> Run:
    members = list(run.members)
    members[number] = replace(members[number], **changes)  # type: ignore[arg-type]
    return replace(run, members=tuple(members))
