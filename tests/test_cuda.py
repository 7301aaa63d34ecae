"""On a GPU. Skipped, with the reason, where there is none."""

from __future__ import annotations

from functools import partial

import pytest
import torch

import faults
import jobs
import samestep as ss
from samestep.prove import uneven

pytestmark = [
    pytest.mark.cuda,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="this machine has no NVIDIA GPU"),
]

JOBS = [jobs.mlp, jobs.convolution, jobs.residual, jobs.encoder, jobs.half, jobs.rosy]


@pytest.mark.parametrize("main", JOBS, ids=lambda main: main.__name__)
def test_two_and_three_workers_on_one_gpu_give_the_bits_of_one(main):
    """Real kernels and the pinned-memory exchange; the workers share cuda:0."""
    alone = ss.launch(main, devices="cuda:0")
    assert ss.launch(main, devices="cuda:0,cuda:0") == alone
    odd = ss.launch(main, devices="cuda:0,cuda:0,cuda:0", plan=partial(uneven, 3))
    assert odd == alone


def test_control_lanes_change_the_bits():
    prints = {ss.launch(jobs.convolution, devices="cuda:0", lanes=lanes) for lanes in (4, 8)}
    assert len(prints) == 2


@pytest.mark.parametrize(("dtype", "bound"), [(torch.float64, 1e-12), (torch.float32, 1e-5)])
def test_against_plain_torch_on_the_cpu(dtype, bound):
    ours = [p.cpu() for p in ss.launch(jobs.against_torch, devices="cuda:0", args=(dtype,))]
    wanted = jobs.plain_torch(dtype)
    assert max((a - b).norm() / b.norm() for a, b in zip(ours, wanted, strict=True)) <= bound


def test_numerics_are_pinned():
    def main(team):
        assert torch.are_deterministic_algorithms_enabled()
        assert not torch.backends.cuda.matmul.allow_tf32
        assert not torch.backends.cudnn.allow_tf32
        assert not torch.backends.cudnn.benchmark
        return torch.cuda.current_device(), str(team.device)

    assert ss.launch(main, devices="cuda:0") == (0, "cuda:0")


def test_a_mixed_team_is_refused_in_exact_mode_and_trains_without_it():
    with pytest.raises(ss.DeviceDiffers, match="exact=False"):
        ss.launch(jobs.mlp, devices="cuda:0,cpu")

    def main(team):
        jobs.mlp(team)
        return team.size

    assert ss.launch(main, devices="cuda:0,cpu", exact=False) == 2


def test_nccl_with_one_process(tmp_path):
    import os
    import subprocess
    import sys

    path = tmp_path / "train.py"
    path.write_text(
        f"import sys; sys.path.insert(0, {os.path.dirname(__file__)!r})\n"
        "import jobs, samestep as ss\n"
        "print(ss.launch(jobs.mlp, devices='all'))\n"
    )
    command = [
        sys.executable, "-m", "torch.distributed.run", "--log-dir", tmp_path / "logs",
        "--nproc-per-node", "1", path,
    ]  # fmt: skip
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == ss.launch(jobs.mlp, devices="cuda:0")


@pytest.mark.parametrize("kind", ["SIGKILL", "exit"])
@pytest.mark.parametrize(
    "point", ["in a lane", "between nodes and sums", "between sums and update"]
)
def test_a_lost_worker_changes_no_bit(point, kind, tmp_path):
    alone = ss.launch(faults.train, devices="cuda:0", lanes=6)[:3]
    fault = faults.Fault(kind, point, str(tmp_path))
    options = {"lanes": 6, "args": (fault,), "kwargs": {"pace": 0.3}}
    assert ss.launch(faults.train, devices="cuda:0,cuda:0", **options)[:3] == alone
    assert (tmp_path / "fired").exists()


def test_a_run_goes_on_from_its_checkpoint(tmp_path):
    import test_resume

    alone = ss.launch(test_resume.classifier, devices="cuda:0")
    options = {"run": tmp_path / "run", "save_every": 1}
    with pytest.raises(test_resume.Interrupted):
        ss.launch(test_resume.classifier, devices="cuda:0", args=(9,), **options)
    devices = "cuda:0,cuda:0"
    assert ss.launch(test_resume.classifier, devices=devices, resume=True, **options) == alone


def test_a_gpu_worker_without_memory_for_a_lane_leaves_it_to_others(capfd):
    def main(team, limited):
        if limited and team.number == 1:
            torch.cuda.set_per_process_memory_fraction(0.002)

        def loss(model, x, y):
            torch.empty(500_000_000, device=x.device).fill_(0)
            return jobs.cross_entropy(model, x, y)

        model = ss.models.mlp(100, (32, 16), 5)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        return jobs.fit(team, model, optimizer, loss, jobs.images(), 6, 32).fingerprint()

    alone = ss.launch(main, devices="cuda:0", args=(False,))
    assert ss.launch(main, devices="cuda:0,cuda:0", args=(True,)) == alone
    assert "worker 1 (cuda:0) has no memory for a lane of 4 samples" in capfd.readouterr().err
