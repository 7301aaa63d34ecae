"""What keeps the bits: a test for each rule of the design's §3 that goes red without it."""

from __future__ import annotations

import random

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn

import jobs
import samestep as ss
from samestep.exchange import Flat
from samestep.layout import ABSENT, Layout


def one_step(team, model, loss, dataset, batch_size, optimizer=None, **options):
    optimizer = optimizer or torch.optim.SGD(model.parameters(), lr=0.1)
    trainer = team.trainer(model, optimizer, loss, **options)
    for batch in team.batches(dataset, batch_size, shuffle=False):
        trainer.step(batch)
        break
    return trainer


def test_every_lane_runs_alone_in_its_own_shape():
    def main(team):
        seen = []

        def loss(model, x, y):
            seen.append(len(x))
            return jobs.cross_entropy(model, x, y)

        one_step(team, ss.models.mlp(100, (4,), 5), loss, jobs.images(), 21)
        return seen

    assert ss.launch(main, devices="1xcpu") == [3, 3, 3, 3, 3, 2, 2, 2]


@pytest.mark.parametrize("devices", ["1xcpu", "2xcpu", "3xcpu"])
def test_workers_have_one_thread_whatever_their_number(devices):
    assert ss.launch(lambda team: torch.get_num_threads(), devices=devices) == 1


def test_layout_pads_to_64_bytes_and_keeps_registration_order():
    model = nn.ModuleDict({"b": nn.Linear(3, 5), "a": nn.Linear(7, 1).double()})
    layout = Layout(model, lanes=4)
    flat = Flat.empty(layout.shape, torch.device("cpu"))
    views = layout.gradients(flat)
    assert layout.names == ["b.weight", "b.bias", "a.weight", "a.bias"]
    assert [view.dtype for view in views] == [torch.float32] * 2 + [torch.float64] * 2
    starts = [view.storage_offset() * view.element_size() for view in views]
    assert starts == [0, 64, 0, 64]


def test_half_gradients_are_added_in_float32():
    """In bfloat16, adding 1 to 256 eight times changes nothing; in float32 it gives 264."""

    def main(team):
        model = nn.Linear(1, 1, bias=False).to(torch.bfloat16)

        def loss(model, x):
            return (model.weight * x.to(torch.bfloat16)).flatten()

        trainer = one_step(team, model, loss, ss.data.Tensors(torch.tensor([256.0] + [1.0] * 8)), 9)
        return trainer.model.weight.grad.float().item()

    assert ss.launch(main, devices="1xcpu", lanes=9) == torch.tensor(264 / 9).bfloat16().item()


def test_an_absent_gradient_changes_not_even_the_sign_of_a_zero():
    for value in (0.0, -0.0, 1.5, -2.0):
        total = torch.tensor([value]) + torch.tensor([ABSENT])
        assert torch.equal(total.signbit(), torch.tensor([value]).signbit())
        assert total.item() == value


class Branches(nn.Module):
    """`some` is used by samples above 0 only, `none` by no sample."""

    def __init__(self):
        super().__init__()
        self.all, self.some, self.none = nn.Linear(2, 2), nn.Linear(2, 2), nn.Linear(2, 2)

    def forward(self, x):
        h = self.all(x)
        above = x[:, 0] > 0
        if above.any():
            h = torch.where(above[:, None], self.some(h), h)
        return h


def branch_loss(model, x):
    return model(x).square().sum(1)


def branch_data(dtype=torch.float64):
    x = torch.randn(8, 2, generator=torch.Generator().manual_seed(0), dtype=dtype)
    x[:4, 0] = x[:4, 0].abs()
    x[4:, 0] = -x[4:, 0].abs()
    return x


def train_branches(team, kind, options, steps=5):
    torch.manual_seed(0)
    model = Branches().double()
    optimizer = kind(model.parameters(), **options)
    trainer = team.trainer(model, optimizer, branch_loss)
    while team.position.step < steps:
        for batch in team.batches(ss.data.Tensors(branch_data()), 8, shuffle=False):
            trainer.step(batch)
    return [p.detach() for p in model.parameters()]


@pytest.mark.parametrize("devices", ["1xcpu", "3xcpu"])
@pytest.mark.parametrize(
    ("kind", "options"),
    [
        (torch.optim.SGD, {"lr": 0.05, "momentum": 0.9, "weight_decay": 0.1}),
        (torch.optim.AdamW, {"lr": 0.05, "weight_decay": 0.1}),
    ],
)
def test_parameters_without_gradients_are_left_out_as_in_plain_torch(devices, kind, options):
    torch.manual_seed(0)
    model = Branches().double()
    optimizer = kind(model.parameters(), **options)
    for _ in range(5):
        optimizer.zero_grad()
        branch_loss(model, branch_data()).mean().backward()
        optimizer.step()
    ours = ss.launch(train_branches, devices=devices, args=(kind, options))
    for got, wanted in zip(ours, model.parameters(), strict=True):
        assert torch.allclose(got, wanted.detach(), rtol=1e-12, atol=1e-15)


