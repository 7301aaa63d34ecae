"""Convolutions run their lanes with channels last, and nobody outside of a lane sees it."""

from __future__ import annotations

from contextlib import nullcontext

import pytest
import torch
from torch import nn

import jobs
import samestep as ss
from samestep.channels import ChannelsLast

CPU = torch.device("cpu")


def orders(team, make):
    """Whether the first convolution's weights are in the usual order in lanes, and after a step."""
    model, seen = make(), []

    def loss(model, x, y):
        weight = next(m.weight for m in model.modules() if isinstance(m, nn.Conv2d))
        seen.append(weight.is_contiguous())
        return jobs.cross_entropy(model, x, y)

    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    jobs.fit(team, model, optimizer, loss, jobs.images(99), 2, 47)
    return seen[-1], all(weight.is_contiguous() for weight in model.parameters())


class Second(nn.Module):
    """Its only convolution has two channels in."""

    def __init__(self):
        super().__init__()
        self.conv, self.last = nn.Conv2d(2, 6, 3), nn.Linear(384, 5)

    def forward(self, x):
        return self.last(self.conv(x.expand(-1, 2, -1, -1)).relu().flatten(1))


class Viewing(Second):
    def forward(self, x):
        return self.last(self.conv(x.expand(-1, 2, -1, -1)).relu().view(len(x), 384))


def test_lanes_see_channels_last_and_the_user_the_usual_order():
    assert ss.launch(orders, devices="2xcpu", args=(Second,)) == (False, True)


def test_a_model_that_wants_the_usual_order_gets_it():
    assert ss.launch(orders, devices="2xcpu", args=(Viewing,)) == (True, True)


def test_large_convolutions_doubles_and_gpus_are_left_alone():
    large = nn.Conv2d(512, 512, 3)
    assert ChannelsLast(large, CPU).is_settled
    assert ChannelsLast(Second().double(), CPU).is_settled
    assert ChannelsLast(Second(), torch.device("cuda")).is_settled
    assert not ChannelsLast(Second(), CPU).is_settled


@pytest.mark.parametrize("fails", [False, True])
def test_weights_come_back_whatever_happens(fails):
    model = Second()
    channels, before = ChannelsLast(model, CPU), model.conv.weight.data_ptr()
    value = model.conv.weight.detach().clone()
    with pytest.raises(ZeroDivisionError) if fails else nullcontext():
        with channels.lanes():
            assert not model.conv.weight.is_contiguous()
            assert torch.equal(model.conv.weight, value)
            if fails:
                raise ZeroDivisionError
    assert model.conv.weight.data_ptr() == before
    assert model.conv.weight.is_contiguous()


def test_a_try_that_runs_out_of_memory_decides_nothing():
    channels = ChannelsLast(Second(), CPU)

    def attempt():
        raise MemoryError

    assert channels.settle(attempt)


def test_a_weight_that_is_computed_is_not_computed_by_looking():
    model = Second()
    torch.nn.utils.parametrizations.spectral_norm(model.conv)
    before = {name: buffer.clone() for name, buffer in model.named_buffers()}
    assert ChannelsLast(model, CPU).is_settled
    assert before
    assert all(torch.equal(buffer, before[name]) for name, buffer in model.named_buffers())
