"""Launching, and what the user sees when something is wrong. Real processes and real signals."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pytest
import torch

import jobs
import samestep as ss
from conftest import DEADLINE_S, descendants

TRAIN = """
    import os, signal, sys, time
    import torch
    import torch.nn.functional as F
    import samestep as ss

    def loss(model, x, y):
        return F.cross_entropy(model(x), y, reduction="none")

    def main(team, steps=4):
        x, y = torch.randn(64, 4), torch.randint(0, 3, (64,))
        model = torch.nn.Linear(4, 3)
        trainer = team.trainer(model, torch.optim.SGD(model.parameters(), lr=0.1), loss)
        for batch in team.batches(ss.data.Tensors(x, y), 16):
            trainer.step(batch)
        return trainer.fingerprint()
"""


def script(tmp_path, text, name="train.py"):
    path = tmp_path / name
    path.write_text(textwrap.dedent(TRAIN) + textwrap.dedent(text))
    return path


def python(*arguments, timeout=60, **options):
    return subprocess.run(
        [sys.executable, *map(str, arguments)],
        capture_output=True,
        text=True,
        timeout=timeout,
        check=False,
        **options,
    )


def run_script(tmp_path, text, *arguments):
    return python(script(tmp_path, text), *arguments)


def wait_for(condition, what):
    deadline = time.monotonic() + DEADLINE_S
    while not condition():
        assert time.monotonic() < deadline, f"waited in vain for {what}"
        time.sleep(0.01)


# Ways to launch


@pytest.fixture(scope="module")
def fingerprint(tmp_path_factory):
    """What TRAIN gives, from a script without a __main__ guard."""
    done = run_script(tmp_path_factory.mktemp("train"), 'print(ss.launch(main, devices="2xcpu"))')
    assert done.stderr == ""
    return done.stdout.strip()


def test_script_without_main_guard(fingerprint):
    assert re.fullmatch("[0-9a-f]{64}", fingerprint)


def test_dash_c(fingerprint):
    text = textwrap.dedent(TRAIN) + 'print(ss.launch(main, devices="1xcpu"))'
    assert python("-c", text).stdout.strip() == fingerprint


def test_repl(fingerprint):
    done = subprocess.run(
        [sys.executable, "-i", "-q"],
        input=textwrap.dedent(TRAIN) + '\nss.launch(main, devices="2xcpu")\n',
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    assert fingerprint in done.stdout


def test_twice_in_a_row_in_one_process(tmp_path, fingerprint):
    done = run_script(
        tmp_path,
        """
        print(ss.launch(main, devices="2xcpu"))
        print(ss.launch(main, devices="3xcpu"))
        """,
    )
    assert done.stdout.split() == [fingerprint] * 2


NOTEBOOK = """
    import sys
    import nbclient, nbformat

    book = nbformat.v4.new_notebook()
    book.cells = [nbformat.v4.new_code_cell(text) for text in sys.argv[1:]]
    nbclient.NotebookClient(book, timeout=60).execute()
    print(book.cells[1].outputs[0]["data"]["text/plain"])
    print(book.cells[2].outputs[0]["text"], end="")
