"""The same script under torchrun gives the same bits."""

from __future__ import annotations

import os
import socket
import subprocess
import sys

import pytest

SCRIPT = """
import sys
sys.path.insert(0, {tests!r})
import jobs
import samestep as ss

def main(team):
    model = ss.models.mlp(100, (8,), 5)
    optimizer = jobs.torch.optim.SGD(model.parameters(), lr=0.1)
    trainer = team.trainer(model, optimizer, jobs.cross_entropy)
    accuracy = trainer.evaluate(jobs.images(), ss.metrics.accuracy, chunk=20)
    team.print("accuracy", accuracy)
    return jobs.convolution(team)

print(ss.launch(main, devices={devices!r}))
"""


def script(tmp_path, devices="2xcpu"):
    path = tmp_path / "train.py"
    path.write_text(SCRIPT.format(tests=os.path.dirname(__file__), devices=devices))
    return path


def run(*command):
    return subprocess.run(
        [sys.executable, *map(str, command)],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )


def torchrun(tmp_path, *arguments):
    return run("-m", "torch.distributed.run", "--log-dir", tmp_path / "logs", *arguments)


@pytest.fixture(scope="module")
def launched(tmp_path_factory):
    done = run(script(tmp_path_factory.mktemp("launched")))
    assert done.returncode == 0, done.stderr
    accuracy, fingerprint = done.stdout.splitlines()
    return accuracy, fingerprint


def free_port():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


@pytest.mark.parametrize("workers", [1, 2, 3])
@pytest.mark.parametrize("devices", ["2xcpu", "all"])
def test_one_agent(tmp_path, launched, workers, devices):
    done = torchrun(
        tmp_path,
        "--nproc-per-node", workers, "--master-port", free_port(), script(tmp_path, devices),
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    lines = done.stdout.replace(launched[1], launched[1] + "\n").split("\n")
    assert lines.count(launched[1]) == workers
    assert lines.count(launched[0]) == 1, "team.print prints once"


def test_two_agents_of_one_worker_each(tmp_path, launched):
    port = free_port()
    agents = [
        subprocess.Popen(
            [
                sys.executable, "-m", "torch.distributed.run", "--nnodes", "2", "--node-rank",
                str(rank), "--nproc-per-node", "1", "--master-addr", "127.0.0.1",
                "--master-port", str(port), "--log-dir", tmp_path / "logs", script(tmp_path),
            ],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]  # fmt: skip
    outputs = [agent.communicate(timeout=120) for agent in agents]
    assert [agent.returncode for agent in agents] == [0, 0], outputs
    assert all(launched[1] in out for out, _ in outputs)


def test_devices_that_do_not_fit_the_number_of_workers(tmp_path):
    done = torchrun(
        tmp_path,
        "--nproc-per-node", 1, "--master-port", free_port(), script(tmp_path, "cpu,cpu@0.5"),
    )  # fmt: skip
    assert done.returncode != 0
    assert "names 2 devices, but torchrun started 1 workers" in done.stderr
