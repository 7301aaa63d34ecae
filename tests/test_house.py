"""The house: who imports whom, what is public, what is documented."""

from __future__ import annotations

import ast
import inspect
from pathlib import Path

import pytest

import samestep as ss

PACKAGE = Path(ss.__file__).parent

# Each module imports only from what stands before it.
ORDER = [
    "errors", "devices", "lanes", "plan", "seeds", "clock", "timings", "board", "barrier",
    "processes", "payload", "failure", "tensors", "datasets", "loaders", "data", "metrics",
    "exchange", "exchange.shared_memory", "exchange.collectives", "layout", "results", "tree",
    "state", "stores", "memory", "checkpoint", "contract", "loss", "channels", "checks",
    "evaluation", "trainer", "settings", "course", "team", "models", "scratch", "messages",
    "lazy_dynamo", "worker", "forkserver", "supervise", "watch", "console", "runs", "launcher",
    "torchrun",
    "launch", "replay", "prove", "cli",
]  # fmt: skip


def module_name(path):
    parts = path.relative_to(PACKAGE).with_suffix("").parts
    return ".".join(part for part in parts if part != "__init__")


def imported(path):
    """Modules of the package imported when this one is, and not later inside a function."""
    for node in ast.parse(path.read_text()).body:
        if isinstance(node, ast.ImportFrom) and node.module == "samestep":
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and (node.module or "").startswith("samestep."):
            yield node.module.removeprefix("samestep.")


def test_imports_point_one_way():
    files = {module_name(path): path for path in PACKAGE.rglob("*.py")}
    del files[""]
    assert sorted(files) == sorted(ORDER)
    for name, path in files.items():
        for other in imported(path):
            assert ORDER.index(other) < ORDER.index(name), f"{name} imports {other}"


def test_public_names():
    assert sorted(ss.__all__) == [
        "BufferDiffers", "CheckpointDiffers", "CheckpointError", "DatasetMissing",
        "DeviceDiffers", "DeviceError", "LossError", "NonFiniteLoss", "OptimizerError",
        "OutOfMemory", "Position", "RemoteError", "SamestepError", "Team", "TeamError", "Trainer",
        "UsageError", "WorkerDied", "data", "launch", "metrics", "models", "scratch",
    ]  # fmt: skip


def public():
    modules = [getattr(ss, name) for name in ss.__all__ if inspect.ismodule(getattr(ss, name))]
    things = [getattr(ss, name) for name in ss.__all__]
    things += [getattr(module, name) for module in modules for name in module.__all__]
    for thing in things:
        yield thing
        if inspect.isclass(thing) and thing.__module__.startswith("samestep"):
            for name, member in vars(thing).items():
                if not name.startswith("_") and (callable(member) or isinstance(member, property)):
                    yield member


@pytest.mark.parametrize("thing", list(public()), ids=repr)
def test_every_public_name_is_documented(thing):
    assert inspect.getdoc(thing)


def test_errors_are_one_tree():
    for name in ss.__all__:
        thing = getattr(ss, name)
        if inspect.isclass(thing) and issubclass(thing, BaseException):
            assert issubclass(thing, ss.SamestepError)
            assert name in Path(PACKAGE / "errors.py").read_text().split('"""')[1]


def test_importing_does_not_start_what_is_not_needed():
    """Typer and rich wait until somebody needs them, and so does torch's compiler."""
    import subprocess
    import sys

    late = ("typer", "rich", "torch._dynamo")
    code = f"import sys, samestep; print([m for m in {late} if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