"""


def test_notebook(tmp_path, fingerprint):
    pytest.importorskip("nbclient")
    done = python(
        "-c",
        textwrap.dedent(NOTEBOOK),
        textwrap.dedent(TRAIN),
        'ss.launch(main, devices="2xcpu")',
        'ss.launch(lambda team: team.print("shown") or 1, devices=1)',
        cwd=tmp_path,
        env={**os.environ, "IPYTHONDIR": str(tmp_path / "ipython"), "PYTHONWARNINGS": "ignore"},
    )
    assert done.stdout.splitlines() == [repr(fingerprint), "shown"], done.stderr


def test_lambda_closure_arguments_and_result():
    offset = torch.arange(100_000)
    result = ss.launch(
        lambda team, a, b: (team.size, a + b, int(offset.sum())),
        devices="2xcpu",
        args=(1,),
        kwargs={"b": 2},
    )
    assert result == (2, 3, int(offset.sum()))


def test_large_tensors_of_the_launcher_are_mapped_and_not_shared_for_writing():
    data = torch.zeros(1 << 20)

    def main(team):
        before = data.sum().item()
        data.fill_(team.number + 1)
        return before, data.sum().item()

    assert ss.launch(main, devices="2xcpu") == (0, 1 << 20)
    assert data.sum() == 0


def test_tensors_are_held_once_per_machine():
    """Proportional set size: pages that three workers share count a third in each."""

    def main(team):
        size = 64 << 20
        data = ss.data.Tensors(torch.ones(size // 4))
        batch = next(iter(team.batches(data, 8)))
        assert batch.loader.load(batch.unit(range(1)))[0].sum() > 0
        data.fields[0].sum()
        model = torch.nn.Linear(1, 1)
        trainer = team.trainer(
            model, torch.optim.SGD(model.parameters(), lr=0.1), lambda m, x: m(x[:, None]).flatten()
        )
        trainer.step(batch)  # by now everyone has read all of it
        totals = {"Rss": 0, "Pss": 0}
        mapped = False
        for line in Path("/proc/self/smaps").read_text().splitlines():
            if re.match("[0-9a-f]+-[0-9a-f]+ ", line):
                mapped = "samestep-data" in line
            elif mapped and line.partition(":")[0] in totals:
                totals[line.partition(":")[0]] += int(line.split()[1]) * 1024
        trainer.step(batch)  # stay until everyone has looked
        return totals["Rss"] / size, totals["Pss"] / size

    resident, proportional = ss.launch(main, devices="3xcpu")
    assert resident > 0.95
    assert proportional < 0.4


def test_team_is_what_main_is_given():
    def main(team):
        return team.size, team.lanes, team.is_first, str(team.device), team.position, repr(team)

    size, lanes, first, device, position, text = ss.launch(main, devices="2xcpu", lanes=4)
    assert (size, lanes, first, device, position) == (2, 4, True, "cpu", (0, 0))
    assert text == "<Team: worker 0 of 2 on cpu:0, 4 lanes, epoch 0, step 0>"


def test_position_counts_epochs_and_steps():
    def main(team):
        seen = [team.position]
        model = torch.nn.Linear(1, 1)
        trainer = team.trainer(
            model, torch.optim.SGD(model.parameters(), lr=0.1), lambda m, x: m(x).flatten()
        )
        data = ss.data.Tensors(torch.ones(8, 1))
        for _ in team.epochs(2):
            for batch in team.batches(data, 4):
                trainer.step(batch)
                seen.append(team.position)
        for batch in team.batches(data, 8):
            trainer.step(batch)
        return [*seen, team.position]

    positions = [(0, 0), (0, 1), (0, 2), (1, 3), (1, 4), (3, 5)]
    assert ss.launch(main, devices="2xcpu") == positions


def test_workers_are_pinned_to_cores_of_their_own():
    def main(team):
        return sorted(os.sched_getaffinity(0))

    if len(os.sched_getaffinity(0)) >= 2:
        assert len(ss.launch(main, devices="2xcpu")) == 1
    assert len(ss.launch(main, devices="65xcpu", lanes=65)) == len(os.sched_getaffinity(0))


# Output


def test_lines_have_a_prefix_and_team_print_prints_once(tmp_path):
    done = run_script(
        tmp_path,
        """
        def talk(team):
            print("from a worker")
            print("an error line", file=sys.stderr)
            team.print("once", 1, sep="-")
            team.log(accuracy=0.5, epoch=3)
        ss.launch(talk, devices="2xcpu")
        """,
    )
    out = done.stdout.splitlines()
    assert sorted(out) == [
        "accuracy 0.5000  epoch 3",
        "once-1",
        "worker 0 | from a worker",
        "worker 1 | from a worker",
    ]
    assert sorted(done.stderr.splitlines()) == [
        "worker 0 | an error line",
        "worker 1 | an error line",
    ]


def test_a_megabyte_arrives_whole(tmp_path):
    done = run_script(
        tmp_path,
        """
        def talk(team):
            if team.is_first:
                for i in range(10_000):
                    print(i, "x" * 100)
                sys.stdout.write("y" * (1 << 20))
        ss.launch(talk, devices="2xcpu")
        """,
    )
    lines = done.stdout.splitlines()
    assert lines[:10_000] == [f"worker 0 | {i} {'x' * 100}" for i in range(10_000)]
    assert lines[10_000:] == ["worker 0 | " + "y" * (1 << 20)]


# Failures


def only_traceback(stderr):
    """The lines after the one traceback's header."""
    assert stderr.count("Traceback (most recent call last)") == 1, stderr
    return stderr.partition("Traceback (most recent call last):\n")[2].splitlines()


