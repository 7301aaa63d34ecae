"""Evaluation: every sample once, on any number of devices."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import jobs
import samestep as ss


class MeanAbsoluteOutput(ss.metrics.Metric):
    """A user's own metric."""

    def count(self, outputs, targets):
        return torch.stack([outputs.abs().sum(), torch.tensor(outputs.numel())])

    def value(self, total):
        return (total[0] / total[1]).item()


METRICS = (
    ss.metrics.accuracy,
    ss.metrics.top_k(2),
    ss.metrics.mean_loss,
    ss.metrics.confusion_matrix(5),
    MeanAbsoluteOutput(),
)


def evaluate(team, samples, chunk, precision="fp32"):
    model = nn.Sequential(
        nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.Dropout(0.5), nn.Flatten(), nn.Linear(256, 5)
    )
    trainer = team.trainer(
        model, torch.optim.SGD(model.parameters(), lr=0.1), jobs.cross_entropy, precision=precision
    )
    data = jobs.images(samples)
    before = trainer.fingerprint()
    results = trainer.evaluate(data, *METRICS, chunk=chunk)
    assert trainer.evaluate(data, ss.metrics.accuracy, chunk=chunk) == results[0]
    assert trainer.fingerprint() == before
    assert model.training
    return results, model.state_dict()


@pytest.mark.parametrize("samples", [1, 7, 64, 203])
@pytest.mark.parametrize("chunk", [1, 16, 1000])
def test_exact_counts_on_any_number_of_devices(samples, chunk):
    results, state = ss.launch(evaluate, devices="1xcpu", args=(samples, chunk))
    for devices in ("2xcpu", "3xcpu"):
        others, _ = ss.launch(evaluate, devices=devices, args=(samples, chunk))
        assert str(others) == str(results)
    accuracy, top2, loss, confusion, absolute = results
    model = nn.Sequential(
        nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.Dropout(0.5), nn.Flatten(), nn.Linear(256, 5)
    )
    model.load_state_dict(state)
    model.eval()
    x, y = jobs.images(samples).fields
    with torch.no_grad():
        out = model(x)
    assert accuracy == (out.argmax(1) == y).sum().item() / samples
    assert top2 == (out.topk(2).indices == y[:, None]).any(1).sum().item() / samples
    assert loss == pytest.approx(F.cross_entropy(out, y).item(), rel=1e-5)
    assert absolute == pytest.approx(out.abs().mean().item(), rel=1e-5)
    assert confusion.sum() == samples
    assert confusion.diag().sum() / samples == pytest.approx(accuracy)
    assert confusion.sum(1).tolist() == torch.bincount(y, minlength=5).tolist()


def test_under_autocast():
    alone = ss.launch(evaluate, devices="1xcpu", args=(50, 16, "bf16"))
    assert str(ss.launch(evaluate, devices="2xcpu", args=(50, 16, "bf16"))[0]) == str(alone[0])


def test_map_style_datasets_and_background_loaders():
    def main(team, loaders):
        model = ss.models.mlp(100, (8,), 5)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        trainer = team.trainer(model, optimizer, jobs.cross_entropy)
        return trainer.evaluate(jobs.Noisy(), ss.metrics.mean_loss, chunk=5, loaders=loaders)

    alone = ss.launch(main, devices="1xcpu", args=(0,))
    assert ss.launch(main, devices="2xcpu", args=(2,)) == alone


@pytest.mark.parametrize(
    ("call", "says"),
    [
        (lambda t, d: t.evaluate(d), "needs metrics, for example ss.metrics.accuracy; got none"),
        (lambda t, d: t.evaluate(d, "accuracy"), "got str"),
        (lambda t, d: t.evaluate(d, ss.metrics.accuracy, chunk=0), "chunk=0: must be"),
        (lambda t, d: t.evaluate(d, ss.metrics.top_k(9)), "k=9, but there are only 5 classes"),
        (lambda t, d: t.evaluate(d, ss.metrics.confusion_matrix(2)), "a class is beyond classes=2"),
        (lambda t, d: t.evaluate([], ss.metrics.accuracy), "dataset: has no samples"),
    ],
)
def test_wrong_calls(call, says):
    def main(team):
        model = ss.models.mlp(100, (8,), 5)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        call(team.trainer(model, optimizer, jobs.cross_entropy), jobs.images())

    with pytest.raises(ss.UsageError, match=says):
        ss.launch(main, devices="2xcpu")


def test_k_must_be_positive():
    with pytest.raises(ss.UsageError, match="k must be at least 1, got 0"):
        ss.metrics.top_k(0)