def test_freezing_in_the_middle_of_a_run():
    def main(team):
        model = ss.models.mlp(100, (8,), 5)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        trainer = team.trainer(model, optimizer, jobs.cross_entropy)
        frozen = None
        for batch in team.batches(jobs.images(), 33):
            if team.position.step == 2:
                model[1].requires_grad_(False)
                frozen = model[1].weight.clone()
            trainer.step(batch)
        return trainer.fingerprint(), torch.equal(frozen, model[1].weight)

    alone = ss.launch(main, devices="1xcpu")
    assert alone[1]
    assert ss.launch(main, devices="2xcpu") == alone


def test_running_statistics_are_the_average_over_lanes_by_size():
    def main(team):
        model = nn.Sequential(nn.BatchNorm1d(3), nn.Linear(3, 1))
        x = torch.randn(10, 3, generator=torch.Generator().manual_seed(0))
        one_step(team, model, lambda model, x: model(x).flatten(), ss.data.Tensors(x), 10)
        return x, model[0].running_mean, model[0].running_var, model[0].num_batches_tracked

    x, mean, var, count = ss.launch(main, devices="2xcpu", lanes=3)
    parts = x.split([4, 3, 3])
    wanted = sum(len(p) * p.mean(0) for p in parts) / 10 * 0.1
    assert torch.allclose(mean, wanted, atol=1e-6)
    wanted = 0.9 + 0.1 * sum(len(p) * p.var(0) for p in parts) / 10
    assert torch.allclose(var, wanted, atol=1e-6)
    assert count.item() == 1


class Counter(nn.Module):
    """Keeps a buffer that `how` says what becomes of."""

    def __init__(self, how, length=1):
        super().__init__()
        self.linear, self.how = nn.Linear(1, 1), how
        self.register_buffer("count", torch.zeros(length, dtype=torch.int64))

    def forward(self, x):
        if self.how == "alike":
            self.count += 3
        elif self.how == "replaced":
            self.count = self.count + 2
        elif self.how == "by content":
            self.count += int(x.sum() > 0)
        return self.linear(x)


def count_steps(team, how, length=1, steps=2):
    model = Counter(how, length)
    x = torch.tensor([[1.0], [-1.0]] * 8)
    trainer = team.trainer(
        model, torch.optim.SGD(model.parameters(), lr=0.1), lambda model, x: model(x).flatten()
    )
    for batch in team.batches(ss.data.Tensors(x), 8, shuffle=False):
        trainer.step(batch)
    return model.count.tolist()


@pytest.mark.parametrize("devices", ["1xcpu", "3xcpu"])
@pytest.mark.parametrize(("how", "value"), [("alike", 6), ("replaced", 4), ("constant", 0)])
def test_integer_buffers_that_agree_are_kept(devices, how, value):
    assert ss.launch(count_steps, devices=devices, lanes=2, args=(how,)) == [value]


@pytest.mark.parametrize("devices", ["1xcpu", "2xcpu", "3xcpu"])
def test_integer_buffers_that_differ_are_refused_by_name(devices):
    with pytest.raises(ss.BufferDiffers, match="'count' came out differently"):
        ss.launch(count_steps, devices=devices, args=("by content",))


def test_long_integer_buffers_must_stay_as_they_are():
    assert ss.launch(count_steps, devices="2xcpu", args=("constant", 100)) == [0] * 100
    with pytest.raises(ss.BufferDiffers, match="the long integer buffer 'count'"):
        ss.launch(count_steps, devices="2xcpu", args=("alike", 100))


def draw_everywhere(team):
    """What each generator gives: in lanes (through the loss), in `main`, after evaluate."""
    model = nn.Linear(1, 1)

    def loss(model, x):
        noise = random.random() + np.random.rand() + torch.rand(len(x))
        return model(x).flatten() * noise

    trainer = team.trainer(model, torch.optim.SGD(model.parameters(), lr=0.1), loss)
    data = ss.data.Tensors(torch.ones(32, 1))
    drawn = []
    for batch in team.batches(data, 16):
        drawn.append(trainer.step(batch))
        drawn.append((random.random(), np.random.rand(), torch.rand(()).item()))
    before = random.getstate()[1][:4], np.random.get_state()[1][:4].tolist(), torch.get_rng_state()
    trainer.evaluate(data, ss.metrics.mean_loss)
    after = random.getstate()[1][:4], np.random.get_state()[1][:4].tolist(), torch.get_rng_state()
    assert before[:2] == after[:2]
    assert torch.equal(before[2], after[2])
    return trainer.fingerprint(), drawn


