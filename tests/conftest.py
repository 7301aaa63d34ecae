"""Every test leaves nothing behind, and one fork server serves the whole session."""

from __future__ import annotations

import os
import tempfile
import threading
import time
from pathlib import Path

import pytest
import torch

from samestep import forkserver

DEADLINE_S = 20.0


@pytest.fixture(scope="session", autouse=True)
def _surroundings(tmp_path_factory):
    """Caches and temporary files of the session go to a folder of its own."""
    patch = pytest.MonkeyPatch()
    folder = tmp_path_factory.mktemp("surroundings")
    for name in ("TMPDIR", "XDG_CACHE_HOME", "TORCHINDUCTOR_CACHE_DIR", "HF_HOME"):
        (folder / name.lower()).mkdir()
        patch.setenv(name, str(folder / name.lower()))
    patch.setenv("HF_HUB_OFFLINE", "1")
    patch.setenv("TRANSFORMERS_VERBOSITY", "error")
    patch.setattr(tempfile, "tempdir", None)
    torch.set_num_threads(1)
    with forkserver.kept():
        yield
    patch.undo()


def descendants() -> set[str]:
    """Processes started by this one, however deep, as "pid command"."""
    parents = {}
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            head, _, tail = stat.read_text().rpartition(")")
        except (FileNotFoundError, ProcessLookupError):
            continue
        pid, _, name = head.partition(" (")
        state, parent = tail.split()[:2]
        if state != "Z":
            parents[pid] = (parent, name)
    found: set[str] = set()
    wanted = {str(os.getpid())}
    while wanted:
        wanted = {pid for pid, (parent, _) in parents.items() if parent in wanted}
        found |= {f"{pid} {parents[pid][1]}" for pid in wanted}
    return found


def what_is_there() -> dict[str, set[str]]:
    return {
        "processes": descendants(),
        "threads": {thread.name for thread in threading.enumerate()},
        "shared memory": set(os.listdir("/dev/shm")),
        "environment": {f"{k}={v}" for k, v in os.environ.items() if k != "PYTEST_CURRENT_TEST"},
        "temporary files": {
            name
            for name in os.listdir(os.environ["TMPDIR"])
            if not name.startswith("torchinductor")
        },
        "working folder": {os.getcwd()},
        "files": set(os.listdir(".")) - {".pytest_cache", ".hypothesis", ".coverage"},
        "descriptors": {
            f"{fd} {target}"
            for fd in os.listdir("/proc/self/fd")
            if (target := _target(fd)).startswith(("/memfd:", "socket:", "pipe:"))
        },
    }


def _target(fd: str) -> str:
    try:
        return os.readlink(f"/proc/self/fd/{fd}")
    except FileNotFoundError:
        return ""


@pytest.fixture(autouse=True)
def _nothing_left(_surroundings):
    before = what_is_there()
    yield
    deadline = time.monotonic() + DEADLINE_S
    while True:
        after = what_is_there()
        left = {what: after[what] - before[what] for what in after if after[what] - before[what]}
        if not left or time.monotonic() > deadline:
            break
        time.sleep(0.02)  # the kernel may still be taking processes down
    assert not left, f"left behind: {left}"
