"""The promise: the same SHA-256 on any devices and plans."""

from __future__ import annotations

from functools import partial

import pytest
import torch

import jobs
import samestep as ss
from samestep.prove import uneven

TEAMS = {
    "2xcpu": None,
    "3xcpu": None,
    "4xcpu": None,
    "2xcpu uneven": partial(uneven, 2),
    "3xcpu uneven": partial(uneven, 3),
}


def everywhere(main, teams=TEAMS, **options):
    """The fingerprint on one worker, after checking that every team gives the same."""
    alone = ss.launch(main, devices="1xcpu", **options)
    others = {
        name: ss.launch(main, devices=name.split()[0], plan=plan, **options)
        for name, plan in teams.items()
    }
    assert others == dict.fromkeys(teams, alone)
    return alone


@pytest.mark.parametrize(
    "main",
    [
        jobs.mlp, jobs.convolution, jobs.lenet_print, jobs.viewing, jobs.costly, jobs.residual,
        jobs.encoder, jobs.half, jobs.rosy, jobs.augmented,
    ],
    ids=lambda main: main.__name__,
)  # fmt: skip
def test_same_on_any_team(main):
    everywhere(main)


@pytest.mark.parametrize("main", [jobs.bert, jobs.gpt], ids=lambda main: main.__name__)
@pytest.mark.filterwarnings("ignore")
def test_models_that_nobody_here_wrote(main):
    pytest.importorskip("transformers")
    everywhere(main, {"2xcpu": None, "3xcpu uneven": partial(uneven, 3)})


def test_compiled():
    everywhere(jobs.compiled, {"2xcpu": None, "3xcpu uneven": partial(uneven, 3)})


def test_lane_counts():
    """The same for each count on any team; another one for each count."""
    prints = {everywhere(jobs.convolution, lanes=lanes) for lanes in (1, 3, 8, 12)}
    assert len(prints) == 4, "the control: lanes are part of the result"


def test_slow_devices():
    alone = ss.launch(jobs.mlp, devices="1xcpu")
    assert ss.launch(jobs.mlp, devices="cpu,cpu@0.4") == alone


def test_seed_changes_the_result():
    assert ss.launch(jobs.mlp, devices="2xcpu", seed=1) != ss.launch(jobs.mlp, devices="2xcpu")


def test_loaders_do_not_change_the_result():
    alone = ss.launch(jobs.augmented, devices="1xcpu", kwargs={"loaders": 0})
    assert ss.launch(jobs.augmented, devices="2xcpu", kwargs={"loaders": 2}) == alone


def test_two_threads_alike_everywhere():
    def main(team):
        return jobs.mlp(team), torch.get_num_threads()

    alone = ss.launch(main, devices="1xcpu", threads=2)
    assert alone[1] == 2
    assert ss.launch(main, devices="2xcpu", threads=2) == alone


def test_more_workers_than_lanes():
    everywhere(jobs.convolution, {"3xcpu": None}, lanes=2)


def relative(a, b):
    worst = max((x - y).norm() / y.norm() for x, y in zip(a, b, strict=True))
    return worst.item()


@pytest.mark.parametrize(("dtype", "bound"), [(torch.float64, 1e-12), (torch.float32, 1e-5)])
@pytest.mark.parametrize("devices", ["1xcpu", "2xcpu", "3xcpu"])
def test_against_plain_torch_on_whole_batches(dtype, bound, devices):
    """50 steps with a short last batch in each epoch, and lanes of unequal size."""
    ours = ss.launch(jobs.against_torch, devices=devices, args=(dtype,))
    assert relative(ours, jobs.plain_torch(dtype)) <= bound


def test_not_exact_agrees_to_rounding_and_runs_lanes_as_one():
    def main(team):
        calls = []

        def loss(model, x, y):
            calls.append(len(x))
            return jobs.cross_entropy(model, x, y)

        model, optimizer, data = jobs.plain_parts(torch.float64)
        trainer = team.trainer(model, optimizer, loss)
        while team.position.step < 50:
            for batch in team.batches(data, 37, shuffle=False):
                trainer.step(batch)
                if team.position.step == 50:
                    break
        return [p.detach() for p in model.parameters()], calls[0]

    for devices, first in (("1xcpu", 37), ("2xcpu", 20)):
        weights, size = ss.launch(main, devices=devices, exact=False)
        assert size == first
        assert relative(weights, jobs.plain_torch(torch.float64)) <= 1e-12


def ddp(team, folder):
    """DDP over gloo as its documentation has it: each process takes its part of the batch."""
    import torch.distributed as dist
    import torch.nn.functional as F

    dist.init_process_group(
        "gloo", init_method=f"file://{folder}/meet", rank=team.number, world_size=team.size
    )
    torch.manual_seed(0)
    model = torch.nn.parallel.DistributedDataParallel(ss.models.mlp(100, (32,), 5))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    x, y = jobs.images(64).fields
    for _ in range(10):
        optimizer.zero_grad()
        part = slice(team.number, None, team.size)
        F.cross_entropy(model(x[part]), y[part]).backward()
        optimizer.step()
    weights = torch.cat([p.detach().flatten() for p in model.parameters()])
    del model
    dist.barrier()
    dist.destroy_process_group()
    return weights


def test_control_ddp_differs_between_one_and_two_processes(tmp_path):
    weights = []
    for devices in ("1xcpu", "2xcpu"):
        folder = tmp_path / devices
        folder.mkdir()
        weights.append(ss.launch(ddp, devices=devices, args=(str(folder),)))
    assert not torch.equal(*weights)
    assert torch.allclose(*weights, atol=1e-4)
