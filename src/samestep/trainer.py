"""The trainer: a step is backward, exchange, update.

    backward   this worker's lanes, one by one; their results folded into nodes
    exchange   all workers' nodes added in tree order
    update     from the root alone: loss, clipping, the optimizer, buffers; then the commit

Until the commit a step has had no effect.
"""

from __future__ import annotations

import contextlib
import inspect
import itertools
import math
import os
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, Protocol

import safetensors.torch
import torch
from torch import nn
from torch.nn.parameter import is_lazy

from samestep import seeds
from samestep.board import Board, Phase, kind_of
from samestep.data import Batch, Collate, Cut, Loader, Unit, length_of, to_device
from samestep.errors import LossError, NonFiniteLoss, OptimizerError, UsageError
from samestep.exchange import Exchange, Flat, Shape
from samestep.lanes import cut, fused, reduction, share
from samestep.layout import Layout, Sums, fingerprint
from samestep.metrics import Metric, Seen
from samestep.results import Results, Scratch
from samestep.tree import Tree

__all__ = ["Trainer"]

Loss = Callable[..., torch.Tensor | tuple[torch.Tensor, torch.Tensor | float | int]]

_PRECISIONS = ("fp32", "bf16")
_STORES = ("replicated",)


class TrainersTeam(Protocol):
    """What a trainer needs from its team."""

    @property
    def number(self) -> int: ...
    @property
    def size(self) -> int: ...
    @property
    def device(self) -> torch.device: ...
    @property
    def lanes(self) -> int: ...
    @property
    def seed(self) -> int: ...
    @property
    def exact(self) -> bool: ...
    @property
    def is_first(self) -> bool: ...
    @property
    def step(self) -> int: ...
    @property
    def board(self) -> Board: ...
    def runs(self, lanes: int) -> tuple[range, ...]: ...
    def units(self, batch: Cut, runs: Sequence[range]) -> list[Unit]: ...
    def exchange(self, shape: Shape, lanes: int, kind: int, about: str) -> Exchange: ...
    def pause(self, began: float) -> None: ...
    def commit(self, samples: int, loss: float) -> None: ...