def test_an_exception_in_the_loss_is_one_traceback_with_the_users_line_last(tmp_path):
    done = run_script(
        tmp_path,
        """
        def loss(model, x, y):
            if team_step() == 2:
                raise ValueError("wrong on purpose")
            return F.cross_entropy(model(x), y, reduction="none")
        calls = []
        def team_step():
            calls.append(1)
            return (len(calls) - 1) // 4
        ss.launch(main, devices="2xcpu")
        """,
    )
    assert done.returncode == 1
    lines = only_traceback(done.stderr)
    assert re.fullmatch(r"worker [01] \(cpu:[01]\), step 2, lane [04]", lines[-1])
    assert lines[-2] == "ValueError: wrong on purpose"
    assert 'raise ValueError("wrong on purpose")' in lines[-4] + lines[-3]
    samestep_frames = [line for line in lines if "samestep/" in line]
    assert len(samestep_frames) == 1
    assert "launch.py" in samestep_frames[0]


def test_exceptions_keep_type_cause_and_attributes():
    class Special(Exception):
        def __init__(self, code):
            super().__init__(f"code {code}")
            self.code = code

        def __reduce__(self):
            return Special, (self.code,)

    def main(team):
        try:
            {}["missing"]
        except KeyError as error:
            raise Special(7) from error

    with pytest.raises(Special) as caught:
        ss.launch(main, devices="2xcpu")
    assert caught.value.code == 7
    assert isinstance(caught.value.__cause__, KeyError)


def test_an_exception_that_cannot_be_pickled_arrives_by_name():
    def main(team):
        class Local(Exception):
            def __reduce__(self):
                raise TypeError("no")

        raise Local("what it says")

    with pytest.raises(ss.RemoteError, match="Local: what it says"):
        ss.launch(main, devices="1xcpu")


class Raises(torch.utils.data.Dataset):
    def __len__(self):
        return 32

    def __getitem__(self, index):
        if index == 13:
            raise OSError("sample 13 is broken")
        return torch.zeros(1)


@pytest.mark.parametrize("loaders", [0, 1])
def test_a_dataset_that_raises(loaders):
    def main(team):
        model = torch.nn.Linear(1, 1)
        trainer = team.trainer(
            model, torch.optim.SGD(model.parameters(), lr=0.1), lambda m, x: m(x).flatten()
        )
        for batch in team.batches(Raises(), 8, shuffle=False, loaders=loaders):
            trainer.step(batch)

    with pytest.raises(OSError, match="sample 13 is broken") as caught:
        ss.launch(main, devices="2xcpu")
    (note,) = caught.value.__notes__
    assert note == "worker 1 (cpu:1), step 1, lane 5"
    import traceback

    frames = traceback.extract_tb(caught.value.__traceback__)
    assert frames[-1].name == "__getitem__"


def test_a_model_that_does_not_fit_the_data():
    def main(team):
        return jobs.fit(
            team,
            model := torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(99, 5)),
            torch.optim.SGD(model.parameters(), lr=0.1),
            jobs.cross_entropy,
            jobs.images(),
            1,
            16,
        )

    with pytest.raises(RuntimeError, match="shapes cannot be multiplied") as caught:
        ss.launch(main, devices="2xcpu")
    assert re.fullmatch(r"worker \d \(cpu:\d\), step 0, lane [04]", caught.value.__notes__[0])


@pytest.mark.parametrize(
    ("way", "says"),
    [
        ("os.kill(os.getpid(), signal.SIGKILL)", "SIGKILL (killed from outside: the kernel's"),
        ("os.kill(os.getpid(), signal.SIGSEGV)", "SIGSEGV (a crash in native code)"),
        ("os._exit(3)", "left with exit status 3"),
    ],
)
def test_a_worker_that_dies_alone_is_named_with_device_and_signal(tmp_path, way, says):
    done = run_script(
        tmp_path,
        f"""
        def die(team):
            {way}
        ss.launch(die, devices="1xcpu")
        """,
    )
    message = only_traceback(done.stderr)
    text = "\n".join(message)
    assert "samestep.WorkerDied: worker 0 (cpu:0)" in text
    assert says in text
    assert "at step 0, in main" in text
    assert text.rstrip().endswith("no worker is left")
    if "SIGSEGV" in says:
        assert "in die" in text, "the Python stack of the crash"