def test_random_numbers_depend_on_the_step_and_the_lane_and_not_on_the_worker():
    alone = ss.launch(draw_everywhere, devices="1xcpu")
    assert len(set(map(str, alone[1]))) == 4, "each step has numbers of its own"
    for devices in ("2xcpu", "3xcpu"):
        assert ss.launch(draw_everywhere, devices=devices) == alone


def test_dropout_differs_between_lanes_and_steps():
    def main(team):
        masks = []

        def loss(model, x):
            mask = F.dropout(torch.ones(64), 0.5)
            masks.append(tuple(mask.tolist()))
            return model(x).flatten()

        model = nn.Linear(1, 1)
        trainer = team.trainer(model, torch.optim.SGD(model.parameters(), lr=0.1), loss)
        for batch in team.batches(ss.data.Tensors(torch.ones(16, 1)), 8):
            trainer.step(batch)
        return masks

    masks = ss.launch(main, devices="1xcpu", lanes=4)
    assert len(masks) == len(set(masks)) == 8


@pytest.mark.parametrize("devices", ["1xcpu", "2xcpu"])
def test_clipping_is_that_of_the_whole_gradient(devices):
    def main(team):
        model, _, data = jobs.plain_parts(torch.float64)
        optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
        one_step(team, model, jobs.cross_entropy, data, 37, optimizer, clip_norm=0.01)
        return [p.detach() for p in model.parameters()]

    model, _, data = jobs.plain_parts(torch.float64)
    x, y = data.fields
    F.cross_entropy(model(x[:37]), y[:37]).backward()
    norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 0.01)
    assert norm > 0.01
    torch.optim.SGD(model.parameters(), lr=1.0).step()
    for got, wanted in zip(ss.launch(main, devices=devices), model.parameters(), strict=True):
        assert torch.allclose(got, wanted.detach(), rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
@pytest.mark.parametrize("devices", ["1xcpu", "3xcpu"])
def test_a_loss_that_is_not_finite_stops_with_step_and_lanes_and_changes_nothing(devices, bad):
    def main(team):
        model = nn.Sequential(nn.Linear(1, 1), nn.BatchNorm1d(1))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        trainer = team.trainer(model, optimizer, lambda model, x: model(x).flatten() * x.flatten())
        x = torch.randn(32, 1, generator=torch.Generator().manual_seed(0))
        x[16 + 5], x[16 + 14] = bad, bad
        for batch in team.batches(ss.data.Tensors(x), 16, shuffle=False):
            before = trainer.fingerprint()
            try:
                trainer.step(batch)
            except ss.NonFiniteLoss as error:
                return str(error), trainer.fingerprint() == before
        raise AssertionError

    message, untouched = ss.launch(main, devices=devices)
    assert untouched
    assert message.startswith("step 1: the loss is not finite in lane 2 (")
    assert ", lane 7 (" in message


def test_a_norm_that_is_not_finite_stops_too():
    def main(team):
        model = nn.Linear(1, 1)
        loss = lambda model, x: (model(x).flatten() * 0).sqrt()  # noqa: E731
        one_step(team, model, loss, ss.data.Tensors(torch.ones(8, 1)), 8, clip_norm=1.0)

    with pytest.raises(ss.NonFiniteLoss, match="step 0: the gradient's norm is"):
        ss.launch(main, devices="2xcpu")


@pytest.mark.parametrize("devices", ["1xcpu", "2xcpu", "4xcpu"])
@pytest.mark.parametrize("samples", [1, 3, 9])
def test_fewer_samples_than_lanes(devices, samples):
    def main(team):
        model, _, data = jobs.plain_parts(torch.float64)
        data = data.first(samples)
        trainer = one_step(team, model, jobs.cross_entropy, data, 100)
        return [p.detach() for p in trainer.model.parameters()]

    model, _, data = jobs.plain_parts(torch.float64)
    x, y = data.fields
    F.cross_entropy(model(x[:samples]), y[:samples]).backward()
    torch.optim.SGD(model.parameters(), lr=0.1).step()
    for got, wanted in zip(ss.launch(main, devices=devices), model.parameters(), strict=True):
        assert torch.allclose(got, wanted.detach(), rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize("devices", ["1xcpu", "3xcpu"])
def test_weights_that_differ_in_every_lane(devices):
    def weighted(model, x, y, w):
        losses = F.cross_entropy(model(x), y, reduction="none")
        return (losses * w).sum(), w.sum()

    def parts():
        model, _, data = jobs.plain_parts(torch.float64)
        x, y = data.first(37).fields
        return model, x, y, torch.arange(37, dtype=torch.float64)

    def main(team):
        model, *fields = parts()
        trainer = one_step(team, model, weighted, ss.data.Tensors(*fields), 37)
        return [p.detach() for p in trainer.model.parameters()]

    model, x, y, w = parts()
    total, weight = weighted(model, x, y, w)
    (total / weight).backward()
    torch.optim.SGD(model.parameters(), lr=0.1).step()
    for got, wanted in zip(ss.launch(main, devices=devices), model.parameters(), strict=True):
        assert torch.allclose(got, wanted.detach(), rtol=1e-12, atol=1e-14)


def test_verbs_one_by_one_are_a_step():
    def main(team, verbs):
        model = ss.models.mlp(100, (8,), 5)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        trainer = team.trainer(model, optimizer, jobs.cross_entropy)
        for batch in team.batches(jobs.images(), 33):
            if verbs:
                trainer.backward(batch)
                trainer.exchange()
                trainer.update()
            else:
                trainer.step(batch)
        return trainer.fingerprint()

    alone = ss.launch(main, devices="1xcpu", args=(False,))
    assert ss.launch(main, devices="2xcpu", args=(True,)) == alone


def test_complex_parameters():
    class Complex(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(torch.randn(4, 3, dtype=torch.complex64))

        def forward(self, x):
            return (x.to(torch.complex64) @ self.weight).abs().sum(1)

    def main(team):
        data = ss.data.Tensors(torch.randn(20, 4))
        trainer = one_step(team, Complex(), lambda model, x: model(x), data, 20)
        return trainer.fingerprint()

    assert ss.launch(main, devices="2xcpu") == ss.launch(main, devices="1xcpu")


@pytest.mark.parametrize("devices", ["1xcpu", "2xcpu", "3xcpu"])
def test_evaluation_leaves_buffers_as_they_were(devices):
    def main(team):
        model = Counting()
        trainer = team.trainer(model, sgd(model), square)
        data = ss.data.Tensors(torch.ones(100, 4))
        for batch in team.batches(data, 50):
            trainer.step(batch)
        before = trainer.fingerprint()
        trainer.evaluate(data, ss.metrics.mean_loss, chunk=7)
        return model.seen.item(), model.mean.item(), before == trainer.fingerprint()

    assert ss.launch(main, devices=devices) == (2, 2, True)


class Counting(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = torch.nn.Linear(4, 2)
        self.register_buffer("seen", torch.zeros((), dtype=torch.int64))
        self.register_buffer("mean", torch.zeros(()))

    def forward(self, x):
        self.seen += 1
        self.mean += 1
        return self.linear(x)


def square(model, x):
    return model(x).square().sum(1)


def sgd(model):
    return torch.optim.SGD(model.parameters(), lr=0.01)


@pytest.mark.parametrize("devices", ["1xcpu", "2xcpu"])
def test_weights_that_the_forward_pass_changes_are_refused_by_name(devices):
    def main(team):
        model = torch.nn.Embedding(20, 8, max_norm=1.0)
        trainer = team.trainer(model, sgd(model), square)
        for batch in team.batches(ss.data.Tensors(torch.arange(40) % 20), 20):
            trainer.step(batch)

    with pytest.raises(ss.LossError, match="changed the parameter 'weight' in place"):
        ss.launch(main, devices=devices)


@pytest.mark.parametrize("changes", [False, True])
def test_complex_buffers_stay_or_are_refused_by_name(changes):
    class Rotated(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = torch.nn.Linear(4, 2)
            self.register_buffer("turn", torch.ones(1, dtype=torch.complex64) * 1j)

        def forward(self, x):
            if changes:
                self.turn += 1
            return self.linear(x)

    def main(team):
        model = Rotated()
        trainer = team.trainer(model, sgd(model), square)
        for batch in team.batches(ss.data.Tensors(torch.ones(16, 4)), 8):
            trainer.step(batch)
        return model.turn.item()

    if changes:
        with pytest.raises(ss.BufferDiffers, match="the complex buffer 'turn'"):
            ss.launch(main, devices="2xcpu")
    else:
        assert ss.launch(main, devices="2xcpu") == 1j