class Trainer:
    """Trains one model with one optimizer; `team.trainer(...)` makes it.

    `loss(model, *fields)` returns one loss per example (any shape: their sum counts, weighted by
    their number), or `(sum, weight)`. `clip_norm` clips the norm of the whole gradient;
    `precision="bf16"` runs lanes under autocast; `compile=True` compiles the loss function.
    """

    def __init__(
        self,
        team: TrainersTeam,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        loss: Loss,
        *,
        number: int = 0,
        clip_norm: float | None = None,
        precision: str = "fp32",
        compile: bool = False,
        store: str = "replicated",
    ) -> None:
        _check_model(model, optimizer, loss)
        _check_optimizer(optimizer)
        if precision not in _PRECISIONS:
            raise UsageError(f"precision={precision!r}: must be one of {', '.join(_PRECISIONS)}")
        if store not in _STORES:
            raise UsageError(f"store={store!r}: must be one of {', '.join(_STORES)}")
        if clip_norm is not None and not clip_norm > 0:
            raise UsageError(f"clip_norm={clip_norm!r}: must be above 0, or None for no clipping")
        self.model, self.optimizer = model.to(team.device), optimizer
        self._team, self._board, self._number = team, team.board, number
        self._loss = _compiled(loss) if compile else loss
        self._plain_loss = loss
        self._clip_norm, self._precision = clip_norm, precision
        self._built: Results | None = None
        self._batch: Batch | None = None
        self._total: Flat | None = None
        self._exchanges: dict[tuple[int, Shape], Exchange] = {}
        if self.is_built:
            self._build()

    # Training

    def step(self, batch: Batch) -> float:
        """Train on one global batch; returns its mean loss."""
        self.backward(batch)
        self.exchange()
        return self.update()

    def backward(self, batch: Batch) -> None:
        """Run this worker's lanes and fold their results into nodes."""
        if not isinstance(batch, Batch):
            raise UsageError(
                f"step: needs a batch of team.batches(...), got {type(batch).__name__}"
            )
        built = self._build(batch)
        self._runs = self._team.runs(len(batch.lanes))
        tree = Tree(
            self._runs[self._team.number], len(batch.lanes), built.exchange.slot, built.scratch
        )
        built.begin()
        with self._deterministic_kernels():
            for unit in self._team.units(batch, self._runs):
                self._run(built, tree, batch, unit)
        self._batch = batch

    def exchange(self) -> None:
        """Add the nodes of all workers."""
        if self._batch is None or self._built is None:
            raise UsageError("exchange: call backward(batch) first")
        lanes = len(self._batch.lanes)
        self._board.enter(Phase.EXCHANGE)
        self._total = self._built.exchange.reduce(
            reduction(self._runs, lanes) if self._team.exact else fused(self._runs)
        )

    def update(self) -> float:
        """Apply the sum: everything is decided from the root, so alike on every worker."""
        if self._total is None or self._batch is None or self._built is None:
            raise UsageError("update: call backward(batch) and exchange() first")
        batch, built, total = self._batch, self._built, self._total
        self._batch = self._total = None
        self._board.enter(Phase.UPDATE)
        tail = total.f64.cpu()
        sums = Sums(*tail[built.layout.sums].tolist())
        self._check_sums(sums, tail[built.layout.lane_losses].tolist())
        results = len(batch.lanes) if self._team.exact else sum(map(bool, self._runs))
        grown = built.agreed_growth(tail, results)
        built.give_gradients(total, sums.weight, tail)
        if self._clip_norm is not None:
            self._clip(built, self._clip_norm)
        self.optimizer.step()
        built.commit_buffers(total, tail, sums.size, grown)
        loss = sums.loss / sums.weight
        self._team.commit(len(batch), loss)
        return loss

    def _run(self, built: Results, tree: Tree, batch: Batch, unit: Unit) -> None:
        """One lane: nothing but (weights, step, lane) may have a part in its result."""
        team, board, began = self._team, self._board, time.perf_counter()
        board.enter(Phase.DATA, unit.lane)
        fields = to_device(batch.loader.load(unit), team.device)
        board.enter(Phase.LANE, unit.lane)
        seeds.reseed("lane", team.seed, team.step, unit.lane)
        for parameter in built.layout.all:
            parameter.grad = None
        with self._autocast():
            loss, weight = _weighed(self._loss(self.model, *fields), len(unit.indices))
        if not loss.requires_grad:
            raise LossError("loss: does not depend on any parameter that requires a gradient")
        loss.backward()  # type: ignore[no-untyped-call]
        flat, add = tree.leaf(unit.lane)
        built.write(flat, add, unit.lane, loss.detach(), weight, len(unit.indices))
        tree.fold(unit.lane)
        team.pause(began)

    def _check_sums(self, sums: Sums, lane_losses: list[float]) -> None:
        step = self._team.step
        if not math.isfinite(sums.loss):
            bad = [(i, loss) for i, loss in enumerate(lane_losses) if not math.isfinite(loss)]
            raise NonFiniteLoss(
                f"step {step}: the loss is not finite in "
                + (", ".join(f"lane {i} ({loss})" for i, loss in bad) or "their sum")
                + "; the weights were left as they were before this step"
            )
        if not (math.isfinite(sums.weight) and sums.weight > 0):
            raise LossError(
                f"step {step}: the weights of the global batch add up to {sums.weight}; the sum "
                "that the loss function returns as (sum, weight) must be above 0"
            )

    def _clip(self, built: Results, clip_norm: float) -> None:
        norm = torch.nn.utils.clip_grad_norm_(built.layout.parameters, clip_norm)
        if not torch.isfinite(norm):
            raise NonFiniteLoss(
                f"step {self._team.step}: the gradient's norm is {norm.item()}; the "
                "weights were left as they were before this step"
            )

    def _autocast(self) -> contextlib.AbstractContextManager[Any]:
        if self._precision == "fp32":
            return contextlib.nullcontext()
        return torch.autocast(self._team.device.type, dtype=torch.bfloat16)

    def _deterministic_kernels(self) -> contextlib.AbstractContextManager[Any]:
        """Of attention's implementations on a GPU, the one whose sums have a fixed order."""
        if self._team.device.type == "cpu" or not self._team.exact:
            return contextlib.nullcontext()
        from torch.nn.attention import SDPBackend, sdpa_kernel

        return sdpa_kernel(SDPBackend.MATH)

    # Evaluation

    def evaluate(
        self,
        dataset: Any,
        *metrics: Metric,
        chunk: int = 256,
        collate: Collate | None = None,
        loaders: int = 1,
    ) -> Any:
        """Every sample counted once; returns one value for each metric (one metric: the value).

        The dataset is cut into chunks of `chunk` samples, on any number of devices alike.
        """
        if not metrics or not all(isinstance(metric, Metric) for metric in metrics):
            raise UsageError(
                "evaluate: needs metrics, for example ss.metrics.accuracy; got "
                + (", ".join(type(m).__name__ for m in metrics) or "none")
            )
        if not isinstance(chunk, int) or chunk < 1:
            raise UsageError(f"chunk={chunk!r}: must be a whole number of at least 1")
        team, samples = self._team, length_of(dataset)
        chunks = cut(samples, math.ceil(samples / chunk))
        runs = share(len(chunks), [1.0] * team.size)
        units = [Unit(0, i, tuple(chunks[i])) for i in runs[team.number]]
        # A worker without a chunk looks at the first one, only to learn how long the counts are.
        spare = Unit(0, 0, tuple(chunks[0]))
        loader = Loader(
            dataset, seed=team.seed, epoch=-1, collate=collate, loaders=loaders, ahead=units
        )
        with (
            contextlib.closing(loader),
            seeds.undisturbed(),
            _evaluating(self.model),
            torch.no_grad(),
            self._autocast(),
        ):
            counts = (self._count(metrics, loader, unit) for unit in units or [spare])
            totals = self._add_counts(counts, units, runs, len(chunks))
        self._board.enter(Phase.MAIN)
        values = [metric.value(total) for metric, total in zip(metrics, totals, strict=True)]
        return values[0] if len(values) == 1 else tuple(values)

    def _count(self, metrics: tuple[Metric, ...], loader: Loader, unit: Unit) -> list[torch.Tensor]:
        """What one chunk gives for each metric."""
        self._board.enter(Phase.EVALUATE, unit.lane)
        fields = to_device(loader.load(unit), self._team.device)
        seeds.reseed("chunk", self._team.seed, unit.lane)
        seen = Seen(
            self.model, lambda *a: _weighed(self._plain_loss(*a), len(unit.indices)), fields
        )
        return [metric.measure(seen).to(torch.float64) for metric in metrics]

    def _add_counts(
        self,
        counts: Iterator[list[torch.Tensor]],
        units: list[Unit],
        runs: tuple[range, ...],
        chunks: int,
    ) -> list[torch.Tensor]:
        """The sum over all chunks: through the same tree and exchange as gradients."""
        first = next(counts)
        shapes = [count.shape for count in first]
        shape = Shape(0, sum(count.numel() for count in first))
        exchange = self._evaluation(chunks, shape)
        tree = Tree(
            runs[self._team.number], chunks, exchange.slot, Scratch(shape, self._team.device)
        )
        for unit, parts in zip(units, itertools.chain([first], counts), strict=False):
            flat, add = tree.leaf(unit.lane)
            values = torch.cat([part.flatten() for part in parts])
            flat.f64.add_(values) if add else flat.f64.copy_(values)
            tree.fold(unit.lane)
        total = exchange.reduce(reduction(runs, chunks)).f64.cpu().clone()
        split = torch.split(total, [shape.numel() for shape in shapes])
        return [part.view(shape) for part, shape in zip(split, shapes, strict=True)]

    def _evaluation(self, chunks: int, shape: Shape) -> Exchange:
        if (chunks, shape) not in self._exchanges:
            self._exchanges[chunks, shape] = self._team.exchange(
                shape, chunks, kind_of(self._number, True), f"{chunks} {shape.f64}"
            )
        return self._exchanges[chunks, shape]

    # State

    @property
    def is_built(self) -> bool:
        """False until the first batch for a model with lazily initialised modules."""
        return not any(is_lazy(tensor) for tensor in _tensors(self.model))

    def fingerprint(self) -> str:
        """SHA-256 over parameters, buffers and optimizer state."""
        if not self.is_built:
            raise UsageError(
                "fingerprint: the model has lazily initialised modules; train one step first"
            )
        return fingerprint(self.model, self.optimizer)

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the model's weights as safetensors, once and whole."""
        if not self._team.is_first:
            return
        target = Path(path)
        target.parent.mkdir(parents=True, exist_ok=True)
        # Beside it, then renamed: there is never half a file under this name.
        with tempfile.TemporaryDirectory(dir=target.parent) as beside:
            safetensors.torch.save_model(self.model, str(Path(beside) / "weights"))
            os.replace(Path(beside) / "weights", target)

    def _build(self, batch: Batch | None = None) -> Results:
        """The layout and its buffers; made anew when other parameters want gradients."""
        if self._built is not None and self._built.layout.is_current:
            return self._built
        if not self.is_built and batch is not None:
            self._initialise_lazy(batch)
        layout = Layout(self.model, self._team.lanes)
        exchange = self._team.exchange(
            layout.shape,
            self._team.lanes,
            kind_of(self._number, False),
            f"{layout.describe()} {fingerprint(self.model, self.optimizer)}",
        )
        self._built = Results(layout, self.model, exchange, self._team.device)
        return self._built

    def _initialise_lazy(self, batch: Batch) -> None:
        """Let lazy modules see lane 0, on every worker with the same random numbers."""
        fields = to_device(batch.loader.load(batch.unit(range(1))), self._team.device)
        seeds.reseed("lazy", self._team.seed)
        with _evaluating(self.model), torch.no_grad(), self._autocast():
            self._plain_loss(self.model, *fields)