def test_sys_exit_in_main():
    def main(team):
        sys.exit(3)

    with pytest.raises(SystemExit) as caught:
        ss.launch(main, devices="2xcpu")
    assert caught.value.code == 3


def test_a_result_that_cannot_be_sent():
    with pytest.raises(ss.UsageError, match=r"main: returned .*cannot be sent"):
        ss.launch(lambda team: team, devices="1xcpu")


def test_models_that_differ_between_workers():
    def main(team):
        model = torch.nn.Linear(2, 2)
        with torch.no_grad():
            model.weight += team.number
        team.trainer(model, torch.optim.SGD(model.parameters(), lr=0.1), jobs.cross_entropy)

    with pytest.raises(ss.TeamError, match="built different models: they differ in the values"):
        ss.launch(main, devices="2xcpu")


def test_weights_changed_on_one_worker_only_are_noticed():
    def main(team):
        model = torch.nn.Linear(2, 2)
        team.trainer(model, torch.optim.SGD(model.parameters(), lr=0.1), jobs.cross_entropy)
        if team.number == 1:
            model.weight.data.view(torch.int32)[0, 0] ^= 1

    with pytest.raises(ss.DeviceDiffers, match=r"worker 0 \(cpu:0\): .*worker 1 \(cpu:1\)"):
        ss.launch(main, devices="2xcpu")


def test_a_device_with_other_arithmetic_is_refused(monkeypatch):
    """Real other bits: one worker is told to flush denormal numbers, another not, through its
    numerics class; the self-test's hash is of the probe lane."""
    from samestep import worker

    code = """
        import samestep.worker as worker
        from dataclasses import replace
        honest = worker.numerics_class
        def other(device):
            mine = honest(device)
            return replace(mine, probe="0" * 16) if device.number == 1 else mine
        worker.numerics_class = other
        """
    assert worker.numerics_class  # what the text above replaces
    done = python(
        "-c",
        textwrap.dedent(
            """
            import samestep as ss, samestep.forkserver as forkserver, textwrap
            import subprocess
            real = subprocess.Popen
            def popen(command, **options):
                command[-3] = command[-3].replace("serve(int", "exec(PATCH); serve(int")
                command[-3] = "PATCH = " + repr(textwrap.dedent(CODE)) + "\\n" + command[-3]
                return real(command, **options)
            forkserver.subprocess.Popen = popen
            ss.launch(lambda team: __import__("time").sleep(30), devices="2xcpu")
            """
        ).replace("CODE", repr(code)),
    )
    assert "samestep.DeviceDiffers: devices cpu:0 (worker 0) and cpu:1 (worker 1)" in done.stderr
    assert "exact=False" in done.stderr


# Signals to the launcher


