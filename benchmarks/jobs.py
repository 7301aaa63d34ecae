"""The jobs that every contender does: the same model, data, batches, loss and optimizer.

A job is a plain record; whoever trains it decides nothing but how. The data are tensors in memory,
and `Tensors.gather` takes a whole batch out of them at once, so nobody is measured by its loader.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import nn

import samestep as ss
from samestep import seeds
from samestep.models import cross_entropy

SEED = 0


@dataclass(frozen=True)
class Job:
    """`steps` are those of one turn; `close` is how far the losses of two contenders may be apart
    after the same steps, as a part of the loss. `weigh` gives the weight of samples in the loss;
    None: each counts 1."""

    title: str
    model: Callable[[], nn.Module]
    data: Callable[[], ss.data.Tensors]
    optimizer: Callable[[Any], torch.optim.Optimizer]
    loss: Callable[..., Any]
    batch: int
    steps: int
    close: float
    weigh: Callable[[ss.data.Tensors, torch.Tensor], float] | None = None

    def fresh_model(self) -> nn.Module:
        """The model, with the same weights for everybody."""
        torch.manual_seed(SEED)
        return self.model()

    def batches(self, samples: int) -> Iterator[torch.Tensor]:
        """The samples of each global batch, without end: those that `team.batches` gives."""
        epoch = 0
        while True:
            order = seeds.order(samples, SEED, epoch, shuffle=True)
            for start in range(0, samples - self.batch + 1, self.batch):
                yield order[start : start + self.batch]
            epoch += 1

    def mean_loss(self, model: nn.Module, data: ss.data.Tensors) -> float:
        """The loss over the first samples, by which contenders are compared."""
        was_training = model.training
        model.eval()
        with torch.no_grad():
            result = self.loss(model, *data.gather(torch.arange(min(len(data), 512))))
        model.train(was_training)
        total, weight = result if isinstance(result, tuple) else (result.sum(), len(result))
        return float(total / weight)


def images(count: int) -> ss.data.Tensors:
    return ss.data.fashion_mnist()[0].first(count)


def numbers() -> ss.data.Tensors:
    """Points in 64 dimensions, of ten classes."""
    generator = torch.Generator().manual_seed(SEED)
    centres = torch.randn(10, 64, generator=generator)
    labels = torch.randint(10, (20_480,), generator=generator)
    return ss.data.Tensors(
        centres[labels] + torch.randn(len(labels), 64, generator=generator), labels
    )


VOCABULARY, LONGEST, GRAIN = 1000, 128, 16


class Trim:
    """Cuts padding off, to a multiple of 16 tokens so that compilers see few shapes."""

    draws = False

    def __call__(
        self, tokens: torch.Tensor, lengths: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        longest = -(-int(lengths.max()) // GRAIN) * GRAIN
        return tokens[:, :longest], lengths


def sentences() -> ss.data.Tensors:
    """Sequences of 16 to 128 tokens in which a token mostly follows from the one before."""
    generator = torch.Generator().manual_seed(SEED)
    count = 4096
    lengths = torch.randint(16, LONGEST + 1, (count,), generator=generator)
    follows = torch.randperm(VOCABULARY, generator=generator)
    tokens = torch.randint(VOCABULARY, (count, LONGEST), generator=generator)
    for place in range(1, LONGEST):
        is_kept = torch.rand(count, generator=generator) < 0.8
        tokens[:, place] = torch.where(is_kept, follows[tokens[:, place - 1]], tokens[:, place])
    return ss.data.Tensors(tokens, lengths, transform=Trim(), cost=lengths)


def gpt2() -> nn.Module:
    """GPT-2 of the transformers library, with two layers of 128, 0.5 million parameters."""
    from transformers import GPT2Config, GPT2LMHeadModel

    config = GPT2Config(
        vocab_size=VOCABULARY, n_positions=LONGEST, n_embd=128, n_layer=2, n_head=4,
        resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0, use_cache=False,
    )  # fmt: skip
    return GPT2LMHeadModel(config)


def next_token(model: nn.Module, tokens: torch.Tensor, lengths: torch.Tensor) -> tuple[Any, Any]:
    """Sum and number of the losses of all tokens that have one before them."""
    is_there = torch.arange(tokens.shape[1], device=tokens.device) < lengths[:, None]
    logits = model(tokens, attention_mask=is_there.long()).logits[:, :-1]
    losses = nn.functional.cross_entropy(
        logits.flatten(0, 1), tokens[:, 1:].flatten(), reduction="none"
    )
    counts = is_there[:, 1:].flatten()
    return (losses * counts).sum(), counts.sum()


def predicted(data: ss.data.Tensors, indices: torch.Tensor) -> float:
    return float((data.fields[1][indices] - 1).sum())


def sgd(lr: float, **rest: Any) -> Callable[[Any], torch.optim.Optimizer]:
    return partial(torch.optim.SGD, lr=lr, **rest)


def last(make: Callable[[], nn.Module]) -> nn.Module:
    """A model whose convolutions have their channels last in memory."""
    return make().to(memory_format=torch.channels_last)


def _lenet(batch: int, steps: int) -> Job:
    return Job(
        f"LeNet on Fashion-MNIST, batch {batch}", ss.models.lenet, partial(images, 60_000),
        sgd(0.1), cross_entropy, batch, steps, 0.02,
    )  # fmt: skip


JOBS = {
    "lenet-256": _lenet(256, 40),
    "lenet-512": _lenet(512, 20),
    "lenet-last": replace(
        _lenet(256, 40),
        title="LeNet on Fashion-MNIST, batch 256, everybody told to keep channels last",
        model=partial(last, ss.models.lenet),
    ),
    "resnet18": Job(
        "ResNet-18 on 4,096 images of Fashion-MNIST, batch 64",
        ss.models.resnet18, partial(images, 4096), sgd(0.02, momentum=0.9), cross_entropy, 64, 2,
        # Batch normalisation sees lanes, halves or the whole: not quite the same training.
        0.25,
    ),
    "transformer": Job(
        "GPT-2 with two layers on sequences of 16 to 128 tokens, batch 64",
        gpt2, sentences, partial(torch.optim.AdamW, lr=1e-3), next_token, 64, 6, 0.01, predicted,
    ),
    "mlp": Job(
        "MLP with 10 million parameters, batch 64",
        partial(ss.models.mlp, 784, (2800, 2800)), partial(images, 20_480), sgd(0.05),
        cross_entropy, 64, 20, 0.01,
    ),
    "tiny": Job(
        "MLP with 10 thousand parameters, batch 64",
        partial(ss.models.mlp, 64, (96, 32)), numbers, sgd(0.05), cross_entropy, 64, 500, 0.01,
    ),
}  # fmt: skip
