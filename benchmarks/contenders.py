"""The contenders, each written as its own documentation recommends. One file is run for all:

    python contenders.py NAME JOB LINE [OPTION=VALUE ...]

Every process opens the LINE to who asks, then trains when it is asked to, and blocks in between.
stage.py has the launchers in front (torchrun and so on).
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Iterator
from multiprocessing.connection import Client
from pathlib import Path
from typing import Any

import torch
from torch import nn

sys.path.insert(0, str(Path(__file__).parent))

from jobs import JOBS, SEED, Job

WORKERS = int(os.environ.get("BENCH_WORKERS", "2"))


def serve(line: str, number: int, step: Callable[[], float], check: Callable[[], float]) -> None:
    """Do turns for as long as there are any; `step` trains on the next batch."""
    with Client(line) as asked:
        asked.send((number, os.getpid()))
        while (order := asked.recv()) is not None:
            if order == "check":
                asked.send(check())
                continue
            began = time.perf_counter()
            for _ in range(order):
                step()
            asked.send((began, time.perf_counter()))


def parts(job: Job, number: int, workers: int) -> tuple[Any, Iterator[tuple[Any, float]]]:
    """The data, and this worker's part of each global batch, with what to divide the sum of its
    losses by so that an average over workers is that of the batch."""
    data = job.data()
    size = job.batch // workers

    def each() -> Iterator[tuple[Any, float]]:
        for indices in job.batches(len(data)):
            weight = float(len(indices)) if job.weigh is None else job.weigh(data, indices)
            mine = indices[number * size : (number + 1) * size]
            yield data.gather(mine), weight / workers

    return data, each()


def mean(result: Any, weight: float) -> torch.Tensor:
    total: torch.Tensor = result[0] if isinstance(result, tuple) else result.sum()
    return total / weight


def pinned(number: int) -> None:
    """One core for each process: every peer of two processes was faster so."""
    torch.set_num_threads(1)
    if not os.environ.get("BENCH_FREE"):
        os.sched_setaffinity(0, {number % (os.cpu_count() or 1)})


# The peers


def plain(job: Job, line: str, compile: bool = False, threads: int = 2) -> None:
    """One process: the tutorial's loop."""
    torch.set_num_threads(threads)
    if threads == 1:
        pinned(0)
    model = job.fresh_model()
    optimizer = job.optimizer(model.parameters())
    data, batches = parts(job, 0, 1)
    loss_of = torch.compile(job.loss) if compile else job.loss

    def step() -> float:
        fields, weight = next(batches)
        optimizer.zero_grad()
        loss = mean(loss_of(model, *fields), weight)
        loss.backward()
        optimizer.step()
        return loss.item()

    serve(line, 0, step, lambda: job.mean_loss(model, data))


def strangers(job: Job, line: str) -> None:
    """A control: each process trains on its half, and they never speak to each other. What this
    machine's cores give when both are used."""
    number = int(os.environ["RANK"])
    pinned(number)
    model = job.fresh_model()
    optimizer = job.optimizer(model.parameters())
    data, batches = parts(job, number, WORKERS)

    def step() -> float:
        fields, weight = next(batches)
        optimizer.zero_grad()
        loss = mean(job.loss(model, *fields), weight)
        loss.backward()
        optimizer.step()
        return loss.item()

    serve(line, number, step, lambda: job.mean_loss(model, data))


def scratch(job: Job, line: str) -> None:
    """The from-scratch loop: shards for two copies of the parameters in one process."""
    from torch.func import functional_call

    import samestep as ss

    torch.set_num_threads(2)
    model = job.fresh_model()
    names = [name for name, _ in model.named_parameters()]
    devices = ["cpu"] * 2
    copies = [ss.scratch.get_params(list(model.parameters()), device) for device in devices]
    (lr,) = {group["lr"] for group in job.optimizer(model.parameters()).param_groups}
    data, batches = parts(job, 0, 1)

    def net(X: torch.Tensor, params: list[torch.Tensor]) -> Any:
        return functional_call(model, dict(zip(names, params, strict=True)), (X,))

    def step() -> float:
        (X, y), _ = next(batches)
        return ss.scratch.train_batch(X, y, copies, devices, lr, net)

    def check() -> float:
        with torch.no_grad():
            for parameter, value in zip(model.parameters(), copies[0], strict=True):
                parameter.copy_(value)
        return job.mean_loss(model, data)

    serve(line, 0, step, check)


def ddp(job: Job, line: str, compile: bool = False, outer: int = 0) -> None:
    """torchrun, gloo. Torch's documentation has two ways of compiling: the inner module, or the
    wrapper with the loss."""
    import torch.distributed as dist

    dist.init_process_group("gloo")
    number, workers = dist.get_rank(), dist.get_world_size()
    pinned(number)
    inner = job.fresh_model()
    if compile and not outer:
        inner.compile()
    model = nn.parallel.DistributedDataParallel(inner, gradient_as_bucket_view=True)
    optimizer = job.optimizer(model.parameters())
    data, batches = parts(job, number, workers)
    loss_of = torch.compile(job.loss) if outer else job.loss

    def step() -> float:
        fields, weight = next(batches)
        optimizer.zero_grad()
        loss = mean(loss_of(model, *fields), weight)
        loss.backward()
        optimizer.step()
        return loss.item()

    serve(line, number, step, lambda: job.mean_loss(inner, data))
    dist.destroy_process_group()


