"""`launch`: check what it was given, train on every device, return the result."""

from __future__ import annotations

import inspect
import json
import os
import pickle
import re
import signal
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from samestep import checkpoint, forkserver, timings, torchrun
from samestep.clock import Moment
from samestep.devices import inventory, parse
from samestep.errors import (
    CheckpointDiffers,
    NonFiniteLoss,
    SamestepError,
    UsageError,
    check_counts,
    check_flags,
    is_positive,
)
from samestep.failure import Failure
from samestep.launcher import Launcher, Stopped
from samestep.payload import digest_of_code, pack
from samestep.runs import RunFolder
from samestep.settings import Plan, Resumed, Saves, Settings
from samestep.supervise import Policy, Returned

__all__ = ["launch", "overridden"]


@dataclass(frozen=True)
class Overrides:
    """Settings from outside (`samestep run`, `samestep prove`) that go before the script's."""

    devices: str | int | None = None
    lanes: int | None = None
    seed: int | None = None
    plan: Plan | None = None
    stop_at: int | None = None
    ended: Callable[[Returned], None] | None = None
    within: Callable[[Any, Any, Any, Settings], None] | None = None
    trace: str | None = None
    trace_steps: int | None = None


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
    resume: bool | str = False,
    args: tuple[Any, ...] = (),
    kwargs: Mapping[str, Any] | None = None,
    threads: int = 1,
    plan: Plan | None = None,
    replace: bool = True,
    max_losses: int = 8,
    save_every: str | int | None = "10 min",
    keep: int = 3,
    check_every: int = 100,
    hang_after: float | None = 30.0,
    trace: str | os.PathLike[str] | None = None,
    trace_steps: int = 20,
) -> Any:
    """Run `main(team, *args, **kwargs)` on every device; returns what the first worker returned.

    - `devices`: "all" (every GPU, or else every physical core), a number, or terms joined by
      commas: `cuda:1`, `cpu`, `3xcpu`, `2xcuda`; `cpu@0.25` is a worker slowed to a quarter.
    - `lanes`: into how many parts each global batch is cut. With `seed` it decides the result;
      the devices do not.
    - `exact=False` lets a worker run its lanes as one, and devices of different kinds work
      together; results then agree to rounding only.
    - `run`: a folder for the run's settings, log, result and checkpoints.
    - `resume=True` goes on from the newest intact checkpoint in `run`, on any devices, with the
      same bits; `resume="edited"` does so though the code of `main` has changed.
    - `save_every`: a checkpoint after so many steps (no more are ever repeated: a step waits for
      the checkpoint before it), or after a time ("10 min"; written beside the training); `keep` of
      them stay. Also at Ctrl-C and SIGTERM.
    - `threads`: of every CPU worker alike; it belongs to the arithmetic, like the dtype.
    - `plan(lanes, step)`: the number of lanes of each worker, instead of samestep's own plan.
    - A worker that is lost is replaced, unless `replace=False`; more than `max_losses` without a
      step in between end the run.
    - `check_every`: after so many steps workers compare their weights; 0 for never.
    - `hang_after`: seconds without a move, or 20 times a worker's own lanes if that is longer,
      after which it is taken for hanging, and replaced; None for never.
    - `trace`: a file for a trace of the first `trace_steps` steps of each worker, for
      ui.perfetto.dev or chrome://tracing.

    Under `torchrun` this process joins the others that were started with it.
    """
    over = _overrides
    if kwargs is not None and not isinstance(kwargs, Mapping):
        raise UsageError(
            f"kwargs={kwargs!r}: must be a dict of main's keyword arguments, or None for none"
        )
    kwargs = dict(kwargs or {})
    devices = devices if over.devices is None else over.devices
    lanes = lanes if over.lanes is None else over.lanes
    seed = seed if over.seed is None else over.seed
    _check(main, args, kwargs, lanes=lanes, seed=seed, threads=threads, keep=keep)
    check_counts(0, max_losses=max_losses, check_every=check_every)
    check_flags(exact=exact, replace=replace)
    if plan is not None and not callable(plan):
        raise UsageError(f"plan={plan!r}: must be a function plan(lanes, step), or None")
    run = _run_path(run)
    trace, trace_steps = over.trace or trace, over.trace_steps or trace_steps
    check_counts(1, trace_steps=trace_steps)
    saves = _saves(save_every)
    if resume not in (False, True, "edited"):
        raise UsageError(f'resume={resume!r}: must be True, False or "edited"')
    if resume and run is None:
        raise UsageError(f"resume={resume!r}: give the run's folder too, for example run='runs/x'")
    if hang_after is not None and not is_positive(hang_after):
        raise UsageError(f"hang_after={hang_after!r}: must be a number of seconds above 0, or None")
    if torchrun.is_joined():
        if resume:
            raise UsageError("resume: not under torchrun; start it with samestep's own launcher")
        return torchrun.join(main, devices, lanes, seed, exact, threads, plan, args, kwargs)
    found, notices = parse(devices, machine := inventory(), lanes)
    settings = Settings(
        found,
        lanes,
        seed,
        exact,
        threads,
        over.plan or plan,
        over.stop_at,
        machine.cores,
        check_every,
        saves if run is not None else None,
        _resumed(Path(run), resume) if run is not None and resume else None,
        digest_of_code(main),
        trace_steps if trace is not None else 0,
    )
    if over.within is not None:
        return over.within(main, args, kwargs, settings)
    payload = main, args, kwargs, settings
    with forkserver.server() as server:
        folder = _folder(run, settings) if run is not None else None
        with Launcher(
            server,
            settings,
            machine,
            pack(payload),
            Policy(exact, replace, max_losses),
            folder,
            keep,
            hang_after,
        ) as running:
            for notice in notices:
                running.say(notice)
            outcome = running.until_over()
            spent = running.spent()
            if isinstance(outcome, Returned) and folder is not None and timings.is_any(spent):
                running.say(f"where time went: {timings.line(spent)}")
    if trace is not None:
        _write_trace(Path(trace), running.moments)
    if isinstance(outcome, Returned):
        return _result_of(outcome, folder, spent, over)
    raise _error_of(outcome, folder)


