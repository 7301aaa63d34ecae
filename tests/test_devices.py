"""Reading `devices=`, for machines that are not here too."""

from __future__ import annotations

import pytest
import torch

import samestep as ss
from samestep.devices import (
    Device,
    Machine,
    NumericsClass,
    compare,
    inventory,
    parse,
    pinning,
    probe,
)

CORES = Machine(cores=(0, 2, 4, 6), gpus=0)
GPUS = Machine(cores=(0, 1), gpus=2)


def names(devices, machine, lanes=8):
    return [str(device) for device in parse(devices, machine, lanes)[0]]


@pytest.mark.parametrize(
    ("devices", "machine", "found"),
    [
        ("all", CORES, ["cpu:0", "cpu:1", "cpu:2", "cpu:3"]),
        ("all", GPUS, ["cuda:0", "cuda:1"]),
        (3, CORES, ["cpu:0", "cpu:1", "cpu:2"]),
        (2, GPUS, ["cuda:0", "cuda:1"]),
        ("cpu", GPUS, ["cpu:0"]),
        ("3xcpu", GPUS, ["cpu:0", "cpu:1", "cpu:2"]),
        ("cuda:1", GPUS, ["cuda:1"]),
        ("2xcuda, cpu", GPUS, ["cuda:0", "cuda:1", "cpu:0"]),
        ("cuda:0,cuda:0", GPUS, ["cuda:0", "cuda:0"]),
        ("cpu,cpu@0.25", CORES, ["cpu:0", "cpu:1@0.25"]),
        (["cpu", "cpu"], CORES, ["cpu:0", "cpu:1"]),
    ],
)
def test_parse(devices, machine, found):
    assert names(devices, machine) == found


def test_all_never_starts_more_workers_than_lanes_and_says_so():
    found, notices = parse("all", CORES, lanes=3)
    assert len(found) == 3
    assert notices == (
        "devices='all': using 3 of 4 cpu devices, one for each lane; lanes=4 would use all "
        "(and is another training)",
    )


@pytest.mark.parametrize("devices", ["3xcuda", 3, "cuda:2", "cuda:0,cuda:7"])
def test_more_gpus_than_there_are(devices):
    with pytest.raises(ss.DeviceError, match=r"this machine has 2 GPUs \(cuda:0 to cuda:1\) and 2"):
        parse(devices, GPUS, 8)


def test_pinning_gives_each_worker_cores_of_its_own():
    devices = parse("cpu,cpu,cuda:0", Machine((0, 2, 4, 6), 1), 8)[0]
    assert pinning(devices, CORES, 1) == [(0,), (2,), ()]
    assert pinning(devices, CORES, 2) == [(0, 2), (4, 6), ()]
    assert pinning(devices, CORES, 3) == [(), (), ()]


def test_inventory_is_this_machine():
    machine = inventory()
    assert machine.cores
    assert machine.gpus == torch.cuda.device_count()


def test_probe_is_the_same_each_time_and_quick():
    import time

    first = probe(torch.device("cpu"))
    began = time.perf_counter()
    assert probe(torch.device("cpu")) == first
    assert time.perf_counter() - began < 0.1


def numerics(**changes):
    values = {"kind": "cpu", "model": "m", "threads": 1, "torch": "2", "flags": "f", "probe": "a"}
    return NumericsClass(**(values | changes))


@pytest.mark.parametrize(
    "change", [{"probe": "b"}, {"threads": 2}, {"kind": "cuda"}, {"flags": "g"}]
)
def test_a_device_of_another_class_is_named_with_the_reason(change):
    error = compare(["cpu:0", "cpu:1", "x"], [numerics(), numerics(), numerics(**change)])
    assert isinstance(error, ss.DeviceDiffers)
    ((field, value),) = change.items()
    assert f"cpu:0 and x do not give the same bits ({field}: " in str(error)
    assert f" / {value})" in str(error)
    assert "exact=False" in str(error)


def test_devices_of_one_class():
    assert compare(["a", "b"], [numerics(), numerics()]) is None


def test_device_names():
    assert Device("cuda", 1).torch_device == torch.device("cuda:1")
    assert Device("cpu", 3).torch_device == torch.device("cpu")
