"""Trainings for the tests: each is a `main` that returns the fingerprint."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import nn

import samestep as ss


def images(count=203, channels=1, size=10, classes=5, seed=1):
    generator = torch.Generator().manual_seed(seed)
    return ss.data.Tensors(
        torch.randn(count, channels, size, size, generator=generator),
        torch.randint(0, classes, (count,), generator=generator),
    )


def cross_entropy(model, x, y):
    return F.cross_entropy(model(x), y, reduction="none")


def fit(team, model, optimizer, loss, dataset, steps, batch_size, scheduler=None, **options):
    """Train for `steps` steps, epoch after epoch."""
    trainer = team.trainer(model, optimizer, loss, **options)
    for _ in team.epochs(1000):
        for batch in team.batches(dataset, batch_size):
            trainer.step(batch)
            if scheduler is not None:
                scheduler.step()
            if team.position.step == steps:
                return trainer
    raise AssertionError


def mlp(team, batch_size=33):
    model = ss.models.mlp(100, (32, 16), 5)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    return fit(team, model, optimizer, cross_entropy, images(), 15, batch_size).fingerprint()


def convolution(team, steps=12):
    """BatchNorm, dropout and momentum; the last batch of an epoch has 5 samples."""
    model = nn.Sequential(
        nn.Conv2d(1, 6, 3), nn.BatchNorm2d(6), nn.ReLU(), nn.Dropout(0.2), nn.Flatten(),
        nn.Linear(384, 5),
    )  # fmt: skip
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, weight_decay=1e-3)
    return fit(team, model, optimizer, cross_entropy, images(99), steps, 47).fingerprint()


def lenet(team, batch_size=47):
    """Run with channels last."""
    model = ss.models.lenet()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    data = images(120, size=28, classes=10)
    return fit(team, model, optimizer, cross_entropy, data, 5, batch_size, clip_norm=1.0)


def lenet_print(team):
    return lenet(team).fingerprint()


class Viewing(nn.Module):
    """Wants memory in the usual order after a convolution."""

    def __init__(self):
        super().__init__()
        self.conv, self.last = nn.Conv2d(1, 6, 3), nn.Linear(384, 5)

    def forward(self, x):
        return self.last(self.conv(x).relu().view(len(x), 384))


def viewing(team):
    model = Viewing()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    return fit(team, model, optimizer, cross_entropy, images(99), 5, 47).fingerprint()


def costly(team):
    """Samples of different lengths, given by what they cost; like ones share a lane."""
    generator = torch.Generator().manual_seed(5)
    lengths = torch.randint(2, 17, (120,), generator=generator)
    tokens = torch.randint(0, 30, (120, 16), generator=generator)
    data = ss.data.Tensors(
        tokens, lengths, transform=lambda x, n: (x[:, : int(n.max())], n), cost=lengths
    )
    model = nn.Sequential(nn.Embedding(30, 8), nn.Linear(8, 30))

    def loss(model, tokens, lengths):
        is_there = torch.arange(tokens.shape[1]) < lengths[:, None]
        losses = F.cross_entropy(model(tokens).transpose(1, 2), tokens, reduction="none")
        return (losses * is_there).sum(), is_there.sum()

    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    return fit(team, model, optimizer, loss, data, 12, 50).fingerprint()


def residual(team):
    model = ss.models.resnet18()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    data = images(24, size=12, classes=10)
    return fit(team, model, optimizer, cross_entropy, data, 2, 16).fingerprint()


def sentences(count=120, vocabulary=50, longest=12):
    """Token sequences of different lengths, padded by the collate function."""
    generator = torch.Generator().manual_seed(3)

    class Sentences(torch.utils.data.Dataset):
        lengths = torch.randint(3, longest, (count,), generator=generator).tolist()
        tokens = torch.randint(1, vocabulary, (count, longest), generator=generator)

        def __len__(self):
            return count

        def __getitem__(self, index):
            return self.tokens[index, : self.lengths[index]]

    return Sentences()


def pad(samples):
    return (nn.utils.rnn.pad_sequence(samples, batch_first=True),)


class Encoder(nn.Module):
    """Embedding (tied to the output), positions, dropout, attention."""

    def __init__(self, vocabulary=50, width=16):
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, width)
        layer = nn.TransformerEncoderLayer(width, 2, 32, dropout=0.1, batch_first=True)
        self.layers = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.output = nn.Linear(width, vocabulary, bias=False)
        self.output.weight = self.embedding.weight

    def forward(self, tokens):
        hidden = self.layers(self.embedding(tokens), src_key_padding_mask=tokens == 0)
        return self.output(hidden)


def token_loss(model, tokens):
    """(sum, weight): another weight in every lane, since lengths differ."""
    logits = model(tokens[:, :-1])
    targets = tokens[:, 1:]
    losses = F.cross_entropy(logits.transpose(1, 2), targets, reduction="none")
    weights = (targets != 0) * (1.0 + 0.1 * (targets % 3))
    return (losses * weights).sum(), weights.sum()


def encoder(team, steps=8, **options):
    """Variable lengths, weights per token, AdamW, a schedule and clipping."""
    model = Encoder()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(1, (step + 1) / 5))
    trainer = team.trainer(model, optimizer, token_loss, clip_norm=0.5, **options)
    for _ in team.epochs(100):
        for batch in team.batches(sentences(), 32, collate=pad):
            trainer.step(batch)
            scheduler.step()
            if team.position.step == steps:
                return trainer.fingerprint()
    raise AssertionError


def bert(team):
    """A model that nobody here wrote."""
    from transformers import BertConfig, BertForSequenceClassification

    config = BertConfig(
        vocab_size=60, hidden_size=16, num_hidden_layers=2, num_attention_heads=2,
        intermediate_size=24, max_position_embeddings=16, num_labels=3,
    )  # fmt: skip
    model = BertForSequenceClassification(config)

    def loss(model, tokens, labels):
        logits = model(input_ids=tokens).logits
        return F.cross_entropy(logits, labels, reduction="none")

    generator = torch.Generator().manual_seed(2)
    data = ss.data.Tensors(
        torch.randint(0, 60, (64, 12), generator=generator),
        torch.randint(0, 3, (64,), generator=generator),
    )
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    return fit(team, model, optimizer, loss, data, 4, 24, clip_norm=1.0).fingerprint()


def gpt(team):
    """Gradient checkpointing, dropout, tied weights, a causal mask buffer."""
    from transformers import GPT2Config, GPT2LMHeadModel

    config = GPT2Config(
        vocab_size=60, n_positions=16, n_embd=16, n_layer=2, n_head=2, loss_type="ForCausalLMLoss"
    )
    model = GPT2LMHeadModel(config)
    model.gradient_checkpointing_enable({"use_reentrant": False})
    model.train()

    def loss(model, tokens):
        logits = model(input_ids=tokens).logits[:, :-1]
        return F.cross_entropy(logits.transpose(1, 2), tokens[:, 1:], reduction="none")

    generator = torch.Generator().manual_seed(2)
    data = ss.data.Tensors(torch.randint(0, 60, (50, 12), generator=generator))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    return fit(team, model, optimizer, loss, data, 4, 20).fingerprint()


def half(team):
    model = ss.models.mlp(100, (32,), 5)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    options = {"precision": "bf16"}
    return fit(team, model, optimizer, cross_entropy, images(), 8, 40, **options).fingerprint()


def compiled(team):
    """Two lane sizes, dropout and BatchNorm through torch.compile."""
    model = nn.Sequential(
        nn.Flatten(), nn.Linear(100, 16), nn.BatchNorm1d(16), nn.Dropout(0.3), nn.Linear(16, 5)
    )
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    trainer = fit(team, model, optimizer, cross_entropy, images(60), 4, 33, compile=True)
    return trainer.fingerprint()


def rosy(team):
    """Lazy modules, frozen and unused parameters, groups, a branch that some lanes do not take."""

    class Odd(nn.Module):
        def __init__(self):
            super().__init__()
            self.convolution = nn.LazyConv2d(4, 3)
            self.first = nn.LazyLinear(8)
            self.sometimes = nn.Linear(8, 8)
            self.unused = nn.Linear(3, 3)
            self.frozen = nn.Linear(8, 8)
            self.frozen.requires_grad_(False)
            self.last = nn.Linear(8, 5)

        def forward(self, x):
            h = F.relu(self.first(self.convolution(x).flatten(1)))
            if x.mean() > 0:
                h = h + self.sometimes(h)
            return self.last(h + self.frozen(h) + self.last.weight.sum())

    model = Odd()
    optimizer = torch.optim.AdamW(
        [
            {"params": [*model.first.parameters(), *model.convolution.parameters()], "lr": 1e-2},
            {"params": [*model.sometimes.parameters(), *model.last.parameters()], "lr": 1e-3},
            {"params": model.unused.parameters(), "weight_decay": 0.5},
        ]
    )
    trainer = fit(team, model, optimizer, cross_entropy, images(40), 6, 19)
    assert not any(optimizer.state[p] for p in model.unused.parameters())
    return trainer.fingerprint()


class Noisy(torch.utils.data.Dataset):
    """Augmented with every global generator."""

    def __init__(self, count=37):
        self.data = images(count)

    def __len__(self):
        return len(self.data)

    def __getitem__(self, index):
        import random

        import numpy as np

        x, y = self.data[index]
        noise = random.random() + np.random.rand() + torch.rand(()).item()
        return x + noise, y


def augmented(team, loaders=1):
    model = ss.models.mlp(100, (8,), 5)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    trainer = team.trainer(model, optimizer, cross_entropy)
    for _ in team.epochs(2):
        for batch in team.batches(Noisy(), 16, loaders=loaders):
            trainer.step(batch)
    return trainer.fingerprint()


def against_torch(team, dtype, steps=50):
    """Trains, and returns the weights, for comparison with plain PyTorch on whole batches."""
    model, optimizer, data = plain_parts(dtype)
    trainer = team.trainer(model, optimizer, cross_entropy)
    while team.position.step < steps:
        for batch in team.batches(data, 37, shuffle=False):
            trainer.step(batch)
            if team.position.step == steps:
                break
    return [p.detach().clone() for p in model.parameters()]


def plain_parts(dtype):
    torch.manual_seed(0)
    model = ss.models.lenet_gluon().to(dtype)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    full = images(200, size=28, classes=10)
    return model, optimizer, ss.data.Tensors(full.fields[0].to(dtype), full.fields[1])


def plain_torch(dtype, steps=50):
    model, optimizer, data = plain_parts(dtype)
    x, y = data.fields
    per_epoch = math.ceil(len(x) / 37)
    for step in range(steps):
        part = slice(step % per_epoch * 37, step % per_epoch * 37 + 37)
        optimizer.zero_grad()
        F.cross_entropy(model(x[part]), y[part]).backward()
        optimizer.step()
    return [p.detach().clone() for p in model.parameters()]