def _check_model(model: Any, optimizer: Any, loss: Any) -> None:
    if not isinstance(model, nn.Module):
        raise UsageError(
            f"model: must be a torch.nn.Module, got {type(model).__name__}; several go into a "
            "torch.nn.ModuleDict"
        )
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise OptimizerError(
            f"optimizer: must be a torch.optim.Optimizer, got {type(optimizer).__name__}"
        )
    if not callable(loss):
        raise UsageError(f"loss: must be a function loss(model, *fields), got {loss!r}")
    known = {id(parameter) for parameter in model.parameters()}
    strangers = [
        parameter
        for group in optimizer.param_groups
        for parameter in group["params"]
        if id(parameter) not in known
    ]
    if strangers:
        raise OptimizerError(
            f"optimizer: holds {len(strangers)} parameters that are not the model's, the first of "
            f"shape {tuple(strangers[0].shape)}; make the optimizer from model.parameters() of "
            "the model you pass"
        )


def _check_optimizer(optimizer: torch.optim.Optimizer) -> None:
    name = type(optimizer).__name__
    closure = inspect.signature(type(optimizer).step).parameters.get("closure")
    if closure is not None and closure.default is inspect.Parameter.empty:
        raise OptimizerError(
            f"optimizer: {name} calls the loss again by itself (a closure), so a step is not one "
            "backward pass; use one that does not, such as torch.optim.AdamW"
        )
    if isinstance(optimizer, torch.optim.SparseAdam):
        raise OptimizerError(
            f"optimizer: {name} needs sparse gradients, which have no fixed layout; use "
            "torch.optim.Adam and sparse=False"
        )


