"""What the launcher decides: a pure function from (run, event) to (run, instructions).

It starts no process and reads no clock; `launch` carries the instructions out.

    starting ──Ready──▶ running ──Done──▶ done ──Exited──▶ gone
        │                  │ lost: the others go on in a new generation, a replacement is started
        └─── Failed ───────┴──▶ the run has an outcome; everyone is ended

A worker has a row, its own for ever, and a seat: the place in `devices` that its replacement takes
over. A replacement runs `main` from its start until it needs the state of the run (CatchUp); then
it joins the team, and a member hands it the state at its next boundary between two batches.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from enum import Enum

from samestep.board import ROWS, Roster
from samestep.devices import Device, NumericsClass, compare
from samestep.errors import (
    DeviceDiffers,
    OutOfMemory,
    SamestepError,
    TeamError,
    WorkerDied,
)
from samestep.failure import Failure
from samestep.messages import CatchUp, Claim, Differs, Done, Failed, NoRoom, Ready, Result, State
from samestep.processes import describe_exit


class Stage(Enum):
    STARTING = "starting"
    RUNNING = "running"
    DONE = "done"
    GONE = "gone"


@dataclass(frozen=True, slots=True)
class Member:
    """One worker as the launcher knows it. `joined`: the team counts on it, `since` a generation;
    `is_live`: it has the state of the run."""

    row: int
    seat: int
    device: Device
    stage: Stage = Stage.STARTING
    joined: bool = True
    is_live: bool = True
    numerics: NumericsClass | None = None
    fingerprints: tuple[str, ...] = ()
    condemned: str = ""
    since: int = 1

    @property
    def name(self) -> str:
        return f"worker {self.seat} ({self.device})"

    @property
    def counts(self) -> bool:
        """Whether it is in the team and still there."""
        return self.joined and self.stage is not Stage.GONE


@dataclass(frozen=True, slots=True)
class Returned:
    """The run is over and well: the pickled result, and a fingerprint for each trainer."""

    result: bytes | None
    fingerprints: tuple[str, ...]


Outcome = Returned | Failure | SamestepError


@dataclass(frozen=True, slots=True)
class Policy:
    """What a user decides about losses."""

    exact: bool = True
    replace: bool = True
    max_losses: int = 8


@dataclass(frozen=True, slots=True)
class Run:
    """The launcher's whole knowledge of a run. `losses` are those since the last committed step;
    `failed` counts, for each seat, replacements in a row that were lost before they were live."""

    members: tuple[Member, ...]
    policy: Policy
    generation: int = 1
    rooms: dict[int, int] = field(default_factory=dict)
    claims: dict[str, tuple[int, str]] = field(default_factory=dict)
    losses: tuple[str, ...] = ()
    losses_step: int = -1
    failed: dict[int, int] = field(default_factory=dict)
    first: int = 0
    asked: int | None = None
    outcome: Outcome | None = None

    @property
    def is_over(self) -> bool:
        """Nobody is left."""
        return all(member.stage is Stage.GONE for member in self.members)

    @property
    def roster(self) -> Roster:
        """The team of the present generation."""
        team = sorted((m for m in self.members if m.counts), key=lambda m: m.seat)
        return Roster(
            self.generation,
            tuple(m.row for m in team),
            tuple(m.seat for m in team),
            tuple(self.rooms.get(m.row, 0) for m in team),
            tuple(m.since for m in team),
        )


@dataclass(frozen=True, slots=True)
class Start:
    """Instruction: start a worker."""

    row: int
    seat: int


@dataclass(frozen=True, slots=True)
class End:
    """Instruction: end this worker now."""

    row: int


@dataclass(frozen=True, slots=True)
class Grant:
    """Instruction: give this worker the shared memory that goes by `key`."""

    row: int
    key: str
    size: int


@dataclass(frozen=True, slots=True)
class Publish:
    """Instruction: show all workers the new team, and whose worker is the first."""

    roster: Roster
    first: int


@dataclass(frozen=True, slots=True)
class Give:
    """Instruction: hand the state that has come to those that join."""

    rows: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Ask:
    """Instruction: have this worker send what `main` returned."""

    row: int


@dataclass(frozen=True, slots=True)
class Dismiss:
    """Instruction: tell this worker that it is over."""

    row: int


@dataclass(frozen=True, slots=True)
class Say:
    """Instruction: tell the user."""

    text: str


@dataclass(frozen=True, slots=True)
class Lost:
    """An exit with what only the launcher can see: where the worker was, what it left behind, and
    the newest step that anyone has committed."""

    status: int
    place: str
    report: str
    step: int = 0
    out_of_memory: bool = False


@dataclass(frozen=True, slots=True)
class Stuck:
    """A worker has not moved for too long; `text` says so."""

    text: str


Event = Ready | Claim | CatchUp | State | NoRoom | Differs | Done | Result | Failed | Lost | Stuck
Instruction = Start | End | Grant | Publish | Give | Ask | Dismiss | Say
Decided = tuple[Run, tuple[Instruction, ...]]


def begin(devices: tuple[Device, ...], policy: Policy) -> Run:
    return Run(tuple(Member(seat, seat, device) for seat, device in enumerate(devices)), policy)


def decide(run: Run, row: int, event: Event) -> Decided:
    """What an event from the worker of `row` means."""
    match event:
        case Lost():
            return _lost(run, row, event)
        case _ if run.outcome is not None:
            return run, ()
        case Ready():
            return _ready(run, row, event)
        case Claim():
            return _claim(run, row, event)
        case CatchUp():
            joined = _change(run, row, joined=True, is_live=False, since=run.generation + 1)
            return _renew(joined)
        case State():
            return _state(run, event)
        case NoRoom():
            return _no_room(run, row, event)
        case Differs():
            return _differs(run, event)
        case Stuck():
            return _change(run, row, condemned="hung"), (Say(event.text), End(row))
        case Done():
            return _done(_change(run, row, stage=Stage.DONE, fingerprints=event.fingerprints))
        case Result():
            returned = Returned(event.pickled, run.members[row].fingerprints)
            return _dismiss(replace(run, outcome=returned))
        case Failed():
            return _stop(run, event.failure)


# Starting


def _ready(run: Run, row: int, event: Ready) -> Decided:
    run = _change(run, row, stage=Stage.RUNNING, numerics=event.numerics)
    known = [member for member in run.members if member.numerics is not None]
    if run.policy.exact and all(m.numerics or m.stage is Stage.GONE for m in run.members):
        error = compare(
            [f"{member.device} (worker {member.seat})" for member in known],
            [member.numerics for member in known if member.numerics is not None],
        )
        if error is not None:
            return _stop(run, error)
    return run, ()


def _claim(run: Run, row: int, event: Claim) -> Decided:
    first, about = run.claims.get(event.key, (row, event.about))
    if not _alike(about, event.about):
        seats = run.members[first].seat, run.members[row].seat
        return _stop(run, unlike(*seats, about, event.about))
    run = replace(run, claims={**run.claims, event.key: (first, about)})
    return run, (Grant(row, event.key, event.size),)


def _alike(one: str, other: str) -> bool:
    """Layouts are equal, and so are weights where both are given."""
    (layout, _, weights), (layout_2, _, weights_2) = one.partition(" "), other.partition(" ")
    return layout == layout_2 and (weights == weights_2 or not weights or not weights_2)


def unlike(first: int, second: int, one: str, other: str) -> TeamError:
    """Two workers have not built the same thing."""
    same_layout = one.split()[0] == other.split()[0]
    what = "the values of their weights" if same_layout else "parameters or buffers"
    return TeamError(
        f"workers {first} and {second} built different models: they differ in {what}; `main` must "
        "do the same on every worker (random numbers from Python's, NumPy's and torch's global "
        "generators are alike there; the time, the process id or /dev/urandom are not)"
    )


# Losing and joining


def _lost(run: Run, row: int, event: Lost) -> Decided:
    member = run.members[row]
    run = _change(run, row, stage=Stage.GONE)
    if run.outcome is not None:
        # Workers leave one by one at the end; a late non-zero status changes no result.
        return run, ()
    if member.stage is Stage.DONE:
        return _done(replace(run, asked=None) if run.asked == row else run)
    how = member.condemned or describe_exit(event.status, event.out_of_memory)
    if member.condemned:
        how = f"was ended because it {member.condemned}"
    loss = f"{member.name} {how} at {event.place}"
    if event.report:
        loss += "\n" + event.report
    if event.step > run.losses_step:
        run = replace(run, losses=(), losses_step=event.step)
    run = replace(run, losses=(*run.losses, loss))
    left = [m for m in run.members if m.counts and m.is_live]
    if not left:
        return _stop(run, _too_many(run, "no worker is left"))
    if len(run.losses) > run.policy.max_losses:
        limit = f"more than max_losses={run.policy.max_losses} were lost without a step in between"
        return _stop(run, _too_many(run, limit))
    if all(m.stage is Stage.DONE for m in left):
        return _done(run)
    first = run.first
    run, instructions = _replace(run, member, loss)
    if not member.joined and run.first == first:
        return run, instructions
    # What a joining worker waits for may have been lost with the one that was to send it.
    waiting = [m for m in run.members if m.counts and not m.is_live]
    was_oldest = member.is_live and (member.since, row) < min((m.since, m.row) for m in left)
    ended = tuple(End(m.row) for m in waiting) if was_oldest else ()
    run, published = _renew(run)
    return run, (*published, *ended, *instructions)


def _replace(run: Run, member: Member, loss: str) -> Decided:
    """Start a replacement, if there is to be one."""
    seat = member.seat
    tries = 0 if member.joined and member.is_live else run.failed.get(seat, 0) + 1
    run = replace(run, failed={**run.failed, seat: tries})
    going_on = "the others go on with its lanes"
    if run.policy.replace and tries <= _TRIES and len(run.members) < ROWS:
        row = len(run.members)
        new = Member(row, seat, member.device, joined=False, is_live=False)
        run = replace(run, members=(*run.members, new))
        return run, (Say(f"{loss}; {going_on}, a replacement is starting"), Start(row, seat))
    if run.policy.replace:
        going_on += f"; {tries - 1} replacements were lost too, so there will be no other"
    if seat == run.first:
        run = replace(run, first=min((m.seat for m in run.members if m.counts), default=seat))
    return run, (Say(f"{loss}; {going_on}"),)


_TRIES = 3  # replacements in a row that may be lost before they are live


def _too_many(run: Run, why: str) -> WorkerDied:
    rows = "\n".join("  " + loss.replace("\n", "\n  ") for loss in run.losses)
    if len(run.losses) == 1:
        rows = run.losses[0]
        return WorkerDied(f"{rows}\n{why}")
    return WorkerDied(f"{why}; lost since the last step:\n{rows}")


def _state(run: Run, event: State) -> Decided:
    """A member has handed over the state for workers that join."""
    says = []
    for row in event.rows:
        member = run.members[row]
        if member.counts:
            run = _change(run, row, is_live=True)
            run = replace(run, failed={**run.failed, member.seat: 0})
            says.append(Say(f"{member.name} is back, at step {event.step}"))
    return run, (Give(event.rows), *says)


def _renew(run: Run) -> Decided:
    """A new generation with whoever counts now."""
    run = replace(run, generation=run.generation + 1)
    return run, (Publish(run.roster, run.first),)


def _no_room(run: Run, row: int, event: NoRoom) -> Decided:
    """A lane did not fit into a worker's memory: others run such lanes, if they can."""
    known = run.rooms.get(row, event.size)
    run = replace(run, rooms={**run.rooms, row: min(known, event.size)})
    able = [
        m
        for m in run.members
        if m.counts and m.is_live and not 0 < run.rooms.get(m.row, 0) <= event.size
    ]
    if not able:
        fits = [size for size in range(1, event.size) if size <= event.size // 2] or [1]
        lanes = -(-event.size * event.lanes // fits[-1])
        return _stop(
            run,
            OutOfMemory(
                f"no device has the memory for a lane of {event.size} samples; lanes={lanes} would "
                f"make lanes of {fits[-1]} (the number of lanes is part of the result), or lower "
                "batch_size"
                if event.size > 1
                else "no device has the memory for a lane of one sample: the model does not fit"
            ),
        )
    run, published = _renew(run)
    names = ", ".join(m.name for m in able)
    said = Say(
        f"{run.members[row].name} has no memory for a lane of {event.size} samples; such lanes go "
        f"to {names}"
    )
    return run, (*published, said)


_WHY = (
    "a device or its memory is broken (leave one out and resume), or `main` does not do the same "
    "on every worker: it changes weights on some only, or counts something by itself in a loop of "
    "batches, which a replacement does not see (count with team.position.step, or give what counts "
    "to team.keep)"
)


def _differs(run: Run, event: Differs) -> Decided:
    """Weights that should be alike are not."""
    rows = "; ".join(f"{run.members[row].name}: {digest:016x}" for row, digest in event.digests)
    if not event.odd:
        return _stop(
            run,
            DeviceDiffers(
                f"step {event.step}: the workers' weights differ ({rows}), and there is no "
                f"majority to say whose are right: {_WHY}"
            ),
        )
    instructions: list[Instruction] = []
    for row in event.odd:
        if not run.members[row].condemned:
            reason = f"had other weights than the others at step {event.step} ({rows})"
            run = _change(run, row, condemned=reason)
            instructions.append(End(row))
    return run, tuple(instructions)


# Ending


def _done(run: Run) -> Decided:
    """Somebody is done, or somebody who was done is gone: is it over?"""
    live = [m for m in run.members if m.counts and m.is_live]
    if any(m.stage is not Stage.DONE for m in live) or run.asked is not None:
        return run, ()
    if not live:
        return _stop(run, _too_many(run, "no worker is left"))
    if run.policy.exact:
        error = odd_one_out([m.fingerprints for m in live], [m.name for m in live])
        if error is not None:
            return _stop(run, error)
    return replace(run, asked=live[0].row), (Ask(live[0].row),)


def _dismiss(run: Run) -> Decided:
    """It is over: those who are done leave by themselves, replacements under way are ended."""
    left = [m for m in run.members if m.stage is not Stage.GONE]
    return run, tuple(Dismiss(m.row) if m.stage is Stage.DONE else End(m.row) for m in left)


def odd_one_out(fingerprints: list[tuple[str, ...]], names: list[str]) -> DeviceDiffers | None:
    """The error for workers whose weights are not the same at the end."""
    if len(set(fingerprints)) <= 1:
        return None
    rows = "; ".join(
        f"{name}: {', '.join(f[:16] for f in mine) or 'no trainer'}"
        for name, mine in zip(names, fingerprints, strict=True)
    )
    return DeviceDiffers(f"the workers ended with different weights ({rows}): {_WHY}")


def _stop(run: Run, outcome: Outcome) -> Decided:
    """The first outcome counts; everyone who is still there is ended."""
    if run.outcome is None:
        run = replace(run, outcome=outcome)
    left = [member for member in run.members if member.stage is not Stage.GONE]
    return run, tuple(End(member.row) for member in left)


def _change(run: Run, row: int, **changes: object) -> Run:
    members = list(run.members)
    members[row] = replace(members[row], **changes)  # type: ignore[arg-type]
    return replace(run, members=tuple(members))
