"""Devices: what is here, reading `devices=`, and whether two of them give the same bits."""

from __future__ import annotations

import hashlib
import os
import platform
import re
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
import torch.nn.functional as F

from samestep.errors import DeviceDiffers, DeviceError

__all__ = ["Device", "Machine", "NumericsClass", "compare", "inventory", "parse"]

_FORMS = "'all', a number, or terms joined by commas: cuda:1, cpu, 3xcpu, 2xcuda, cpu@0.25"


@dataclass(frozen=True, slots=True)
class Device:
    """One device of a run: `kind` and `index` as torch knows them, `number` among its kind.

    `speed` below 1 imitates a slower device: the worker pauses after each lane.
    """

    kind: str
    number: int
    speed: float = 1.0

    @property
    def torch_device(self) -> torch.device:
        return torch.device("cpu") if self.kind == "cpu" else torch.device(self.kind, self.number)

    def __str__(self) -> str:
        return f"{self.kind}:{self.number}" + (f"@{self.speed:g}" if self.speed != 1 else "")


@dataclass(frozen=True, slots=True)
class Machine:
    """What is here: the physical cores this process may use, and the number of GPUs."""

    cores: tuple[int, ...]
    gpus: int

    def __str__(self) -> str:
        gpus = {0: "no GPU", 1: "1 GPU (cuda:0)"}.get(
            self.gpus, f"{self.gpus} GPUs (cuda:0 to cuda:{self.gpus - 1})"
        )
        return f"{gpus} and {len(self.cores)} CPU core{'s' if len(self.cores) != 1 else ''}"


def inventory() -> Machine:
    """Look at this machine. No CUDA context is made."""
    return Machine(cores=_physical_cores(), gpus=torch.cuda.device_count())


def _physical_cores() -> tuple[int, ...]:
    """One logical CPU of each physical core that this process may run on."""
    if not hasattr(os, "sched_getaffinity"):
        return tuple(range(os.cpu_count() or 1))
    cores: dict[str, int] = {}
    for cpu in sorted(os.sched_getaffinity(0)):
        topology = Path(f"/sys/devices/system/cpu/cpu{cpu}/topology/thread_siblings_list")
        siblings = topology.read_text().strip() if topology.exists() else str(cpu)
        cores.setdefault(siblings, cpu)
    return tuple(cores.values())[: _cpu_quota() or None]


