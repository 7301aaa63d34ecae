"""Where the time of a run went: a line about it, and a trace of its steps. All of this is pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any

from samestep.clock import Kind, Moment

__all__ = ["by_name", "is_any", "line", "shares", "trace"]

_SHOWN = (Kind.COMPUTE, Kind.DATA, Kind.WAITING, Kind.EXCHANGE, Kind.UPDATE)


def by_name(seconds: Sequence[float]) -> dict[str, float]:
    """The seconds of each kind, by its name."""
    return {kind.name.lower(): seconds[kind] for kind in Kind}


def is_any(spent: Mapping[str, Sequence[float]]) -> bool:
    """Whether there was a step."""
    return any(any(seconds) for seconds in spent.values())


def shares(seconds: Sequence[float]) -> dict[str, float]:
    """The share of each kind in the time that steps took; the user's own code between them and
    evaluations are left out."""
    whole = sum(seconds[kind] for kind in _SHOWN)
    return {kind.name.lower(): seconds[kind] / whole if whole else 0.0 for kind in _SHOWN}


def line(spent: Mapping[str, Sequence[float]]) -> str:
    """One line from the seconds of each device: what steps were spent on, and who was slowest."""
    total = [sum(seconds[kind] for seconds in spent.values()) for kind in Kind]
    parts = ", ".join(f"{name} {100 * part:.0f} %" for name, part in shares(total).items())
    if len(spent) < 2:
        return parts
    waited = {name: shares(seconds)["waiting"] for name, seconds in spent.items()}
    slowest = min(waited, key=lambda name: waited[name])
    if max(waited.values()) - waited[slowest] < 0.02:
        return f"{parts}; none was slower than the others"
    return f"{parts}; slowest: {slowest}"


def trace(moments: Mapping[str, Sequence[Moment]]) -> dict[str, Any]:
    """What Chrome's and Perfetto's viewers read: a track for each worker, a slice for each thing
    it did. Open it at ui.perfetto.dev."""
    events: list[dict[str, Any]] = []
    starts = [mine[0].at for mine in moments.values() if mine]
    zero = min(starts, default=0.0)
    for track, (name, mine) in enumerate(moments.items()):
        about = {"ph": "M", "pid": 0, "tid": track}
        events.append({**about, "name": "thread_name", "args": {"name": name}})
        events.append({**about, "name": "thread_sort_index", "args": {"sort_index": track}})
        for now, after in pairwise(mine):
            if now.kind is Kind.OTHER or after.at <= now.at:
                continue
            label = now.kind.name.lower()
            if now.lane >= 0:
                label = f"{'lane' if now.kind is Kind.COMPUTE else label} {now.lane}"
            events.append(
                {
                    "ph": "X",
                    "pid": 0,
                    "tid": track,
                    "name": label,
                    "cat": now.kind.name.lower(),
                    "ts": (now.at - zero) * 1e6,
                    "dur": (after.at - now.at) * 1e6,
                    "args": {"step": now.step},
                }
            )
    return {"traceEvents": events, "displayTimeUnit": "ms"}