def accelerate(job: Job, line: str) -> None:
    from accelerate import Accelerator

    accelerator = Accelerator(cpu=True)
    pinned(accelerator.process_index)
    inner = job.fresh_model()
    model, optimizer = accelerator.prepare(inner, job.optimizer(inner.parameters()))
    data, batches = parts(job, accelerator.process_index, accelerator.num_processes)

    def step() -> float:
        fields, weight = next(batches)
        optimizer.zero_grad()
        loss = mean(job.loss(model, *fields), weight)
        accelerator.backward(loss)
        optimizer.step()
        return loss.item()

    assert accelerator.num_processes == WORKERS
    serve(line, accelerator.process_index, step, lambda: job.mean_loss(inner, data))
    accelerator.end_training()


def fabric(job: Job, line: str) -> None:
    from lightning_fabric import Fabric

    fabric = Fabric(accelerator="cpu", devices=WORKERS, strategy="ddp")
    pinned(fabric.global_rank)
    inner = job.fresh_model()
    model, optimizer = fabric.setup(inner, job.optimizer(inner.parameters()))
    data, batches = parts(job, fabric.global_rank, fabric.world_size)

    def step() -> float:
        fields, weight = next(batches)
        optimizer.zero_grad()
        loss = mean(job.loss(model, *fields), weight)
        fabric.backward(loss)
        optimizer.step()
        return loss.item()

    assert fabric.world_size == WORKERS
    serve(line, fabric.global_rank, step, lambda: job.mean_loss(inner, data))


def deepspeed(job: Job, line: str) -> None:
    import deepspeed as ds

    ds.init_distributed()
    number = int(os.environ["RANK"])
    pinned(number)
    inner = job.fresh_model()
    # Without the last, it clips the norm of the gradients to 1.
    config = {
        "train_batch_size": job.batch,
        "train_micro_batch_size_per_gpu": job.batch // WORKERS,
        "gradient_clipping": 0.0,
    }
    engine, *_ = ds.initialize(
        model=inner, optimizer=job.optimizer(inner.parameters()), config=config
    )
    data, batches = parts(job, number, WORKERS)

    def step() -> float:
        fields, weight = next(batches)
        loss = mean(job.loss(engine, *fields), weight)
        engine.backward(loss)
        engine.step()
        return loss.item()

    assert engine.dp_world_size == WORKERS
    serve(line, number, step, lambda: job.mean_loss(inner, data))


def ray(job_name: str, line: str) -> None:
    import ray.train.torch
    from ray.train import ScalingConfig
    from ray.train.torch import TorchTrainer

    here = str(Path(__file__).parent)
    ray.init(
        num_cpus=WORKERS,
        include_dashboard=False,
        object_store_memory=128 << 20,
        logging_level="error",
        log_to_driver=False,
        runtime_env={"env_vars": {"PYTHONPATH": here, "OMP_NUM_THREADS": "1"}},
    )
    TorchTrainer(
        ray_worker,
        train_loop_config={"job": job_name, "line": line},
        scaling_config=ScalingConfig(num_workers=WORKERS),
    ).fit()


def ray_worker(config: dict[str, str]) -> None:
    import ray.train
    import ray.train.torch

    from jobs import JOBS

    job = JOBS[config["job"]]
    context = ray.train.get_context()
    number, workers = context.get_world_rank(), context.get_world_size()
    pinned(number)
    inner = job.fresh_model()
    model = ray.train.torch.prepare_model(inner)
    optimizer = job.optimizer(model.parameters())
    data, batches = parts(job, number, workers)

    def step() -> float:
        fields, weight = next(batches)
        optimizer.zero_grad()
        loss = mean(job.loss(model, *fields), weight)
        loss.backward()
        optimizer.step()
        return loss.item()

    serve(config["line"], number, step, lambda: job.mean_loss(inner, data))


# samestep


def samestep(
    job: Job, line: str, workers: int, lanes: int, compile: bool = False, exact: bool = True
) -> None:
    import samestep as ss

    # A worker that blocks between two turns does not hang.
    ss.launch(
        train, devices=f"{workers}xcpu", lanes=lanes, exact=exact, seed=SEED, hang_after=None,
        args=(job, line, compile),
    )  # fmt: skip


def train(team: Any, job: Job, line: str, compile: bool) -> None:
    model = job.fresh_model()
    data = job.data()
    trainer = team.trainer(model, job.optimizer(model.parameters()), job.loss, compile=compile)

    def batches() -> Iterator[Any]:
        while True:
            yield from team.batches(data, job.batch, drop_last=True)

    each = batches()
    serve(line, team.number, lambda: trainer.step(next(each)), lambda: job.mean_loss(model, data))


def main(name: str, job: str, line: str, *options: str) -> None:
    if name == "ray":
        return ray(job, line)
    values = {key: int(value) for key, value in (option.split("=") for option in options)}
    flags = {key: bool(values.pop(key)) for key in ("compile", "exact") if key in values}
    return globals()[name](JOBS[job], line, **values, **flags)


if __name__ == "__main__":
    main(*[argument for argument in sys.argv[1:] if not argument.startswith("--local_rank")])
