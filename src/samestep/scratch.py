"""Data parallelism from scratch: what the classic tutorials do, in one process.

Every device holds a copy of the parameters. A batch is split, each device runs its shard forward
and backward, the gradients are summed, and every copy takes the same step:

    params = lenet_params()
    copies = [get_params(params, device) for device in devices]
    for X, y in batches:
        train_batch(X, y, copies, devices, lr=0.2)

This is for reading and for comparison. `samestep.launch` gives the same training on processes of
their own, and the same bits on any number of them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
import torch.nn.functional as F

from samestep.errors import UsageError

__all__ = ["allreduce", "get_params", "lenet", "lenet_params", "split_batch", "train_batch"]

Params = list[torch.Tensor]
Device = torch.device | str


def lenet_params() -> Params:
    """Parameters of `samestep.models.lenet`, in its order."""
    from samestep import models

    return [parameter.detach().clone() for parameter in models.lenet().parameters()]


def lenet(X: torch.Tensor, params: Params) -> torch.Tensor:
    """LeNet as a function of its input and its parameters."""
    w1, b1, w2, b2, w3, b3, w4, b4 = params
    h = F.avg_pool2d(F.relu(F.conv2d(X, w1, b1)), 2)
    h = F.avg_pool2d(F.relu(F.conv2d(h, w2, b2)), 2)
    h = F.relu(F.linear(h.flatten(1), w3, b3))
    return F.linear(h, w4, b4)


def get_params(params: Sequence[torch.Tensor], device: Device) -> Params:
    """A copy of the parameters on one device, ready to collect gradients."""
    return [p.detach().clone().to(device).requires_grad_() for p in params]


def allreduce(data: Sequence[torch.Tensor]) -> None:
    """Add up one tensor per device, and give every device the sum. In place."""
    for tensor in data[1:]:
        data[0].add_(tensor.to(data[0].device))
    for tensor in data[1:]:
        tensor.copy_(data[0])


def split_batch(
    X: torch.Tensor, y: torch.Tensor, devices: Sequence[Device]
) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """Cut a batch into one shard per device; the first ones get the samples left over."""
    if len(X) != len(y):
        raise UsageError(f"split_batch: X has {len(X)} samples and y has {len(y)}")
    if not devices or len(X) < len(devices):
        raise UsageError(
            f"split_batch: {len(X)} samples for {len(devices)} devices would leave a device "
            "without any; use at most as many devices as samples"
        )
    X_parts = torch.tensor_split(X, len(devices))
    y_parts = torch.tensor_split(y, len(devices))
    return (
        [part.to(device) for part, device in zip(X_parts, devices, strict=True)],
        [part.to(device) for part, device in zip(y_parts, devices, strict=True)],
    )


def train_batch(
    X: torch.Tensor,
    y: torch.Tensor,
    device_params: Sequence[Params],
    devices: Sequence[Device],
    lr: float,
    net: Callable[[torch.Tensor, Params], torch.Tensor] = lenet,
) -> float:
    """One step of SGD on the whole batch; returns its mean loss."""
    X_shards, y_shards = split_batch(X, y, devices)
    # A sum on each device, so that shards of different sizes weigh what they should.
    losses = [
        F.cross_entropy(net(X_shard, params), y_shard, reduction="sum")
        for X_shard, y_shard, params in zip(X_shards, y_shards, device_params, strict=True)
    ]
    for loss in losses:
        loss.backward()  # type: ignore[no-untyped-call]
    with torch.no_grad():
        for copies in zip(*device_params, strict=True):
            grads = [copy.grad for copy in copies if copy.grad is not None]
            allreduce(grads)
            for copy, grad in zip(copies, grads, strict=True):
                copy.sub_(grad, alpha=lr / len(X))
                copy.grad = None
    return sum(loss.item() for loss in losses) / len(X)
