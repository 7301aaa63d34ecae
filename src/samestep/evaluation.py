"""Evaluation: every sample counted once, in chunks, through the tree and exchange of gradients."""

from __future__ import annotations

import contextlib
import math
from typing import Any

import torch
from torch import nn

from samestep import seeds
from samestep.board import Phase, kind_of
from samestep.contract import TrainersTeam
from samestep.data import Collate, Loader, Unit, length_of, to_device
from samestep.exchange import Exchange, Shape, Work
from samestep.lanes import cut, reduction, share
from samestep.loss import Arithmetic, Loss, evaluating, weighed
from samestep.metrics import Metric, Seen
from samestep.results import Scratch, all_buffers
from samestep.tree import Tree

__all__ = ["Evaluation"]


class Evaluation:
    """Evaluates one model; the exchanges it needs are kept from one time to the next."""

    def __init__(
        self, team: TrainersTeam, model: nn.Module, loss: Loss, arithmetic: Arithmetic, number: int
    ) -> None:
        self._team, self._model, self._loss = team, model, loss
        self._arithmetic, self._number = arithmetic, number
        self._exchanges: dict[tuple[int, Shape], Exchange] = {}

    def totals(
        self,
        dataset: Any,
        metrics: tuple[Metric, ...],
        chunk: int,
        collate: Collate | None,
        loaders: int,
    ) -> list[torch.Tensor]:
        """The sum over all chunks, for each metric: through the same tree and exchange as
        gradients."""
        team, samples = self._team, length_of(dataset)
        buffers = all_buffers(self._model)
        chunks = cut(samples, math.ceil(samples / chunk))
        runs = share(len(chunks), team.speeds)
        mine = runs[team.place]

        def unit(number: int) -> Unit:
            return Unit(0, number, torch.arange(chunks[number].start, chunks[number].stop))

        loader = Loader(
            dataset,
            seed=team.seed,
            epoch=-1,
            collate=collate,
            loaders=loaders,
            ahead=[unit(number) for number in mine],
        )
        with (
            contextlib.closing(loader),
            seeds.undisturbed(),
            evaluating(self._model),
            torch.no_grad(),
            self._arithmetic.autocast(),
        ):
            # A worker without a chunk looks at the first one, to learn how long the counts are.
            known = mine.start if mine else 0
            first = self._count(metrics, loader, unit(known))
            buffers.restore()
            shapes = [count.shape for count in first]
            shape = Shape(0, sum(count.numel() for count in first))
            exchange = self._exchange(len(chunks), shape)
            scratch = Scratch(shape, team.device)

            def count_chunks(run: range) -> None:
                tree = Tree(run, len(chunks), exchange.slot, scratch)
                for number in run:
                    parts = first
                    if number != known:
                        parts = self._count(metrics, loader, unit(number))
                        buffers.restore()
                    flat, add = tree.leaf(number)
                    values = torch.cat([part.flatten() for part in parts])
                    flat.f64.add_(values) if add else flat.f64.copy_(values)
                    tree.fold(number)

            count_chunks(mine)
            self._team.board.enter(Phase.EXCHANGE)
            total = exchange.reduce(
                Work(runs, lambda runs: reduction(runs, len(chunks)), count_chunks)
            )
        self._team.board.enter(Phase.MAIN)
        split = torch.split(total.f64.cpu().clone(), [shape.numel() for shape in shapes])
        return [part.view(shape) for part, shape in zip(split, shapes, strict=True)]

    def _count(self, metrics: tuple[Metric, ...], loader: Loader, unit: Unit) -> list[torch.Tensor]:
        """What one chunk gives for each metric."""
        self._team.board.enter(Phase.EVALUATE, unit.lane)
        fields = to_device(loader.load(unit), self._team.device)
        seeds.reseed("chunk", self._team.seed, unit.lane)
        seen = Seen(self._model, lambda *a: weighed(self._loss(*a), len(unit)), fields)
        return [metric.measure(seen).to(torch.float64) for metric in metrics]

    def _exchange(self, chunks: int, shape: Shape) -> Exchange:
        if (chunks, shape) not in self._exchanges:
            self._exchanges[chunks, shape] = self._team.exchange(
                shape, chunks, kind_of(self._number, True), f"{chunks} {shape.f64}", ""
            )
        return self._exchanges[chunks, shape]
