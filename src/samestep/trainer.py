"""The trainer: a step is backward, exchange, update.

    backward   this worker's lanes, one by one; their results folded into nodes
    exchange   all workers' nodes added in tree order
    update     from the root alone: loss, clipping, the optimizer, buffers; then the commit

Until the commit a step has had no effect.
"""

from __future__ import annotations

import contextlib
import gc
import hashlib
import inspect
import math
import os
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Protocol

import safetensors.torch
import torch
from torch import nn
from torch.nn.parameter import is_lazy

from samestep import seeds
from samestep.board import Board, Phase, Word, kind_of
from samestep.data import (
    Batch,
    Collate,
    Cut,
    Loader,
    Unit,
    check_collate,
    length_of,
    to_device,
)
from samestep.errors import (
    LossError,
    NonFiniteLoss,
    OptimizerError,
    TeamError,
    UsageError,
    check_flags,
    is_positive,
)
from samestep.exchange import Exchange, Flat, Shape, Work
from samestep.lanes import cut, fused, reduction, share
from samestep.layout import Layout, Sums, digest, fingerprint
from samestep.memory import count_buffers, count_saved, peak, predict
from samestep.metrics import Metric, Seen
from samestep.payload import digest_of_code
from samestep.plan import Measured, Runs
from samestep.results import Gradients, Results, Scratch, all_buffers
from samestep.state import capture, restore
from samestep.stores import STORES, Replicated, Sharded, Store, check
from samestep.tree import Tree

__all__ = ["Trainer"]

Loss = Callable[..., torch.Tensor | tuple[torch.Tensor, torch.Tensor | float | int]]

_PRECISIONS = ("fp32", "bf16")


class Inspects(Protocol):
    """What looks at lanes while they run (`samestep replay`)."""

    def wants(self, step: int, lane: int) -> bool: ...
    def run(self, loss: Callable[..., Any], *arguments: Any) -> Any: ...
    def see(
        self, lane: int, loss: torch.Tensor, weight: torch.Tensor, model: nn.Module
    ) -> None: ...
    def after_backward(self, step: int) -> None: ...


