"""What a run shows: workers' lines with a prefix, the team's without, progress on a terminal."""

from __future__ import annotations

import codecs
import sys
import time
from typing import TYPE_CHECKING, Any, TextIO

from samestep.board import Board, Word
from samestep.worker import ONCE

if TYPE_CHECKING:
    from rich.progress import Progress

_LINE_LIMIT = 1 << 20
_REFRESH_S = 0.1


class Console:
    """Lines go to this process's own stdout and stderr, whole and in the order they came."""

    def __init__(self, board: Board) -> None:
        self._board = board
        self.seats: dict[int, int] = {}  # of the workers' rows
        self.oldest = 0  # the row whose progress is shown
        self._pending: dict[tuple[int, int], str] = {}
        self._decoders: dict[tuple[int, int], Any] = {}
        self._bar: Progress | None = None
        self._task: Any = None
        self._began, self._samples, self._last = 0.0, 0, 0.0
        self._muted = False
        self._broken: list[TextIO] = []  # streams that could not be written

    def feed(self, worker: int, stream: int, data: bytes) -> None:
        """Bytes that a worker has written to its stdout (1) or stderr (2)."""
        key = worker, stream
        if key not in self._decoders:
            self._decoders[key] = codecs.getincrementaldecoder("utf-8")("replace")
        text = self._pending.get(key, "") + self._decoders[key].decode(data)
        lines = text.replace("\r\n", "\n").replace("\r", "\n").split("\n")
        self._pending[key] = lines.pop()
        if len(self._pending[key]) > _LINE_LIMIT:
            lines.append(self._pending.pop(key))
        for line in lines:
            self._show(worker, stream, line)

    def end(self, worker: int) -> None:
        """The worker is gone: show what it left without a line end."""
        for stream in (1, 2):
            rest = self._pending.pop((worker, stream), "")
            if rest:
                self._show(worker, stream, rest)

    def mute(self) -> None:
        """Nothing that workers write from now on is of interest: one of them has failed."""
        self._muted = True

    def _show(self, worker: int, stream: int, line: str) -> None:
        if line.startswith(ONCE):
            self.say(line.removeprefix(ONCE))
        elif line and not self._muted:
            self.say(
                f"worker {self.seats.get(worker, worker)} | {line}",
                sys.stdout if stream == 1 else sys.stderr,
            )

    def say(self, line: str, to: TextIO | None = None) -> None:
        """One line of the run's own."""
        to = to or sys.stdout
        if to is None or to in self._broken:
            return
        try:
            if self._bar is not None and to.isatty():
                self._bar.console.print(line, markup=False, highlight=False, soft_wrap=True)
            else:
                print(line, file=to, flush=True)
        except (OSError, ValueError):
            # Nobody reads it, or its disk is full, or it is closed: no reason to stop training.
            self._broken.append(to)

    def refresh(self) -> None:
        """Redraw the progress bar, if this is a terminal and there is something to count."""
        now = time.monotonic()
        out = sys.stdout
        if now - self._last < _REFRESH_S or out is None or out in self._broken or not out.isatty():
            return
        self._last, board = now, self._board
        steps = board.get(self.oldest, Word.EPOCH_STEPS)
        if not steps:
            return
        samples = board.get(self.oldest, Word.SAMPLES)
        if self._bar is None:
            self._bar, self._task = _bar()
        if samples < self._samples or not self._began:
            self._began, self._samples = now, samples
        rate = (samples - self._samples) / max(now - self._began, 1e-6)
        epochs = board.get(self.oldest, Word.EPOCHS)
        epoch = f"epoch {board.get(self.oldest, Word.EPOCH) + 1}" + (f"/{epochs}" if epochs else "")
        self._bar.update(
            self._task,
            completed=board.get(self.oldest, Word.EPOCH_STEP),
            total=steps,
            description=epoch,
            rate=f"{rate:,.0f} samples/s",
            loss=f"loss {board.loss(self.oldest):.4f}",
        )
        self._bar.refresh()

    def close(self) -> None:
        if self._bar is not None:
            self._bar.stop()
            self._bar = None


def _bar() -> tuple[Progress, Any]:
    from rich.console import Console as Rich
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TimeRemainingColumn

    bar = Progress(
        "{task.description}",
        BarColumn(),
        MofNCompleteColumn(),
        "{task.fields[rate]}",
        "{task.fields[loss]}",
        TimeRemainingColumn(),
        console=Rich(file=sys.stdout),
        auto_refresh=False,
        transient=True,
        redirect_stdout=False,
        redirect_stderr=False,
    )
    bar.start()
    return bar, bar.add_task("", total=1, rate="", loss="")