def _cpu_quota() -> int:
    """How many cores a container's quota allows; 0 for no limit."""
    try:
        quota, period = Path("/sys/fs/cgroup/cpu.max").read_text().split()
        return 0 if quota == "max" else max(1, int(quota) // int(period))
    except (OSError, ValueError):
        return 0


def parse(
    devices: str | int | Sequence[str], machine: Machine, lanes: int
) -> tuple[tuple[Device, ...], tuple[str, ...]]:
    """Read `devices=`; returns the devices and what the user should be told about them."""
    if isinstance(devices, bool) or not isinstance(devices, (str, int, list, tuple)):
        raise DeviceError(f"devices={devices!r}: expected {_FORMS}")
    if isinstance(devices, int):
        if devices < 1:
            raise DeviceError(f"devices={devices}: at least 1 device is needed")
        found = _many(devices, "cuda" if machine.gpus else "cpu", machine, devices)
    elif devices == "all":
        found = _all(machine)
        if len(found) > lanes:
            notice = (
                f"devices='all': using {lanes} of {len(found)} {found[0].kind} devices, one for "
                f"each lane; lanes={len(found)} would use all (and is another training)"
            )
            return found[:lanes], (notice,)
    else:
        terms = devices.split(",") if isinstance(devices, str) else list(devices)
        if not terms:
            raise DeviceError(
                f"devices={devices!r}: at least 1 device is needed; expected {_FORMS}"
            )
        found = _terms([str(term).strip() for term in terms], machine, devices)
    return found, _notices(found, machine, lanes)


def _all(machine: Machine) -> tuple[Device, ...]:
    kind, count = ("cuda", machine.gpus) if machine.gpus else ("cpu", len(machine.cores))
    return tuple(Device(kind, number) for number in range(count))


def _many(count: int, kind: str, machine: Machine, devices: object) -> tuple[Device, ...]:
    if kind == "cuda" and count > machine.gpus:
        raise DeviceError(
            f"devices={devices!r}: asks for {count} GPU{'s' if count > 1 else ''}, but this "
            f"machine has {machine}; name what is here, for example devices='all'"
        )
    return tuple(Device(kind, number) for number in range(count))


def _terms(terms: list[str], machine: Machine, devices: object) -> tuple[Device, ...]:
    found: list[Device] = []
    for term in terms:
        match = re.fullmatch(r"(?:(\d+)x)?(cpu|cuda)(?::(\d+))?(?:@(\d*\.?\d+))?", term)
        if not match or (match[1] and match[3]):
            raise DeviceError(
                f"devices={devices!r}: cannot read {term!r}; expected {_FORMS}; "
                f"this machine has {machine}"
            )
        count, kind, speed = int(match[1] or 1), match[2], float(match[4] or 1)
        if count < 1 or not 0 < speed <= 1:
            raise DeviceError(
                f"devices={devices!r}: in {term!r} the count must be at least 1 and the speed "
                "above 0 and at most 1"
            )
        if kind == "cpu":
            if match[3]:
                raise DeviceError(
                    f"devices={devices!r}: CPU workers have no number of their own in {term!r}; "
                    "write cpu, or 3xcpu for three"
                )
            first = sum(device.kind == "cpu" for device in found)
            found += [Device("cpu", first + i, speed) for i in range(count)]
        elif match[3]:
            if int(match[3]) >= machine.gpus:
                raise DeviceError(
                    f"devices={devices!r}: there is no cuda:{match[3]}; this machine has {machine}"
                )
            found.append(Device("cuda", int(match[3]), speed))
        else:
            many = _many(count, "cuda", machine, devices)
            found += [Device("cuda", device.number, speed) for device in many]
    return tuple(found)


def _notices(found: tuple[Device, ...], machine: Machine, lanes: int) -> tuple[str, ...]:
    notices = []
    workers = sum(device.kind == "cpu" for device in found)
    if workers > len(machine.cores):
        notices.append(
            f"{workers} CPU workers share {len(machine.cores)} cores: the result is the same, "
            "but they will not be faster"
        )
    if len(found) > lanes:
        notices.append(f"{len(found)} workers for {lanes} lanes: {len(found) - lanes} will idle")
    return tuple(notices)


def pinning(devices: Sequence[Device], machine: Machine, threads: int) -> list[tuple[int, ...]]:
    """The cores each worker is pinned to; none where the CPU workers do not all fit."""
    workers = [i for i, device in enumerate(devices) if device.kind == "cpu"]
    pins: list[tuple[int, ...]] = [()] * len(devices)
    if len(workers) * threads <= len(machine.cores):
        for place, worker in enumerate(workers):
            pins[worker] = machine.cores[place * threads : (place + 1) * threads]
    return pins


@dataclass(frozen=True, slots=True)
class NumericsClass:
    """Devices of one class give the same bits. `probe` is the hash of a probe lane's results."""

    kind: str
    model: str
    threads: int
    torch: str
    flags: str
    probe: str = ""

    def __str__(self) -> str:
        return f"{self.model}, torch {self.torch}, {self.threads} threads, probe {self.probe}"

    def differences(self, other: NumericsClass) -> list[str]:
        mine, theirs = asdict(self), asdict(other)
        return [
            f"{name}: {mine[name]} / {theirs[name]}" for name in mine if mine[name] != theirs[name]
        ]


def numerics_class(device: Device, probed: bool = True) -> NumericsClass:
    """The class of `device` as the calling process sees it now; `probed` runs the probe lane."""
    where = device.torch_device
    if device.kind == "cuda":
        properties = torch.cuda.get_device_properties(where)
        model = f"{properties.name} sm{properties.major}{properties.minor}"
        threads = 0  # a GPU's arithmetic does not depend on the host's threads
    else:
        model, threads = (
            f"{cpu_model()} {torch.backends.cpu.get_cpu_capability()}",
            torch.get_num_threads(),
        )
    flags = (
        f"tf32={torch.backends.cuda.matmul.allow_tf32}/{torch.backends.cudnn.allow_tf32}"
        f" deterministic={torch.are_deterministic_algorithms_enabled()}"
        f" autotune={torch.backends.cudnn.benchmark}"
        f" reduced={torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction}"
        f" precision={torch.get_float32_matmul_precision()}"
        f" dtype={str(torch.get_default_dtype()).removeprefix('torch.')}"
    )
    return NumericsClass(
        device.kind, model, threads, torch.__version__, flags, probe(where) if probed else ""
    )


def cpu_model() -> str:
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()


def memory_bytes(device: Device) -> int:
    if device.kind == "cuda":
        return int(torch.cuda.get_device_properties(device.torch_device).total_memory)
    return int(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"))


def probe(device: torch.device) -> str:
    """Run one small lane, forward and backward, and hash its results (a few milliseconds).

    It touches the kernels whose order of additions is the hardware's choice: convolution, matrix
    product, normalisation, softmax and the large sums of their gradients.
    """

    def drawn(*shape: int) -> torch.Tensor:
        count = torch.Size(shape).numel()
        values = torch.arange(count, dtype=torch.float64).mul_(0.7390851).frac_().sub_(0.5)
        return values.to(torch.float32).reshape(shape).to(device).requires_grad_()

    images, kernel, weight = drawn(8, 3, 14, 14), drawn(16, 3, 3, 3), drawn(10, 16 * 49)
    hidden = F.avg_pool2d(torch.tanh(F.conv2d(images, kernel, padding=1)), 2).flatten(1)
    hidden = F.layer_norm(hidden, hidden.shape[1:])
    loss = F.cross_entropy(hidden @ weight.T, torch.arange(8, device=device), reduction="none")
    results = torch.autograd.grad(loss.sum(), [images, kernel, weight])
    digest = hashlib.sha256()
    for tensor in (loss, *results):
        digest.update(tensor.detach().cpu().numpy().tobytes())
    return digest.hexdigest()[:16]


def compare(names: Sequence[str], classes: Sequence[NumericsClass]) -> DeviceDiffers | None:
    """The error for the first device that is not of the first one's class, if there is one."""
    for name, other in zip(names[1:], classes[1:], strict=True):
        differences = classes[0].differences(other)
        if differences:
            return DeviceDiffers(
                f"devices {names[0]} and {name} do not give the same bits ("
                + "; ".join(differences)
                + "): exact=True needs devices of one kind; leave one out, or give up equality "
                "to the last bit with exact=False"
            )
    return None


def set_numerics(device: Device, threads: int, exact: bool) -> None:
    """Pin what the arithmetic depends on, in the calling process, before its first computation."""
    torch.set_num_threads(threads)
    torch.set_num_interop_threads(1)
    if device.kind == "cuda":
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
        torch.cuda.set_device(device.torch_device)
        torch.backends.cudnn.benchmark = False
        if exact:
            torch.backends.cuda.matmul.allow_tf32 = False
            torch.backends.cudnn.allow_tf32 = False
            torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction = False
            torch.use_deterministic_algorithms(True)


def describe(machine: Machine) -> list[dict[str, str]]:
    """One row per device that is here, for `samestep devices`."""
    rows = []
    for device in [*(Device("cuda", i) for i in range(machine.gpus)), Device("cpu", 0)]:
        numerics = numerics_class(device, probed=False)
        count = f"{len(machine.cores)} cores" if device.kind == "cpu" else "1 GPU"
        rows.append(
            {
                "device": "cpu" if device.kind == "cpu" else str(device),
                "name": cpu_model() if device.kind == "cpu" else numerics.model,
                "memory": f"{memory_bytes(device) / 2**30:.1f} GiB",
                "cores": count,
                "class": hashlib.sha256(repr((numerics.kind, numerics.model)).encode()).hexdigest()[
                    :6
                ],
            }
        )
    return rows