def started(tmp_path, text):
    """A script under way: its process, once it has printed "ready"."""
    process = subprocess.Popen(
        [sys.executable, script(tmp_path, text)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    for line in process.stdout:
        if "ready" in line:
            return process
    raise AssertionError(process.stderr.read())


LONG = """
    def main(team):
        x, y = torch.randn(6400, 4), torch.randint(0, 3, (6400,))
        model = torch.nn.Linear(4, 3)
        trainer = team.trainer(model, torch.optim.SGD(model.parameters(), lr=0.1), loss)
        for epoch in team.epochs(10_000):
            for batch in team.batches(ss.data.Tensors(x, y), 16):
                trainer.step(batch)
                if team.position.step == 20:
                    team.print("ready")
                {extra}
    ss.launch(main, devices="2xcpu")
"""


@pytest.mark.parametrize("extra", ["pass", "time.sleep(5) if team.position.step == 20 else 0"])
def test_ctrl_c_stops_within_a_second_and_leaves_nothing(tmp_path, extra):
    process = started(tmp_path, LONG.format(extra=extra))
    began = time.monotonic()
    process.send_signal(signal.SIGINT)
    _, stderr = process.communicate(timeout=DEADLINE_S)
    assert time.monotonic() - began < 1
    assert process.returncode in (130, -signal.SIGINT)
    assert "KeyboardInterrupt" in stderr
    assert stderr.count("Traceback") == 1


def test_a_killed_launcher_takes_everyone_along(tmp_path):
    process = started(tmp_path, LONG.format(extra="pass"))
    mine = descendants()
    assert len(mine) >= 4, "launcher, fork server and two workers (and the session's own)"
    pids = [int(entry.split()[0]) for entry in mine]
    process.kill()
    process.communicate()
    theirs = set(pids) - {int(entry.split()[0]) for entry in descendants()}
    wait_for(lambda: not any(alive(pid) for pid in theirs), "the workers to end")


def alive(pid):
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


def test_background_loaders_end_with_their_worker(tmp_path):
    process = started(
        tmp_path,
        """
        class Slow(torch.utils.data.Dataset):
            def __len__(self):
                return 64
            def __getitem__(self, index):
                return torch.zeros(4), 0
        def main(team):
            model = torch.nn.Linear(4, 3)
            trainer = team.trainer(model, torch.optim.SGD(model.parameters(), lr=0.1), loss)
            for batch in team.batches(Slow(), 8, loaders=2):
                trainer.step(batch)
                team.print("ready")
                time.sleep(60)
        ss.launch(main, devices="2xcpu")
        """,
    )
    process.kill()
    process.communicate()


# Arguments


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"devices": "2xcuda"}, r"devices='2xcuda': asks for 2 GPUs, but this machine has no GPU"),
        ({"devices": "cuda:3"}, r"devices='cuda:3': there is no cuda:3; this machine has no GPU"),
        ({"devices": "gpu"}, r"devices='gpu': cannot read 'gpu'; expected 'all', a number"),
        ({"devices": "cpu:1"}, r"devices='cpu:1': CPU workers have no number"),
        ({"devices": "cpu@2"}, r"in 'cpu@2' the count must be at least 1 and the speed above 0"),
        ({"devices": "0xcpu"}, r"in '0xcpu' the count must be at least 1"),
        ({"devices": ""}, r"devices='': cannot read ''"),
        ({"devices": 0}, r"devices=0: at least 1 device is needed"),
        ({"devices": 1.5}, r"devices=1.5: expected 'all'"),
        ({"devices": None}, r"devices=None: expected 'all'"),
        ({"lanes": 0}, r"lanes=0: must be a whole number of at least 1"),
        ({"lanes": "8"}, r"lanes='8': must be a whole number"),
        ({"seed": -1}, r"seed=-1: must be a whole number of at least 0"),
        ({"threads": 0}, r"threads=0: must be a whole number of at least 1"),
        ({"args": (1, 2)}, r"main: <lambda>\(team\) cannot be called"),
        ({"resume": True}, r"resume=True: give the run's folder too"),
        ({"resume": "yes"}, r"resume='yes': must be True, False or \"edited\""),
        ({"save_every": "soon"}, r"save_every='soon': must be a number of steps, a time such as"),
        ({"save_every": 0}, r"save_every=0: must be a number of steps"),
        ({"keep": 0}, r"keep=0: must be a whole number of at least 1"),
        ({"max_losses": -1}, r"max_losses=-1: must be a whole number of at least 0"),
        ({"check_every": "often"}, r"check_every='often': must be a whole number"),
        ({"hang_after": 0}, r"hang_after=0: must be a number of seconds above 0, or None"),
        ({"hang_after": "30"}, r"hang_after='30': must be a number of seconds"),
        ({"devices": []}, r"devices=\[\]: at least 1 device is needed"),
        ({"kwargs": [1]}, r"kwargs=\[1\]: must be a dict"),
        ({"exact": "no"}, r"exact='no': must be True or False"),
        ({"replace": None}, r"replace=None: must be True or False"),
        ({"plan": 5}, r"plan=5: must be a function plan\(lanes, step\), or None"),
        ({"run": 5}, r"run=5: must be the path of a folder"),
        ({"run": ""}, r"run='': must be the path of a folder"),
        ({"run": "/dev/null/x"}, r"run='/dev/null/x': must be a folder that can be made"),
    ],
)
@pytest.mark.skipif(torch.cuda.is_available(), reason="the messages are those without a GPU")
def test_wrong_arguments(options, says):
    with pytest.raises(ss.UsageError, match=says):
        ss.launch(lambda team: None, **options)


