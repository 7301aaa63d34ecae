"""The tutorials' primitives, and that their training agrees with ours."""

from __future__ import annotations

import pytest
import torch

import samestep as ss
from samestep import scratch
from samestep.models import cross_entropy

CPUS = [torch.device("cpu")] * 3


def test_get_params_copies():
    params = [torch.ones(2)]
    (copy,) = scratch.get_params(params, "cpu")
    assert copy.requires_grad
    with torch.no_grad():
        copy += 1
    assert params[0].tolist() == [1, 1]


def test_allreduce_gives_everyone_the_sum():
    data = [torch.tensor([1.0]), torch.tensor([2.0]), torch.tensor([4.0])]
    scratch.allreduce(data)
    assert [tensor.item() for tensor in data] == [7, 7, 7]


def test_split_batch_unevenly():
    X, y = torch.arange(8).view(8, 1), torch.arange(8)
    X_shards, y_shards = scratch.split_batch(X, y, CPUS)
    assert [len(shard) for shard in X_shards] == [3, 3, 2]
    assert torch.cat(y_shards).tolist() == y.tolist()


@pytest.mark.parametrize(
    ("samples", "labels", "devices"), [(2, 2, CPUS), (0, 0, CPUS), (4, 3, CPUS), (4, 4, [])]
)
def test_split_batch_refuses_empty_shards(samples, labels, devices):
    with pytest.raises(ss.UsageError, match="split_batch"):
        scratch.split_batch(torch.zeros(samples), torch.zeros(labels), devices)


def test_its_training_agrees_with_launch_to_rounding():
    generator = torch.Generator().manual_seed(0)
    X = torch.rand(90, 1, 28, 28, generator=generator)
    y = torch.randint(0, 10, (90,), generator=generator)
    torch.manual_seed(0)
    params = scratch.lenet_params()
    copies = [scratch.get_params(params, device) for device in CPUS]
    for _ in range(2):
        for part in range(0, 90, 32):
            scratch.train_batch(X[part : part + 32], y[part : part + 32], copies, CPUS, lr=0.1)
    for others in copies[1:]:
        assert all(torch.equal(a, b) for a, b in zip(copies[0], others, strict=True))

    def main(team):
        model = ss.models.lenet()
        with torch.no_grad():
            for own, given in zip(model.parameters(), params, strict=True):
                own.copy_(given)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        trainer = team.trainer(model, optimizer, cross_entropy)
        for _ in team.epochs(2):
            for batch in team.batches(ss.data.Tensors(X, y), 32, shuffle=False):
                trainer.step(batch)
        return [p.detach() for p in model.parameters()]

    for ours, theirs in zip(ss.launch(main, devices="2xcpu"), copies[0], strict=True):
        assert torch.allclose(ours, theirs.detach(), rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize(
    ("name", "count"),
    [("lenet", 129_068), ("lenet_gluon", 60_170), ("mlp", 203_530), ("resnet18", 11_172_810)],
)
def test_models_are_those_of_the_tutorials(name, count):
    model = getattr(ss.models, name)()
    assert sum(parameter.numel() for parameter in model.parameters()) == count
    assert model(torch.zeros(2, 1, 28, 28)).shape == (2, 10)
