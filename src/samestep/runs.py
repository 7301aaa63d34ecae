"""A run's folder: settings and result in run.json, a line for each `team.log` in log.jsonl, and in
events.log what else the user was told."""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch

import samestep
from samestep.clock import Spent
from samestep.timings import by_name


class RunFolder:
    """Made by the launcher; an earlier run under the same name is kept beside it, unless this one
    goes on from it: then `lines` of its log are kept."""

    def __init__(
        self, path: str | os.PathLike[str], settings: dict[str, Any], lines: int | None = None
    ) -> None:
        self.path = Path(path)
        self.kept_as = _make_room(self.path) if lines is None else None
        self.path.mkdir(parents=True, exist_ok=True)
        self._lines = lines  # to be kept, once it is sure that this run goes on from them
        self._began = time.time()
        self._record: dict[str, Any] = {
            "samestep": samestep.__version__,
            "torch": torch.__version__,
            "python": sys.version.split()[0],
            "started": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
            **settings,
            "state": "running",
        }
        if lines is None:
            self._write()
            (self.path / "log.jsonl").touch()

    def go_on(self) -> None:
        """A resumed run was not refused: from now on the folder is this one's."""
        if self._lines is not None:
            self._cut_log(self._lines)
            self._lines = None
            self._write()

    def log(self, values: dict[str, Any]) -> None:
        self.go_on()
        with (self.path / "log.jsonl").open("a") as file:
            file.write(json.dumps(values) + "\n")

    def note(self, text: str) -> None:
        """One line of events.log. A full disk is no reason to stop."""
        with suppress(OSError), (self.path / "events.log").open("a") as file:
            file.write(f"{time.strftime('%Y-%m-%dT%H:%M:%S')} {text}\n")

    def keep_steps(self, device: str, steps: Sequence[Spent]) -> None:
        """Where a device's time went, step by step: a line of steps.jsonl for each."""
        with suppress(OSError), (self.path / "steps.jsonl").open("a") as file:
            for step, seconds in steps:
                record = {"device": device, "step": step, **by_name(seconds)}
                file.write(json.dumps(record) + "\n")

    def _cut_log(self, lines: int) -> None:
        """Drop what was logged after the state that a resumed run goes on from."""
        log = self.path / "log.jsonl"
        if log.exists():
            kept = log.read_text().splitlines(keepends=True)[:lines]
            beside = self.path / "log.jsonl.new"
            beside.write_text("".join(kept))
            os.replace(beside, log)

    def finish(self, state: str, **result: Any) -> None:
        """Note how the run has ended. A full disk is no reason to lose a result."""
        with suppress(OSError):
            self.go_on()
        seconds = round(time.time() - self._began, 3)
        self._record |= {"state": state, "seconds": seconds, **result}
        try:
            self._write()
        except OSError as error:
            print(f"samestep: {self.path}/run.json could not be written: {error}", file=sys.stderr)

    def _write(self) -> None:
        beside = self.path / "run.json.new"
        beside.write_text(json.dumps(self._record, indent=2, default=str) + "\n")
        os.replace(beside, self.path / "run.json")


def _make_room(path: Path) -> Path | None:
    """Rename an earlier run's folder to the first free number after its name."""
    if not (path / "run.json").exists():
        return None
    number = 1
    while (kept := path.with_name(f"{path.name}.{number}")).exists():
        number += 1
    path.rename(kept)
    return kept
