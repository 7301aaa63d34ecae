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
import math
import os
import tempfile
import time
import traceback
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import safetensors.torch
import torch
from torch import nn
from torch.nn.parameter import is_lazy
from torch.utils._pytree import tree_leaves

from samestep import seeds
from samestep.board import Phase, Word, kind_of
from samestep.channels import ChannelsLast
from samestep.checks import check_model, check_optimizer
from samestep.contract import TrainersTeam
from samestep.data import Batch, Collate, Unit, check_collate, to_device
from samestep.errors import (
    LossError,
    NonFiniteLoss,
    TeamError,
    UsageError,
    check_counts,
    check_flags,
    is_positive,
)
from samestep.evaluation import Evaluation
from samestep.exchange import Flat, Work
from samestep.lanes import fused, reduction
from samestep.layout import Layout, Sums, digest, fingerprint
from samestep.loss import (
    Arithmetic,
    Loss,
    changed_weights,
    compiled,
    evaluating,
    is_out_of_memory,
    once_per_machine,
    weighed,
)
from samestep.memory import count_buffers, count_saved, peak, predict
from samestep.metrics import Metric
from samestep.payload import digest_of_code
from samestep.results import Gradients, Results, all_buffers, held_gradients
from samestep.state import capture, restore
from samestep.stores import STORES, Replicated, Store, check
from samestep.timings import shares
from samestep.tree import Tree

__all__ = ["Trainer"]