def _compiled(loss: Loss) -> Loss:
    """Each shape gets code of its own, so what a lane gives cannot depend on which were seen."""
    import torch._dynamo

    # Beyond the limit torch would silently run the rest uncompiled, with other bits.
    torch._dynamo.config.recompile_limit = 1024
    torch._dynamo.config.fail_on_recompile_limit_hit = True
    compiled: Loss = torch.compile(loss, dynamic=False)
    return compiled


def _weighed(result: Any, samples: int) -> tuple[torch.Tensor, torch.Tensor]:
    """What a loss function returned, as (sum, weight)."""
    if isinstance(result, tuple) and len(result) == 2 and isinstance(result[0], torch.Tensor):
        total, weight = result
        if total.numel() != 1:
            raise LossError(
                f"loss: returned (sum, weight) with a sum of shape {tuple(total.shape)}; it must "
                "be one number, the sum of the weighted losses"
            )
        weight = torch.as_tensor(weight).detach().to(total.device, torch.float64)
        return total.reshape(()), weight.sum()
    if not isinstance(result, torch.Tensor):
        raise LossError(
            f"loss: returned {type(result).__name__}; it must return a tensor with one loss per "
            "example, or (sum, weight)"
        )
    if result.dim() == 0:
        raise LossError(
            f"loss: returned one number for {samples} examples, so its weight is not known; return "
            'one loss per example (reduction="none"), or (sum, weight)'
        )
    losses = result if result.dtype == torch.float64 else result.float()
    weight = torch.tensor(losses.numel(), dtype=torch.float64, device=losses.device)
    return losses.sum(), weight


def _tensors(model: nn.Module) -> Iterator[torch.Tensor]:
    yield from model.parameters()
    yield from model.buffers()


@contextlib.contextmanager
def _evaluating(model: nn.Module) -> Iterator[None]:
    """Evaluation mode, and back to each module's own mode."""
    modes = [(module, module.training) for module in model.modules()]
    model.eval()
    try:
        yield
    finally:
        for module, training in modes:
            module.training = training