def test_main_must_be_a_function():
    with pytest.raises(ss.UsageError, match="main: must be a function"):
        ss.launch("train")


def trainer_with(**changes):
    def main(team):
        model = torch.nn.Linear(2, 2)
        parts = {
            "model": model,
            "optimizer": torch.optim.SGD(model.parameters(), lr=0.1),
            "loss": lambda model, x: model(x).sum(1),
            "batch_size": 4,
            "data": ss.data.Tensors(torch.zeros(8, 2)),
        }
        parts |= {key: value(model) for key, value in changes.items()}
        data, batch_size = parts.pop("data"), parts.pop("batch_size")
        trainer = team.trainer(
            parts.pop("model"), parts.pop("optimizer"), parts.pop("loss"), **parts
        )
        for batch in team.batches(data, batch_size):
            trainer.step(batch)

    return main


@pytest.mark.parametrize(
    ("changes", "error", "says"),
    [
        ({"optimizer": lambda m: torch.optim.LBFGS(m.parameters())}, "OptimizerError", "LBFGS"),
        (
            {"optimizer": lambda m: torch.optim.SparseAdam(m.parameters())},
            "OptimizerError",
            "Spars",
        ),
        (
            {"optimizer": lambda m: "sgd"},
            "OptimizerError",
            "must be a torch.optim.Optimizer, got str",
        ),
        (
            {"optimizer": lambda m: torch.optim.SGD([torch.nn.Parameter(torch.zeros(3))], lr=1)},
            "OptimizerError",
            "holds 1 parameters that are not the model's",
        ),
        ({"model": lambda m: [m]}, "UsageError", "model: must be a torch.nn.Module, got list"),
        ({"loss": lambda m: 3}, "UsageError", "loss: must be a function"),
        (
            {"precision": lambda m: "fp8"},
            "UsageError",
            "precision='fp8': must be one of fp32, bf16",
        ),
        ({"store": lambda m: "disk"}, "UsageError", "store='disk': must be one of replicated"),
        ({"clip_norm": lambda m: 0}, "UsageError", "clip_norm=0: must be above 0"),
        ({"clip_norm": lambda m: "1"}, "UsageError", "clip_norm='1': must be above 0"),
        ({"compile": lambda m: "max"}, "UsageError", "compile='max': must be True or False"),
        ({"batch_size": lambda m: 0}, "UsageError", "batch_size=0: must be a whole number"),
        ({"data": lambda m: []}, "UsageError", "dataset: has no samples"),
        ({"data": lambda m: iter([1])}, "UsageError", "dataset: needs __len__ and __getitem__"),
        ({"data": lambda m: {0: 1}}, "UsageError", "a map-style dataset.*, got dict"),
        ({"data": lambda m: torch.zeros(8, 2)}, "UsageError", "put tensors into ss.data.Tensors"),
        ({"loss": lambda m: lambda m, x: m(x).mean()}, "LossError", "a lane of 1 examples"),
        ({"loss": lambda m: lambda m, x: None}, "LossError", "returned NoneType"),
        (
            {"loss": lambda m: lambda m, x: x.sum(1)},
            "LossError",
            "does not depend on any parameter",
        ),
        ({"loss": lambda m: lambda m, x: (m(x), 1)}, "LossError", r"a sum of shape \(1, 2\)"),
        (
            {"loss": lambda m: lambda m, x: (m(x).sum(), "a")},
            "LossError",
            r"returned \(sum, weight\) with 'a' as the weight",
        ),
        (
            {"loss": lambda m: lambda m, x: (2.0, m(x).sum())},
            "LossError",
            r"must be \(sum, weight\), in this order",
        ),
        (
            {"loss": lambda m: lambda m, x: (m(x).sum(), 0.0)},
            "LossError",
            "step 0: the weights of the global batch add up to 0.0",
        ),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else None,
)
def test_wrong_parts_of_a_training(changes, error, says):
    with pytest.raises(getattr(ss, error), match=says):
        ss.launch(trainer_with(**changes), devices="2xcpu")


def test_steps_need_a_batch_of_the_team():
    def main(team):
        model = torch.nn.Linear(2, 2)
        trainer = team.trainer(
            model, torch.optim.SGD(model.parameters(), lr=0.1), lambda m, x: m(x).sum(1)
        )
        trainer.step(torch.zeros(4, 2))

    with pytest.raises(ss.UsageError, match=r"needs a batch of team.batches\(...\), got Tensor"):
        ss.launch(main, devices="1xcpu")


def test_drop_last_of_less_than_a_batch():
    def main(team):
        list(team.batches(ss.data.Tensors(torch.zeros(3)), 4, drop_last=True))

    with pytest.raises(ss.UsageError, match="batch_size=4 with drop_last=True"):
        ss.launch(main, devices="1xcpu")


def test_more_workers_than_cores_or_lanes_is_said(tmp_path):
    done = run_script(tmp_path, 'ss.launch(main, devices="9xcpu", lanes=4)')
    assert "9 CPU workers share" in done.stderr
    assert "9 workers for 4 lanes: 5 will idle" in done.stderr
    assert done.returncode == 0


def test_keep():
    def main(team):
        model = torch.nn.Linear(1, 1)
        assert team.keep("ema", model) is model
        for name, kept in (("ema", model), ("list", [])):
            with pytest.raises(ss.UsageError, match=f"keep\\('{name}'\\)"):
                team.keep(name, kept)

    ss.launch(main, devices="1xcpu")


def test_a_run_folder_keeps_settings_log_and_result(tmp_path):
    import json

    def main(team):
        team.log(loss=0.25, matrix=torch.eye(2, dtype=torch.int64))
        return {"accuracy": 0.5}

    folder = tmp_path / "runs" / "x"
    ss.launch(main, devices="2xcpu", run=folder, lanes=4, seed=3)
    record = json.loads((folder / "run.json").read_text())
    assert record["state"] == "finished"
    assert record["devices"] == ["cpu:0", "cpu:1"]
    assert (record["lanes"], record["seed"]) == (4, 3)
    assert record["result"] == {"accuracy": 0.5}
    (line,) = (folder / "log.jsonl").read_text().splitlines()
    assert json.loads(line) == {"step": 0, "loss": 0.25, "matrix": [[1, 0], [0, 1]]}

    def fail(team):
        raise ValueError("no")

    with pytest.raises(ValueError, match="no"):
        ss.launch(fail, devices="1xcpu", run=folder)
    assert json.loads((folder / "run.json").read_text())["error"] == "ValueError: no"
    assert json.loads((tmp_path / "runs" / "x.1" / "run.json").read_text()) == record


# Output that nobody takes, and how a script is started


QUIET = """
    import torch, samestep as ss
    def main(team):
        for i in range(200):
            team.print("line", i)
        return 7
    result = ss.launch(main, devices="2xcpu")
    open("result", "w").write(str(result))
"""


@pytest.mark.parametrize("where", ["| true", "| head -1", ">&-", ">/dev/full", ">&- 2>&-"])
def test_output_that_nobody_takes_does_not_stop_a_training(where, tmp_path):
    (tmp_path / "train.py").write_text(textwrap.dedent(QUIET))
    command = f"{sys.executable} train.py {where}"
    subprocess.run(
        ["bash", "-c", command], cwd=tmp_path, capture_output=True, timeout=DEADLINE_S, check=False
    )
    assert (tmp_path / "result").read_text() == "7"


def test_a_script_that_runpy_runs(tmp_path):
    (tmp_path / "train.py").write_text(textwrap.dedent(QUIET))
    code = "import runpy; runpy.run_path('train.py')"
    command = [sys.executable, "-c", code]
    subprocess.run(command, cwd=tmp_path, capture_output=True, timeout=DEADLINE_S, check=True)
    assert (tmp_path / "result").read_text() == "7"


def test_a_fork_server_that_is_killed_is_named(tmp_path):
    code = """
        import os, signal, samestep as ss
        ss.launch(lambda team: os.kill(os.getppid(), signal.SIGKILL), devices="1xcpu")
    """
    (tmp_path / "train.py").write_text(textwrap.dedent(code))
    command = [sys.executable, "train.py"]
    done = subprocess.run(
        command, cwd=tmp_path, capture_output=True, text=True, timeout=DEADLINE_S, check=False
    )
    assert "the fork server, which starts and watches the workers, was ended by SIGKILL" in (
        done.stderr
    )