_PRECISIONS = ("fp32", "bf16")


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
        check_model(model, optimizer, loss)
        check_optimizer(optimizer)
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
        self._loss, self._compiles = compiled(loss) if compile else loss, compile
        self._plain_loss = loss
        self._clip_norm, self._precision = clip_norm, precision
        self._arithmetic = Arithmetic(team.device, precision, team.exact)
        self._evaluation = Evaluation(team, self.model, loss, self._arithmetic, number)
        self._built: Results | None = None
        self._batch: Batch | None = None
        self._total: Flat | None = None
        self._loop, self._loss_sum, self._weight_sum = 0, 0.0, 0.0
        self._seen_sizes: set[Any] = set()
        self._channels: ChannelsLast | None = None  # until the model is built
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
        self._runs = self._team.runs(batch, trainer=self._number)
        built.begin()
        self._batch, self._has_room = batch, True
        versions = [parameter._version for parameter in built.layout.all]
        try:
            self._run_lanes(self._runs[self._team.place])
        except Exception as error:
            if not is_out_of_memory(error):
                raise
            self._has_room = False
            traceback.clear_frames(error.__traceback__)
        if not self._has_room:
            self._give_back(size)
        elif versions != [parameter._version for parameter in built.layout.all]:
            raise LossError(changed_weights(self.model, versions))
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
        sums, notes = built.layout.root(total)
        self._check_sums(sums, notes[built.layout.lane_losses])
        results = len(batch.lanes) if self._team.exact else sum(map(bool, self._runs))
        grown = built.agreed_growth(notes, results)
        gradients = Gradients(built, total, sums.weight, notes)
        if self._clip_norm is not None:
            self._clip(gradients, self._clip_norm)
        self._store.step(gradients)
        built.commit_buffers(total, notes, grown)
        if self._team.loop != self._loop:
            self._loop, self._loss_sum, self._weight_sum = self._team.loop, 0.0, 0.0
        self._observe(batch, built, notes)
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
        batch, built, channels = self._batch, self._built, self._channels
        assert batch is not None
        assert built is not None
        assert channels is not None
        tree = Tree(run, len(batch.lanes), built.exchange.slot, built.scratch)
        built.begin_run()
        seconds: list[float] = []
        with self._arithmetic.deterministic_kernels(), channels.lanes():
            for unit in self._team.units(batch, run):
                count = 1 if self._team.exact else len(run)
                seconds += [self._run(built, tree, batch, unit) / count] * count
        self._board.enter(Phase.EXCHANGE)
        if run:
            built.note(built.exchange.slot(run.start), run, seconds, self._team.number)

    def _observe(self, batch: Batch, built: Results, notes: list[float]) -> None:
        """Hand on what the root says of who ran which lane, and how long it took."""
        lanes = len(batch.lanes)
        seats = [int(seat) - 1 for seat in notes[built.layout.lane_seats][:lanes]]
        seconds = notes[built.layout.lane_seconds][:lanes]
        self._team.observe(self._runs, batch, self._number, seats, seconds)

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
        size = len(unit)
        board.put(Word.FRESH, size not in self._seen_sizes)
        board.enter(Phase.DATA, unit.lane)
        fields = to_device(batch.loader.load(unit), team.device)
        # Each shape is compiled by itself.
        kind = (size, *_shapes(fields)) if self._compiles else size
        is_fresh = kind not in self._seen_sizes
        board.put(Word.FRESH, is_fresh)
        board.enter(Phase.LANE, unit.lane)
        compiling = once_per_machine(team.cores) if is_fresh and self._compiles else None
        with compiling or contextlib.nullcontext():
            loss, weight = self._differentiate(built, fields, unit)
        flat, add = tree.leaf(unit.lane)
        built.write(flat, add, unit.lane, loss, weight, size)
        tree.fold(unit.lane)
        team.pause(began)
        self._seen_sizes |= {size, kind}
        seconds = time.perf_counter() - began
        # The longest of late, slowly forgotten: what a hang is measured by.
        longest = board.get(board.me, Word.LANE_US) * 63 // 64
        board.put(Word.LANE_US, max(int(seconds * 1e6), longest))
        return -seconds if is_fresh else seconds

    def _differentiate(
        self, built: Results, fields: tuple[Any, ...], unit: Unit
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """A lane's forward and backward pass, under its random numbers and with fresh gradients.
        Returns the sum of its losses, and their weight."""
        team = self._team
        seeds.reseed("lane", team.seed, team.step, unit.lane)
        for parameter in built.layout.all:
            parameter.grad = None
        seen = team.inspector
        if seen is not None and not seen.wants(team.step, unit.lane):
            seen = None
        with self._arithmetic.autocast():
            result = (
                self._loss(self.model, *fields)
                if seen is None
                else seen.run(self._loss, self.model, *fields)
            )
            loss, weight = weighed(result, len(unit))
        if not loss.requires_grad:
            raise LossError("loss: does not depend on any parameter that requires a gradient")
        loss.backward()  # type: ignore[no-untyped-call]
        if seen is not None:
            seen.see(unit.lane, loss, weight, self.model)
        return loss.detach(), weight

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
        if not self.is_built and not self._team.catching_up:
            raise UsageError(
                "evaluate: the model has lazily initialised modules; train one step first"
            )
        if not metrics or not all(isinstance(metric, Metric) for metric in metrics):
            raise UsageError(
                "evaluate: needs metrics, for example ss.metrics.accuracy; got "
                + (", ".join(type(m).__name__ for m in metrics) or "none")
            )
        check_counts(1, chunk=chunk)
        check_counts(0, loaders=loaders)
        check_collate(collate)
        totals = self._team.recorded(
            "evaluate", lambda: self._evaluation.totals(dataset, metrics, chunk, collate, loaders)
        )
        values = [metric.value(total) for metric, total in zip(metrics, totals, strict=True)]
        return values[0] if len(values) == 1 else tuple(values)

    # Time and memory

    def timings(self) -> dict[str, dict[str, float]]:
        """For each device of the team, the share of each kind in the time its steps took so far:
        compute, data, waiting, exchange, update."""
        return {name: shares(seconds) for name, seconds in self._team.spent().items()}

    def memory(self, batch: Batch) -> dict[str, dict[str, int]]:
        """The bytes that this worker needs for its part of `batch`, by what they are for: as
        "predicted", and as "measured" now (after a few steps of training, that is).

        It runs one lane to see what it takes, and leaves everything as it was.
        """
        built, team = self._build(batch), self._team
        runs = team.runs(batch, trainer=self._number)
        run = runs[team.place] or range(1)
        unit = team.units(batch, run)[0]
        fields = to_device(batch.loader.load(unit), team.device)
        buffers = all_buffers(self.model)

        def lane() -> torch.Tensor:
            with self._arithmetic.autocast():
                return weighed(self._loss(self.model, *fields), len(unit))[0]

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
        predicted = predict(
            self.model, self.optimizer, built.layout, self._store_kind, runs, team.place,
            len(batch.lanes), saved,
        )  # fmt: skip
        return {
            "predicted": predicted,
            "measured": {
                "weights": predicted["weights"],
                "gradients": held_gradients(lane_gradients, built.result_bytes, self._store_kind),
                "tree": built.tree_bytes(slots, team.size),
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
        if not self.is_built and batch is not None:
            self._initialise_lazy(batch)
        if self._channels is None:
            # Compiled code orders memory as it likes: it was slower with channels last.
            self._channels = ChannelsLast(self.model, self._team.device, self._compiles)
        if batch is not None and not self._channels.is_settled:
            self._board.put(Word.FRESH, 1)
            if not self._channels.settle(lambda: self._try_out(batch)):
                self._built = None
        if self._built is not None and self._built.layout.is_current:
            return self._built
        with self._channels.lanes():
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

    def _try_out(self, batch: Batch) -> None:
        """The forward pass of lane 0, as if it had not been."""
        fields = to_device(batch.loader.load(batch.unit(range(1))), self._team.device)
        buffers = all_buffers(self.model)
        with seeds.undisturbed(), torch.no_grad(), self._arithmetic.autocast():
            seeds.reseed("lane", self._team.seed, self._team.step, 0)
            try:
                self._plain_loss(self.model, *fields)
            finally:
                buffers.restore()

    def _initialise_lazy(self, batch: Batch) -> None:
        """Let lazy modules see lane 0, on every worker with the same random numbers."""
        fields = to_device(batch.loader.load(batch.unit(range(1))), self._team.device)
        seeds.reseed("lazy", self._team.seed)
        with evaluating(self.model), torch.no_grad(), self._arithmetic.autocast():
            self._plain_loss(self.model, *fields)


def _shapes(fields: Any) -> list[torch.Size]:
    """The shapes of all tensors, however they are nested."""
    return [leaf.shape for leaf in tree_leaves(fields) if isinstance(leaf, torch.Tensor)]


def _tensors(model: nn.Module) -> Iterator[torch.Tensor]:
    yield from model.parameters()
    yield from model.buffers()
