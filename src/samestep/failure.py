"""An exception on its way from one process to another, with its traceback.

What arrives is the user's own exception, of its own type, with the frames of the user's own code:
Python prints one traceback, and the line that raised it stands last.
"""

from __future__ import annotations

import ast
import linecache
import pickle
import sys
import traceback
from dataclasses import dataclass, replace
from pathlib import Path
from types import CodeType, TracebackType
from typing import Any

import cloudpickle

from samestep.errors import RemoteError

_OWN = str(Path(__file__).parent)


@dataclass(frozen=True, slots=True)
class Frame:
    """One line of a traceback; the columns are those that Python underlines."""

    file: str
    line: int
    name: str
    text: str
    end_line: int
    columns: tuple[int, int]


@dataclass(frozen=True, slots=True)
class Failure:
    """A captured exception. `where` says where it was raised, in one line."""

    pickled: bytes
    frames: tuple[Frame, ...]
    cause: Failure | None
    suppressed: bool
    where: str = ""

    @classmethod
    def capture(cls, error: BaseException) -> Failure:
        """Take the exception apart; samestep's own frames are left out."""
        frames = tuple(
            _frame(summary)
            for summary in traceback.extract_tb(error.__traceback__)
            if not summary.filename.startswith(_OWN)
        )
        suppressed = error.__suppress_context__
        inner = error.__cause__ or (None if suppressed else error.__context__)
        return cls(
            pickled=_pickle(error),
            frames=frames,
            cause=cls.capture(inner) if inner is not None else None,
            suppressed=suppressed,
        )

    def at(self, where: str) -> Failure:
        return self if self.where else replace(self, where=where)

    def rebuild(self) -> BaseException:
        """The exception again, ready to be raised."""
        error: BaseException = pickle.loads(self.pickled)
        if self.where and self.where not in getattr(error, "__notes__", ()):
            error.add_note(self.where)
        if self.cause is not None:
            inner = self.cause.rebuild()
            if self.suppressed:
                error.__cause__ = inner
            else:
                error.__context__ = inner
        error.__suppress_context__ = self.suppressed
        return error.with_traceback(_traceback(self.frames))


def _pickle(error: BaseException) -> bytes:
    """The exception by itself; if it does not survive the way, something that says the same."""
    try:
        pickled: bytes = cloudpickle.dumps(error)
        pickle.loads(pickled)
        return pickled
    except Exception:
        name = f"{type(error).__module__}.{type(error).__qualname__}".removeprefix("builtins.")
        return pickle.dumps(RemoteError(f"{name}: {error}"))


def _frame(summary: traceback.FrameSummary) -> Frame:
    line = summary.lineno or 1
    return Frame(
        summary.filename,
        line,
        summary.name,
        summary.line or "",
        summary.end_lineno or line,
        (summary.colno or 0, summary.end_colno or 0),
    )


def _traceback(frames: tuple[Frame, ...]) -> TracebackType | None:
    """Real traceback objects that show `frames`: each is made by raising at that very place."""
    linked: TracebackType | None = None
    for frame in reversed(frames):
        _remember(frame)
        try:
            exec(_raiser(frame), {"__name__": frame.name, "__file__": frame.file})
        except ZeroDivisionError:
            made: Any = sys.exc_info()[2]
            linked = TracebackType(linked, made.tb_next.tb_frame, made.tb_next.tb_lasti, frame.line)
    return linked


def _raiser(frame: Frame) -> CodeType:
    tree = ast.parse("1/0")
    for node in ast.walk(tree):
        if isinstance(node, (ast.expr, ast.stmt)):
            node.lineno, node.end_lineno = frame.line, frame.end_line
            node.col_offset, node.end_col_offset = frame.columns
    code = compile(tree, frame.file, "exec")
    return code.replace(co_name=frame.name, co_qualname=frame.name)


def _remember(frame: Frame) -> None:
    """Let the line be shown where its file cannot be read here (`-c`, a notebook's cell)."""
    if frame.text and not linecache.getline(frame.file, frame.line):
        lines = [""] * (frame.line - 1) + [frame.text + "\n"]
        linecache.cache[frame.file] = (len(lines), None, lines, frame.file)