class TrainersTeam(Protocol):
    """What a trainer needs from its team."""

    @property
    def inspector(self) -> Inspects | None: ...
    @property
    def place(self) -> int: ...
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
    def is_oldest(self) -> bool: ...
    @property
    def catching_up(self) -> bool: ...
    @property
    def has_skipped(self) -> bool: ...
    @property
    def is_checked(self) -> bool: ...
    @property
    def step(self) -> int: ...
    @property
    def loop(self) -> int: ...
    @property
    def board(self) -> Board: ...
    @property
    def number(self) -> int: ...
    @property
    def speeds(self) -> list[float]: ...
    def runs(self, cut: Cut, step: int | None = None) -> Runs: ...
    def wait_saved(self) -> None: ...
    def observe(self, runs: Runs, measured: Measured) -> None: ...
    def units(self, batch: Cut, run: range) -> list[Unit]: ...
    def exchange(self, shape: Shape, lanes: int, kind: int, key: str, about: str) -> Exchange: ...
    def sharded(self, optimizer: torch.optim.Optimizer, trainer: int) -> Sharded: ...
    def recorded(self, what: str, compute: Callable[[], Any]) -> Any: ...
    def no_room(self, size: int, lanes: int) -> None: ...
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
        if store not in STORES:
            raise UsageError(f"store={store!r}: must be one of {', '.join(STORES)}")
        check(store, team.device, model, optimizer)
        check_flags(compile=compile)
        if clip_norm is not None and not is_positive(clip_norm):
            raise UsageError(f"clip_norm={clip_norm!r}: must be above 0, or None for no clipping")
        self.model, self.optimizer = model.to(team.device), optimizer
        self._team, self._board, self._number = team, team.board, number
        self._loss, self._compiles = _compiled(loss) if compile else loss, compile
        self._plain_loss = loss
        self._clip_norm, self._precision = clip_norm, precision
        self._built: Results | None = None
        self._batch: Batch | None = None
        self._total: Flat | None = None
        self._loop, self._loss_sum, self._weight_sum = 0, 0.0, 0.0
        self._seen_sizes: set[Any] = set()
        self._exchanges: dict[tuple[int, Shape], Exchange] = {}
        self._store_kind = store
        self._store: Store = Replicated(optimizer)  # until the model is built
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
        if self._team.catching_up:
            raise TeamError(
                "step: this worker is still catching up, and this step stands before an inner loop "
                "of batches; loops of batches in one another can only step in the innermost"
            )
        built = self._build(batch)
        size = max(map(len, batch.lanes))
        self._runs = self._team.runs(batch)
        built.begin()
        self._batch, self._has_room = batch, True
        versions = [parameter._version for parameter in built.layout.all]
        try:
            self._run_lanes(self._runs[self._team.place])
        except Exception as error:
            if not _is_out_of_memory(error):
                raise
            self._has_room = False
            traceback.clear_frames(error.__traceback__)
        if not self._has_room:
            self._give_back(size)
        elif versions != [parameter._version for parameter in built.layout.all]:
            raise LossError(_changed_weights(self.model, versions))
        if self._team.inspector is not None:
            self._team.inspector.after_backward(self._team.step)

    def exchange(self) -> None:
        """Add the nodes of all workers."""
        if self._batch is None or self._built is None:
            raise UsageError("exchange: call backward(batch) first")
        lanes = len(self._batch.lanes)
        self._board.enter(Phase.EXCHANGE)
        self._team.wait_saved()
        self._total = self._built.exchange.reduce(
            Work(
                self._runs,
                (lambda runs: reduction(runs, lanes)) if self._team.exact else fused,
                self._run_lanes,
                max(map(len, self._batch.lanes)),
                self._has_room,
                digest(self.model) if self._team.is_checked else None,
            )
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
        gradients = Gradients(built, total, sums.weight, tail)
        if self._clip_norm is not None:
            self._clip(gradients, self._clip_norm)
        self._store.step(gradients)
        built.commit_buffers(total, tail, sums.size, grown)
        if self._team.loop != self._loop:
            self._loop, self._loss_sum, self._weight_sum = self._team.loop, 0.0, 0.0
        self._observe(batch, built, tail)
        self._loss_sum += sums.loss
        self._weight_sum += sums.weight
        loss = sums.loss / sums.weight
        self._team.commit(len(batch), loss)
        return loss

    def epoch_loss(self) -> float:
        """The mean loss over the steps of the latest loop of batches. Unlike a sum made in `main`
        it is right after a resume in the middle of the loop, too."""
        return self._team.recorded(  # type: ignore[no-any-return]
            "epoch_loss", lambda: self._loss_sum / max(self._weight_sum, 1e-300)
        )

    def _run_lanes(self, run: range) -> None:
        """Run lanes of the present batch and fold their results into nodes."""
        batch, built = self._batch, self._built
        assert batch is not None
        assert built is not None
        tree = Tree(run, len(batch.lanes), built.exchange.slot, built.scratch)
        seconds: list[float] = []
        with self._deterministic_kernels():
            for unit in self._team.units(batch, run):
                count = 1 if self._team.exact else len(run)
                seconds += [self._run(built, tree, batch, unit) / count] * count
        self._board.enter(Phase.EXCHANGE)
        if run:
            built.note(built.exchange.slot(run.start), run, seconds, self._team.number)

    def _observe(self, batch: Batch, built: Results, tail: torch.Tensor) -> None:
        """Hand on what the root says of who ran which lane, and how long it took."""
        lanes = len(batch.lanes)
        seats = [int(seat) - 1 for seat in tail[built.layout.lane_seats].tolist()[:lanes]]
        seconds = tail[built.layout.lane_seconds].tolist()[:lanes]
        key = f"{self._number} {batch.key}"
        self._team.observe(self._runs, Measured(key, batch.costs, seats, seconds))

    def _give_back(self, size: int) -> None:
        """There was no memory for a lane: free what there is, and let others run these lanes."""
        for parameter in self.model.parameters():
            parameter.grad = None
        gc.collect()
        if self._team.device.type == "cuda":
            torch.cuda.empty_cache()
        assert self._batch is not None
        self._team.no_room(size, len(self._batch.lanes))

    def _run(self, built: Results, tree: Tree, batch: Batch, unit: Unit) -> float:
        """One lane: nothing but (weights, step, lane) may have a part in its result. Returns its
        seconds, below 0 where they are not what later ones will take."""
        team, board, began = self._team, self._board, time.perf_counter()
        size = len(unit.indices)
        is_fresh = size not in self._seen_sizes
        board.put(Word.FRESH, is_fresh)
        board.enter(Phase.DATA, unit.lane)
        fields = to_device(batch.loader.load(unit), team.device)
        board.enter(Phase.LANE, unit.lane)
        seeds.reseed("lane", team.seed, team.step, unit.lane)
        for parameter in built.layout.all:
            parameter.grad = None
        seen = team.inspector
        if seen is not None and not seen.wants(team.step, unit.lane):
            seen = None
        with self._autocast():
            result = (
                self._loss(self.model, *fields)
                if seen is None
                else seen.run(self._loss, self.model, *fields)
            )
            loss, weight = _weighed(result, len(unit.indices))
        if not loss.requires_grad:
            raise LossError("loss: does not depend on any parameter that requires a gradient")
        loss.backward()  # type: ignore[no-untyped-call]
        if seen is not None:
            seen.see(unit.lane, loss, weight, self.model)
        flat, add = tree.leaf(unit.lane)
        built.write(flat, add, unit.lane, loss.detach(), weight, len(unit.indices))
        tree.fold(unit.lane)
        team.pause(began)
        self._seen_sizes.add(size)
        seconds = time.perf_counter() - began
        # The longest of late, slowly forgotten: what a hang is measured by.
        longest = board.get(board.me, Word.LANE_US) * 63 // 64
        board.put(Word.LANE_US, max(int(seconds * 1e6), longest))
        return -seconds if is_fresh else seconds

    def _check_sums(self, sums: Sums, lane_losses: list[float]) -> None:
        step = self._team.step
        if not math.isfinite(sums.loss):
            bad = [(i, loss) for i, loss in enumerate(lane_losses) if not math.isfinite(loss)]
            error = NonFiniteLoss(
                f"step {step}: the loss is not finite in "
                + (", ".join(f"lane {i} ({loss})" for i, loss in bad) or "their sum")
                + "; the weights were left as they were before this step"
            )
            error.step, error.lanes = step, tuple(i for i, _ in bad)
            raise error
        if not (math.isfinite(sums.weight) and sums.weight > 0):
            raise LossError(
                f"step {step}: the weights of the global batch add up to {sums.weight}; the weight "
                "that the loss function returns in (sum, weight) must be above 0 in some lane"
            )

    def _clip(self, gradients: Gradients, clip_norm: float) -> None:
        norm = gradients.clip(clip_norm)
        if not torch.isfinite(norm):
            error = NonFiniteLoss(
                f"step {self._team.step}: the gradient's norm is {norm.item()}; the "
                "weights were left as they were before this step"
            )
            error.step = self._team.step
            raise error

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
        for name, value, least in (("chunk", chunk, 1), ("loaders", loaders, 0)):
            if isinstance(value, bool) or not isinstance(value, int) or value < least:
                raise UsageError(f"{name}={value!r}: must be a whole number of at least {least}")
        check_collate(collate)
        totals = self._team.recorded(
            "evaluate", lambda: self._totals(dataset, metrics, chunk, collate, loaders)
        )
        values = [metric.value(total) for metric, total in zip(metrics, totals, strict=True)]
        return values[0] if len(values) == 1 else tuple(values)

    def _totals(
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
        buffers = all_buffers(self.model)
        chunks = cut(samples, math.ceil(samples / chunk))
        runs = share(len(chunks), team.speeds)
        mine = runs[team.place]

        def unit(number: int) -> Unit:
            return Unit(0, number, tuple(chunks[number]))

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
            _evaluating(self.model),
            torch.no_grad(),
            self._autocast(),
        ):
            # A worker without a chunk looks at the first one, to learn how long the counts are.
            known = mine.start if mine else 0
            first = self._count(metrics, loader, unit(known))
            buffers.restore()
            shapes = [count.shape for count in first]
            shape = Shape(0, sum(count.numel() for count in first))
            exchange = self._evaluation(len(chunks), shape)
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
            self._board.enter(Phase.EXCHANGE)
            total = exchange.reduce(
                Work(runs, lambda runs: reduction(runs, len(chunks)), count_chunks)
            )
        self._board.enter(Phase.MAIN)
        split = torch.split(total.f64.cpu().clone(), [shape.numel() for shape in shapes])
        return [part.view(shape) for part, shape in zip(split, shapes, strict=True)]

    def _count(self, metrics: tuple[Metric, ...], loader: Loader, unit: Unit) -> list[torch.Tensor]:
        """What one chunk gives for each metric."""
        self._board.enter(Phase.EVALUATE, unit.lane)
        fields = to_device(loader.load(unit), self._team.device)
        seeds.reseed("chunk", self._team.seed, unit.lane)
        seen = Seen(
            self.model, lambda *a: _weighed(self._plain_loss(*a), len(unit.indices)), fields
        )
        return [metric.measure(seen).to(torch.float64) for metric in metrics]

    def _evaluation(self, chunks: int, shape: Shape) -> Exchange:
        if (chunks, shape) not in self._exchanges:
            self._exchanges[chunks, shape] = self._team.exchange(
                shape, chunks, kind_of(self._number, True), f"{chunks} {shape.f64}", ""
            )
        return self._exchanges[chunks, shape]

    # Memory

    def memory(self, batch: Batch) -> dict[str, dict[str, int]]:
        """The bytes that this worker needs for its part of `batch`, by what they are for: as
        "predicted", and as "measured" now (after a few steps of training, that is).

        It runs one lane to see what it takes, and leaves everything as it was.
        """
        built, team = self._build(batch), self._team
        runs = team.runs(batch)
        run = runs[team.place] or range(1)
        unit = team.units(batch, run)[0]
        fields = to_device(batch.loader.load(unit), team.device)
        buffers = all_buffers(self.model)

        def lane() -> torch.Tensor:
            with self._autocast():
                return _weighed(self._loss(self.model, *fields), len(unit.indices))[0]

        with seeds.undisturbed():
            seeds.reseed("lane", team.seed, team.step, unit.lane)
            saved = count_saved(lane, self.model)
            for parameter in built.layout.all:
                parameter.grad = None
            with peak(team.device) as grown:
                lane().backward()  # type: ignore[no-untyped-call]
        buffers.restore()
        lane_gradients = sum(p.grad.nbytes for p in built.layout.all if p.grad is not None)
        for parameter in built.layout.all:
            parameter.grad = None
        _, slots = count_buffers(run, len(batch.lanes))
        root, tree = built.bytes(slots, team.size)
        predicted = predict(
            self.model, self.optimizer, built.layout, self._store_kind, runs, team.place,
            len(batch.lanes), saved,
        )  # fmt: skip
        return {
            "predicted": predicted,
            "measured": {
                "weights": predicted["weights"],
                "gradients": lane_gradients + root,
                "tree": tree,
                "optimizer": self._store.bytes(),
                "lane": max(0, grown[0] - lane_gradients),
            },
        }

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
        return self._team.recorded(  # type: ignore[no-any-return]
            "fingerprint", lambda: fingerprint(self.model, self._store.state_dict()["state"])
        )

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the model's weights as safetensors, once and whole."""
        if not self._team.is_oldest or self._team.catching_up:
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
        described = layout.describe()
        # Weights are compared where they are what `main` made them, and nothing else.
        is_new = self._team.step == 0 and not self._team.has_skipped
        weights = fingerprint(self.model, self._store.state_dict()["state"]) if is_new else ""
        exchange = self._team.exchange(
            layout.shape,
            self._team.lanes,
            kind_of(self._number, False),
            described[:16],
            f"{described} {weights}",
        )
        self._built = Results(layout, self.model, exchange, self._team.device)
        if self._store_kind != "replicated" and isinstance(self._store, Replicated):
            self._store = self._team.sharded(self.optimizer, self._number)
        return self._built

    def state(self, is_shared: bool = False) -> dict[str, Any]:
        """What a snapshot keeps of it; `is_shared`: without what all workers share anyway."""
        sums = [self._team.loop - self._loop, self._loss_sum, self._weight_sum]
        return {**capture(self.model, self._store.state_dict(is_shared)), "sums": sums}

    def make_whole(self, batch: Batch) -> None:
        """Let lazily initialised modules look at a batch, before values are put back into them."""
        self._initialise_lazy(batch)

    def restore(self, saved: dict[str, Any]) -> None:
        """Put back what a snapshot kept."""
        restore(self.model, saved)
        self._store.load_state_dict(saved["optimizer"])
        behind, self._loss_sum, self._weight_sum = saved["sums"]
        self._loop = self._team.loop - behind

    def facts(self) -> dict[str, str]:
        """What must be the same in a run that goes on from this one's state."""
        shapes = ", ".join(
            f"{name} {'lazy' if is_lazy(p) else tuple(p.shape)} {p.dtype}"
            for name, p in self.model.named_parameters()
        )
        counted = "lazily made"
        if self.is_built:
            counted = f"{sum(p.numel() for p in self.model.parameters()):,}"
        prefix = f"trainer {self._number} " if self._number else ""
        settings = (self._clip_norm, self._precision, self._compiles)
        return {
            f"{prefix}parameters": f"{counted} ({hashlib.sha256(shapes.encode()).hexdigest()[:8]})",
            f"{prefix}optimizer": type(self.optimizer).__name__,
            f"{prefix}clip_norm, precision, compile": ", ".join(map(str, settings)),
            f"code of {prefix}loss": digest_of_code(self._plain_loss),
        }

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


def _changed_weights(model: nn.Module, versions: list[int]) -> str:
    named = zip(model.named_parameters(), versions, strict=True)
    name = next(name for (name, parameter), before in named if parameter._version != before)
    return (
        f"loss: running it changed the parameter {name!r} in place, so a lane's result would "
        "depend on the lanes before it; change weights between steps, or keep what changes in a "
        "buffer (an embedding's max_norm does this; normalise in the forward pass instead)"
    )


def _is_out_of_memory(error: Exception) -> bool:
    """torch has a class for it on GPUs; on the CPU it is a RuntimeError that says so."""
    return isinstance(error, (MemoryError, torch.OutOfMemoryError)) or (
        isinstance(error, RuntimeError) and "can't allocate memory" in str(error)
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
        if not isinstance(weight, (torch.Tensor, int, float)):
            raise LossError(
                f"loss: returned (sum, weight) with {weight!r} as the weight; it must be a number, "
                "or a tensor of weights, which is added up"
            )
        weight = torch.as_tensor(weight).detach().to(total.device, torch.float64)
        return total.reshape(()), weight.sum()
    if isinstance(result, tuple) and len(result) == 2 and isinstance(result[1], torch.Tensor):
        raise LossError(
            f"loss: returned a tuple whose first part is {type(result[0]).__name__}; it must be "
            "(sum, weight), in this order, and the sum a tensor"
        )
    if not isinstance(result, torch.Tensor):
        raise LossError(
            f"loss: returned {type(result).__name__}; it must return a tensor with one loss per "
            "example, or (sum, weight)"
        )
    if result.dim() == 0:
        raise LossError(
            f"loss: returned one number for a lane of {samples} examples, so its weight is not "
            'known; return one loss per example (reduction="none"), or (sum, weight)'
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
