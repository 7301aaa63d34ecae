"""The command line: `samestep devices | train | run | prove | replay | memory | demo`."""

from __future__ import annotations

import contextlib
import json
import sys
import tempfile
import traceback
from collections.abc import Sequence
from enum import Enum
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from samestep import models
from samestep.devices import describe, inventory
from samestep.errors import DatasetMissing, SamestepError, UsageError
from samestep.launch import Overrides, launch, overridden
from samestep.memory import PARTS
from samestep.prove import holds, model_job, prove, run_script, script_job
from samestep.replay import replay
from samestep.stores import STORES

app = typer.Typer(
    help="The same training on any set of devices.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)

Model = Enum("Model", {name: name for name in models.MODELS})  # type: ignore[misc]
Data = Enum("Data", {name: name for name in models.DATA})  # type: ignore[misc]
Precision = Enum("Precision", {"fp32": "fp32", "bf16": "bf16"})
Optimizer = Enum("Optimizer", {name: name for name in models.OPTIMIZERS})  # type: ignore[misc]
Store = Enum("Store", {name: name for name in STORES})  # type: ignore[misc]

Devices = Annotated[
    str, typer.Option(help="all, a number, or terms such as cuda:1, cpu, 3xcpu, cpu@0.25")
]
Lanes = Annotated[int, typer.Option(help="Parts of a global batch; part of the result.")]
Seed = Annotated[int, typer.Option(help="Decides every random number.")]


@app.command("devices")
def devices_() -> None:
    """List the devices of this machine and which of them give the same bits."""
    table = Table("device", "name", "memory", "cores", "numerics class")
    for row in describe(inventory()):
        table.add_row(*row.values())
    Console().print(table)


@app.command()
def train(
    model: Annotated[Model, typer.Argument(help="The network.")],
    devices: Devices = "all",
    batch_size: Annotated[
        int, typer.Option(help="Samples of a step, on all devices together.")
    ] = 256,
    lr: Annotated[float, typer.Option(help="Learning rate.")] = 0.2,
    epochs: Annotated[int, typer.Option(help="Passes over the data.")] = 10,
    lanes: Lanes = 8,
    seed: Seed = 0,
    run: Annotated[
        Path | None, typer.Option(help="Folder for results; runs/MODEL unless given.")
    ] = None,
    data: Annotated[Data, typer.Option(help="The dataset.")] = Data["fashion-mnist"],
    data_dir: Annotated[Path | None, typer.Option(help="Folder with its .gz files.")] = None,
    samples: Annotated[int | None, typer.Option(help="Train on the first ones only.")] = None,
    precision: Annotated[
        Precision, typer.Option(help="bf16 runs under autocast.")
    ] = Precision.fp32,
    compile: Annotated[bool, typer.Option(help="Compile with torch.compile.")] = False,
    exact: Annotated[bool, typer.Option(help="Same bits on any devices.")] = True,
    resume: Annotated[bool, typer.Option(help="Go on from the run's newest checkpoint.")] = False,
    save_every: Annotated[
        str, typer.Option(help="A checkpoint after so many steps, or a time such as '10 min'.")
    ] = "10 min",
    keep: Annotated[int, typer.Option(help="How many checkpoints stay.")] = 3,
) -> None:
    """Train a network of the tutorials."""
    if epochs < 1:
        raise UsageError(f"--epochs {epochs}: must be at least 1")
    run = run or Path("runs") / model.value
    recipe = models.Recipe(
        model=model.value,
        data=data.value,
        data_dir=str(data_dir) if data_dir else None,
        batch_size=batch_size,
        lr=lr,
        epochs=epochs,
        compile=compile,
        precision=precision.value,
        samples=samples,
        save_to=str(run / "weights.safetensors"),
    )
    _train(
        recipe,
        run,
        devices,
        lanes=lanes,
        seed=seed,
        exact=exact,
        resume=resume,
        save_every=int(save_every) if save_every.isdigit() else save_every,
        keep=keep,
    )


@app.command()
def demo(
    devices: Devices = "all",
    epochs: Annotated[int, typer.Option(help="Passes over the data.")] = 10,
) -> None:
    """Train LeNet on Fashion-MNIST, or on drawn shapes where that cannot be had."""
    run, data = Path("runs/demo"), "fashion-mnist"
    try:
        models.DATA[data](None)
    except DatasetMissing as error:
        print(f"Fashion-MNIST cannot be had here ({error}); training on drawn shapes instead.")
        data = "shapes"
    weights = str(run / "weights.safetensors")
    recipe = models.Recipe(data=data, epochs=epochs, save_to=weights)
    _train(recipe, run, devices)


def _train(recipe: models.Recipe, run: Path, devices: str, **settings: Any) -> None:
    # Here and not in the workers first, so that a download happens once and shows its progress.
    training, test = models.DATA[recipe.data](recipe.data_dir)
    if recipe.samples is not None and not 0 < recipe.samples <= len(training):
        raise UsageError(f"--samples {recipe.samples}: must be from 1 to {len(training)}")
    count = recipe.samples or len(training)
    print(f"{recipe.model} on {recipe.data}: {count} images, {len(test)} for testing")
    result = launch(models.train, devices=devices, run=run, args=(recipe,), **settings)
    print(f"seconds per epoch  {result['seconds_per_epoch']:.2f} on average")
    print(f"samples per second {result['samples_per_second']:,.0f}")
    print(f"test accuracy      {result['accuracy']:.4f}")
    print(f"devices            {result['devices']}")
    print(f"fingerprint        {result['fingerprint']}")
    print(f"results in         {run}")


@app.command(context_settings={"allow_interspersed_args": False, "ignore_unknown_options": True})
def run(
    script: Annotated[Path, typer.Argument(help="A script that calls samestep.launch.")],
    arguments: Annotated[list[str] | None, typer.Argument(help="The script's own.")] = None,
    devices: Annotated[str | None, typer.Option(help="Instead of the script's own.")] = None,
    lanes: Annotated[int | None, typer.Option(help="Instead of the script's own.")] = None,
    seed: Annotated[int | None, typer.Option(help="Instead of the script's own.")] = None,
    trace: Annotated[
        str | None, typer.Option(help="A file for a trace, for ui.perfetto.dev.")
    ] = None,
    trace_steps: Annotated[int | None, typer.Option(help="How many steps of it.")] = None,
) -> None:
    """Run a script with its devices, lanes or seed given from outside (options before SCRIPT)."""
    _check_script(script)
    over = Overrides(devices=devices, lanes=lanes, seed=seed, trace=trace, trace_steps=trace_steps)
    with overridden(over):
        _show_only_the_script(script, arguments or [])


@app.command("prove")
def prove_(
    what: Annotated[str, typer.Argument(help="A network of `train`, or a script.")],
    arguments: Annotated[list[str] | None, typer.Argument(help="The script's own.")] = None,
    lanes: Lanes = 8,
    seed: Annotated[int | None, typer.Option(help="Instead of the script's own.")] = None,
    steps: Annotated[int, typer.Option(help="How many steps to train.")] = 12,
) -> None:
    """Train on different devices and plans, and compare the fingerprints.

    The control is trained with another number of lanes and must differ. Exits with 0 only if all
    others are equal.
    """
    if steps < 1 or lanes < 1:
        raise UsageError(f"--steps {steps} --lanes {lanes}: both must be at least 1")
    if what in models.MODELS:
        job = model_job(what, steps)
    elif what.endswith(".py"):
        _check_script(Path(what))
        job = script_job(Path(what), arguments or [])
    else:
        raise UsageError(f"{what!r}: must be a script, or one of {', '.join(models.MODELS)}")
    rows = []
    print(f"{'training':<18} {'devices':<8} lanes  SHA-256 of weights, buffers, optimizer state")
    for row in prove(job, inventory(), lanes, seed, steps):
        rows.append(row)
        case, prints = row.case, ", ".join(row.fingerprints)
        print(f"{case.name:<18} {case.devices:<8} {case.lanes:>5}  {prints}", flush=True)
    if not holds(rows):
        differs = rows[0].fingerprints != rows[1].fingerprints
        print(
            "NOT PROVED: " + ("the fingerprints differ" if differs else "the control is equal too")
        )
        raise typer.Exit(1)
    print(
        f"PROVED: {len(rows) - 1} trainings of {steps} steps gave the same bits; "
        "the control did not"
    )


@app.command("memory")
def memory_(
    model: Annotated[Model, typer.Argument(help="The network.")],
    devices: Devices = "all",
    batch_size: Annotated[
        int, typer.Option(help="Samples of a step, on all devices together.")
    ] = 256,
    lanes: Lanes = 8,
    optimizer: Annotated[Optimizer, typer.Option(help="The optimizer.")] = Optimizer["sgd"],
    store: Annotated[
        Store, typer.Option(help="Where its state lives: in each worker, or once.")
    ] = Store["replicated"],
    width: Annotated[int, typer.Option(help="Of the mlp's two hidden layers.")] = 0,
) -> None:
    """What a training needs in memory, per device: predicted, and measured after a few steps."""
    if batch_size < 1 or width < 0:
        raise UsageError(f"--batch-size {batch_size} --width {width}: must not be negative")
    with tempfile.TemporaryDirectory() as folder:
        args = (model.value, optimizer.value, store.value, batch_size, width, folder)
        launch(models.weigh, devices=devices, lanes=lanes, args=args)
        weighed = [json.loads(path.read_text()) for path in sorted(Path(folder).glob("*.json"))]
    table = Table("", "", *PARTS, "sum", "process", title=f"{model.value}, MB")
    for worker, found in enumerate(weighed):
        for kind in ("predicted", "measured"):
            parts = [found[kind][part] for part in PARTS]
            process = f"{found['process'] / 1e6:.0f}" if kind == "measured" else ""
            numbers = [f"{part / 1e6:.1f}" for part in (*parts, sum(parts))]
            table.add_row(f"worker {worker} ({found['device']})", kind, *numbers, process)
    wide = Console(width=max(100, Console().width))
    wide.print(table)
    wide.print(
        "process: all of the worker, what it shares divided between those that share it (torch "
        "itself among that)"
    )


@app.command("replay")
def replay_(
    run: Annotated[Path, typer.Argument(help="The folder of a run.")],
    step: Annotated[int, typer.Option(help="The step, as messages count them.")],
    lane: Annotated[int | None, typer.Option(help="Only this lane.")] = None,
    debug: Annotated[
        bool, typer.Option("--pdb", help="Stop in the loss function, in Python's debugger.")
    ] = False,
) -> None:
    """Look at one step of a run again, on one device: loss and gradient norms, lane by lane."""
    reports = replay(run, step, lane, debug, _start_again, _say)
    table = Table("", *(f"lane {report.lane}" for report in reports), title=f"step {step}")
    table.add_row("loss", *(f"{report.loss / report.weight:.6g}" for report in reports))
    table.add_row("weight", *(f"{report.weight:g}" for report in reports))
    table.add_row("SHA-256", *(report.digest[:8] for report in reports))
    for name in dict.fromkeys(name for report in reports for name, _ in report.norms):
        norms = (dict(report.norms).get(name) for report in reports)
        table.add_row(name, *("-" if norm is None else f"{norm:.4g}" for norm in norms))
    Console(width=max(80, 24 + 12 * len(reports))).print(table)


def _say(text: str) -> None:
    print(f"samestep: {text}", file=sys.stderr)


def _start_again(argv: Sequence[str], folder: Path) -> None:
    """Start the program of a run again, as it was started."""
    with contextlib.chdir(folder):
        if argv[0].endswith(".py") and Path(argv[0]).name != "cli.py":
            _check_script(Path(argv[0]))
            run_script(Path(argv[0]), list(argv[1:]))
        elif Path(argv[0]).stem in ("samestep", "cli"):
            app(list(argv[1:]), standalone_mode=False)
        else:
            raise UsageError(
                f"the run was not started from a script (but from {argv[0] or 'a prompt'!r}), so "
                "it cannot be started again from here; put its code into a script"
            )


def _check_script(script: Path) -> None:
    if not script.is_file():
        raise UsageError(f"{script}: there is no such script")


def _show_only_the_script(script: Path, arguments: list[str]) -> None:
    """A traceback begins where the script's own would."""
    try:
        run_script(script, arguments)
    except SamestepError as error:
        if not _script_frames(error, script):
            raise
        _print_from(error, script)
    except Exception as error:
        _print_from(error, script)


def _script_frames(error: BaseException, script: Path) -> Any:
    trace = error.__traceback__
    while trace is not None and trace.tb_frame.f_code.co_filename != str(script):
        trace = trace.tb_next
    return trace


def _print_from(error: BaseException, script: Path) -> None:
    traceback.print_exception(error.with_traceback(_script_frames(error, script)))
    raise typer.Exit(1)


def main() -> None:
    """The entry point: an error of samestep's is one line, Ctrl-C is no traceback."""
    try:
        app()
    except SamestepError as error:
        print(f"samestep: {error}", file=sys.stderr)
        sys.exit(2 if isinstance(error, UsageError) else 1)
    except KeyboardInterrupt:
        print("samestep: interrupted", file=sys.stderr)
        sys.exit(130)


if __name__ == "__main__":
    main()
