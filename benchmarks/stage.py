"""A stage for contenders: starting their processes, and having them do turns.

Nothing here imports torch, so that who asks shares no memory with who is asked.
"""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing.connection import Connection, Listener
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
START_S = 400  # for the slowest start, compiling included
TURN_S = 1000
_PYTHON = [sys.executable]
_BIN = Path(sys.executable).parent


def launcher(function: str, processes: int) -> list[str]:
    """The command in front of contenders.py, as each library's documentation has it."""
    several = [f"--nproc-per-node={processes}"]
    return {
        "ddp": [str(_BIN / "torchrun"), "--standalone", *several],
        "strangers": [str(_BIN / "torchrun"), "--standalone", *several],
        # The only way that `accelerate launch` has for several processes on CPUs without MPI.
        "accelerate": [
            str(_BIN / "accelerate"), "launch", "--multi_gpu", f"--num_processes={processes}",
            "--num_machines=1", "--mixed_precision=no", "--dynamo_backend=no",
            "--num_cpu_threads_per_process=1", f"--main_process_port={free_port()}",
        ],
        "fabric": [
            str(_BIN / "fabric"), "run", "--accelerator=cpu", "--strategy=ddp",
            f"--devices={processes}",
        ],
        "deepspeed": [
            str(_BIN / "deepspeed"), f"--num_accelerators={processes}",
            f"--master_port={free_port()}",
        ],
    }.get(function, _PYTHON)  # fmt: skip


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@dataclass(frozen=True)
class Contender:
    """What is compared: a function of contenders.py, its options, and in how many processes."""

    title: str
    function: str
    processes: int
    options: tuple[str, ...] = ()

    @property
    def is_ours(self) -> bool:
        return self.function == "samestep"

    @property
    def is_peer(self) -> bool:
        """Not one of ours, and not a control."""
        return not self.is_ours and "control" not in self.title

    @property
    def threads(self) -> int:
        """Of each of its processes."""
        return 2 if self.function in ("plain", "scratch") and "threads=1" not in self.options else 1


class Actor:
    """A contender's processes."""

    def __init__(self, contender: Contender, job: str, folder: Path) -> None:
        self.contender, self._folder = contender, folder
        self._line = str(folder / "line")
        self._listener = Listener(self._line, family="AF_UNIX")
        self._lines: list[Connection[Any, Any]] = []
        self.workers: list[int] = []  # their process ids
        command = [
            *launcher(contender.function, contender.processes), str(HERE / "contenders.py"),
            contender.function, job, self._line, *contender.options,
        ]  # fmt: skip
        environment = {
            **os.environ,
            "BENCH_WORKERS": str(contender.processes),
            "OMP_NUM_THREADS": str(contender.threads),
            "PYTHONPATH": os.pathsep.join([str(HERE), os.environ.get("PYTHONPATH", "")]),
            "PYTHONWARNINGS": "ignore",
            "DS_ACCELERATOR": "cpu",
            "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
        }
        with open(folder / "log", "wb") as log:
            self._process = subprocess.Popen(
                command, stdout=log, stderr=log, env=environment, cwd=folder,
                start_new_session=True,
            )  # fmt: skip

    def meet(self) -> None:
        """Wait until all its processes are there."""
        until = time.monotonic() + START_S
        self._listener._listener._socket.settimeout(1.0)  # type: ignore[attr-defined]
        found: dict[int, Connection[Any, Any]] = {}
        while len(found) < self.contender.processes:
            try:
                line = self._listener.accept()
            except TimeoutError:
                if self._process.poll() is not None or time.monotonic() > until:
                    raise RuntimeError(self._last_words()) from None
                continue
            number, pid = line.recv()
            found[number] = line
            self.workers.append(pid)
        self._lines = [found[number] for number in sorted(found)]

    def turn(self, steps: int) -> float:
        """Have it do `steps` steps; seconds from the first one's start to the last one's end."""
        answers = self._ask(steps)
        return max(end for _, end in answers) - min(began for began, _ in answers)

    def processes(self) -> list[int]:
        """The ids of all its processes, those that only start and watch others included."""
        return descendants(self._process.pid)

    def loss(self) -> float:
        return float(self._ask("check")[0])

    def _ask(self, order: object) -> list[Any]:
        answers = []
        try:
            for line in self._lines:
                line.send(order)
            for line in self._lines:
                if not line.poll(TURN_S):
                    raise RuntimeError("did not come to the end of its turn")
                answers.append(line.recv())
        except (EOFError, OSError):
            raise RuntimeError(self._last_words()) from None
        return answers

    def _last_words(self) -> str:
        lines = (self._folder / "log").read_text(errors="replace").strip().splitlines()
        return "could not be run: " + " | ".join(lines[-3:])[-400:]

    def close(self) -> None:
        for line in self._lines:
            with suppress(OSError):
                line.send(None)
            line.close()
        try:
            self._process.wait(20)
        except subprocess.TimeoutExpired:
            os.killpg(self._process.pid, signal.SIGTERM)
            try:
                self._process.wait(10)
            except subprocess.TimeoutExpired:
                os.killpg(self._process.pid, signal.SIGKILL)
                self._process.wait()
        self._listener.close()


def descendants(pid: int) -> list[int]:
    """A process and all that it has started, directly or not."""
    found = [pid]
    for task in Path(f"/proc/{pid}/task").glob("*/children"):
        with suppress(OSError):
            for child in task.read_text().split():
                found += descendants(int(child))
    return found
