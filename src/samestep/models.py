"""The networks of the classic tutorials, and the recipe that `samestep train` follows.

All take images of 1×28×28 and give ten classes.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from samestep import data, metrics
from samestep.memory import shared_fairly
from samestep.team import Team

__all__ = ["Recipe", "lenet", "lenet_gluon", "mlp", "resnet18", "train"]


def lenet(classes: int = 10) -> nn.Sequential:
    """The LeNet of the from-scratch tutorial: 129,068 parameters."""
    return nn.Sequential(
        nn.Conv2d(1, 20, 3),
        nn.ReLU(),
        nn.AvgPool2d(2),
        nn.Conv2d(20, 50, 5),
        nn.ReLU(),
        nn.AvgPool2d(2),
        nn.Flatten(),
        nn.Linear(800, 128),
        nn.ReLU(),
        nn.Linear(128, classes),
    )


def lenet_gluon(classes: int = 10) -> nn.Sequential:
    """The LeNet of the Gluon tutorial, with max pooling."""
    return nn.Sequential(
        nn.Conv2d(1, 6, 5),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(6, 16, 3),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Linear(400, 120),
        nn.ReLU(),
        nn.Linear(120, 84),
        nn.ReLU(),
        nn.Linear(84, classes),
    )


def mlp(inputs: int = 784, hidden: tuple[int, ...] = (256,), classes: int = 10) -> nn.Sequential:
    """Fully connected layers with ReLU between them."""
    sizes = (inputs, *hidden)
    layers: list[nn.Module] = [nn.Flatten()]
    for a, b in pairwise(sizes):
        layers += [nn.Linear(a, b), nn.ReLU()]
    return nn.Sequential(*layers, nn.Linear(sizes[-1], classes))


class _Block(nn.Module):
    """Two 3×3 convolutions beside a shortcut."""

    def __init__(self, inputs: int, outputs: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(inputs, outputs, 3, stride, 1, bias=False)
        self.norm1 = nn.BatchNorm2d(outputs)
        self.conv2 = nn.Conv2d(outputs, outputs, 3, 1, 1, bias=False)
        self.norm2 = nn.BatchNorm2d(outputs)
        self.shortcut: nn.Module = nn.Identity()
        if stride != 1 or inputs != outputs:
            self.shortcut = nn.Sequential(
                nn.Conv2d(inputs, outputs, 1, stride, bias=False), nn.BatchNorm2d(outputs)
            )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = F.relu(self.norm1(self.conv1(x)))
        return F.relu(self.norm2(self.conv2(y)) + self.shortcut(x))


def resnet18(classes: int = 10, channels: int = 1) -> nn.Sequential:
    """ResNet-18 for small images: a 3×3 stem of stride 1 and no max pooling."""
    layers: list[nn.Module] = [
        nn.Conv2d(channels, 64, 3, 1, 1, bias=False),
        nn.BatchNorm2d(64),
        nn.ReLU(),
    ]
    width = 64
    for stage, outputs in enumerate((64, 128, 256, 512)):
        layers += [_Block(width, outputs, 1 if stage == 0 else 2), _Block(outputs, outputs, 1)]
        width = outputs
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(512, classes))


MODELS: dict[str, Callable[[], nn.Module]] = {
    "lenet": lenet,
    "lenet-gluon": lenet_gluon,
    "mlp": mlp,
    "resnet18": resnet18,
}

DATA: dict[str, Callable[..., tuple[data.Tensors, data.Tensors]]] = {
    "fashion-mnist": data.fashion_mnist,
    "mnist": data.mnist,
    "shapes": lambda folder=None: data.shapes(),
}


@dataclass(frozen=True)
class Recipe:
    """A training on images, as the tutorials do it: plain SGD on the cross entropy."""

    model: str = "lenet"
    data: str = "fashion-mnist"
    data_dir: str | None = None
    batch_size: int = 256
    lr: float = 0.2
    epochs: int = 10
    compile: bool = False
    precision: str = "fp32"
    samples: int | None = None
    save_to: str | None = None


def cross_entropy(model: nn.Module, images: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """One loss per example."""
    return F.cross_entropy(model(images), labels, reduction="none")


OPTIMIZERS: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "sgd": torch.optim.SGD,
    "momentum": partial(torch.optim.SGD, momentum=0.9),
    "adam": torch.optim.Adam,
    "adamw": torch.optim.AdamW,
}


def weigh(
    team: Team, model: str, optimizer: str, store: str, batch_size: int, width: int, folder: str
) -> None:
    """`main` of `samestep memory`: each worker writes what it needs, and what it took."""
    made = mlp(784, (width, width)) if model == "mlp" and width else MODELS[model]()
    trainer = team.trainer(
        made, OPTIMIZERS[optimizer](made.parameters(), lr=1e-3), cross_entropy, store=store
    )
    images, _ = data.shapes(train=4 * batch_size, test=1)
    table: dict[str, Any] = {}
    for batch in team.batches(images, batch_size):
        table = table or {"device": str(team.device), **trainer.memory(batch)}
        trainer.step(batch)
    for batch in team.batches(images, batch_size):
        table["measured"] = trainer.memory(batch)["measured"]
        trainer.step(batch)
    table["process"] = shared_fairly()
    Path(folder, f"{team.number}.json").write_text(json.dumps(table))


def train(team: Team, recipe: Recipe) -> dict[str, Any]:
    """`main` of `samestep train`."""
    training, test = DATA[recipe.data](recipe.data_dir)
    if recipe.samples is not None:
        training = training.first(recipe.samples)
    model = MODELS[recipe.model]()
    optimizer = torch.optim.SGD(model.parameters(), lr=recipe.lr)
    trainer = team.trainer(
        model, optimizer, cross_entropy, precision=recipe.precision, compile=recipe.compile
    )
    seconds, accuracy, loss = [], float("nan"), float("nan")
    for epoch in team.epochs(recipe.epochs):
        began = time.perf_counter()
        for batch in team.batches(training, recipe.batch_size):
            trainer.step(batch)
        seconds.append(time.perf_counter() - began)
        loss, accuracy = trainer.epoch_loss(), trainer.evaluate(test, metrics.accuracy)
        team.log(epoch=epoch + 1, loss=loss, accuracy=accuracy, seconds=seconds[-1])
    if recipe.save_to is not None:
        trainer.save(recipe.save_to)
    return {
        "loss": loss,
        "accuracy": accuracy,
        "seconds_per_epoch": sum(seconds) / max(len(seconds), 1),
        "samples_per_second": len(training) * len(seconds) / max(sum(seconds), 1e-9),
        "devices": team.devices,
        "fingerprint": trainer.fingerprint(),
    }