def _result_of(
    outcome: Returned,
    folder: RunFolder | None,
    spent: dict[str, tuple[float, ...]],
    over: Overrides,
) -> Any:
    result = pickle.loads(outcome.result) if outcome.result is not None else None
    if folder is not None:
        folder.finish(
            "finished",
            fingerprints=outcome.fingerprints,
            seconds_spent={name: timings.by_name(seconds) for name, seconds in spent.items()},
            result=_json(result),
        )
    if over.ended is not None:
        over.ended(outcome)
    return result


def _error_of(
    outcome: Stopped | Failure | SamestepError, folder: RunFolder | None
) -> BaseException:
    """What to raise. Not `from` anything: the traceback that is printed is the user's own."""
    if isinstance(outcome, Stopped):
        if folder is not None:
            folder.finish("stopped", by=signal.Signals(outcome.signal).name)
        if outcome.signal == signal.SIGINT:
            return KeyboardInterrupt()
        return SystemExit(128 + outcome.signal)
    error = outcome.rebuild() if isinstance(outcome, Failure) else outcome
    if folder is not None and not isinstance(error, CheckpointDiffers):
        if isinstance(error, NonFiniteLoss):
            lane = f" --lane {error.lanes[0]}" if error.lanes else ""
            error.add_note(f"samestep replay {folder.path} --step {error.step}{lane}")
        folder.finish("failed", error=f"{type(error).__name__}: {error}")
    return error


def _check(main: Any, args: Any, kwargs: dict[str, Any], **numbers: Any) -> None:
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
    check_counts(0, seed=numbers.pop("seed"))
    check_counts(1, **numbers)


def _write_trace(path: Path, moments: dict[str, tuple[Moment, ...]]) -> None:
    try:
        path.write_text(json.dumps(timings.trace(dict(sorted(moments.items())))))
    except OSError as error:
        print(f"samestep: trace={str(path)!r} could not be written: {error}", file=sys.stderr)


def _run_path(run: Any) -> str | os.PathLike[str] | None:
    if run is None or (isinstance(run, (str, os.PathLike)) and os.fspath(run)):
        return run
    raise UsageError(f"run={run!r}: must be the path of a folder, for example 'runs/x', or None")


_UNITS = {"s": 1, "sec": 1, "min": 60, "m": 60, "h": 3600}


def _saves(every: str | int | None) -> Saves | None:
    """Read `save_every`."""
    if every is None:
        return None
    if isinstance(every, int) and not isinstance(every, bool) and every > 0:
        return Saves(steps=every)
    if isinstance(every, str):
        match = re.fullmatch(r"\s*(\d+\.?\d*)\s*([a-z]+)\s*", every)
        if match and match[2] in _UNITS and float(match[1]) > 0:
            return Saves(seconds=float(match[1]) * _UNITS[match[2]])
    raise UsageError(
        f"save_every={every!r}: must be a number of steps, a time such as '10 min', '30 s' or "
        "'1 h', or None for never"
    )


def _resumed(run: Path, resume: bool | str) -> Resumed | None:
    """The newest intact checkpoint of a run."""

    def warn(text: str) -> None:
        print(f"samestep: {text}", file=sys.stderr)

    found = checkpoint.newest(run / "checkpoints", warn)
    if found is None:
        warn(f"resume: {run} has no checkpoint, so this run starts from its beginning")
        return None
    snapshot, manifest, path = found
    warn(f"resume: going on from step {snapshot.step} ({path})")
    if resume == "edited":
        warn(
            "resume='edited': weights, optimizers with their settings (such as the learning rate) "
            "and schedules are the checkpoint's; what the edited code says of them counts for what "
            "it sets from now on"
        )
    snapshot.generation = snapshot.operation = 0  # of a team that is no more
    return Resumed(
        snapshot, str(path), resume == "edited", manifest["log_lines"], manifest["numerics"]
    )


def _folder(run: str | os.PathLike[str], settings: Settings) -> RunFolder:
    resumed = settings.resumed
    record = {
        "devices": [str(device) for device in settings.devices],
        "lanes": settings.lanes,
        "seed": settings.seed,
        "exact": settings.exact,
        "threads": settings.threads,
        "argv": sys.argv,
        "folder": os.getcwd(),
        "resumed_from_step": resumed.snapshot.step if resumed else None,
    }
    try:
        folder = RunFolder(run, record, resumed.lines if resumed else None)
    except OSError as error:
        raise UsageError(
            f"run={str(run)!r}: must be a folder that can be made and written to ({error})"
        ) from None
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
