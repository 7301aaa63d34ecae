"""The exceptions of samestep.

    SamestepError
    ├── UsageError (also a ValueError)   an argument that cannot be right
    │   ├── DeviceError                  `devices=` names what is not here
    │   └── OptimizerError               an optimizer that cannot be used
    ├── DatasetMissing                   a dataset is not here and cannot be fetched
    ├── LossError                        what the loss function returned cannot be used
    │   └── NonFiniteLoss                NaN or inf; the weights were left untouched
    ├── BufferDiffers                    an integer buffer differs between lanes
    ├── TeamError                        the workers did not do the same things
    ├── DeviceDiffers                    a device does not give the same bits as the others
    ├── WorkerDied                       too many workers were lost, or all of them
    ├── CheckpointError                  a run's state cannot be read or written
    │   └── CheckpointDiffers            it is of another training
    ├── OutOfMemory                      no device has room for a lane
    └── RemoteError                      an exception of the user's that cannot be pickled

A message gives the argument, the constraint, the value and the remedy.
"""

from __future__ import annotations


class SamestepError(Exception):
    """The root: `except ss.SamestepError` catches all that samestep itself raises."""


class UsageError(SamestepError, ValueError):
    """An argument that cannot be right."""


def check_flags(**flags: object) -> None:
    """Each must be True or False: a string, say, would silently count as True."""
    for name, value in flags.items():
        if not isinstance(value, bool):
            raise UsageError(f"{name}={value!r}: must be True or False")


def check_counts(least: int, **numbers: object) -> None:
    """Each must be a whole number of at least `least`."""
    for name, value in numbers.items():
        if isinstance(value, bool) or not isinstance(value, int) or value < least:
            raise UsageError(f"{name}={value!r}: must be a whole number of at least {least}")


def is_positive(number: object) -> bool:
    """Whether it is a number above 0, and not a truth value."""
    return isinstance(number, (int, float)) and not isinstance(number, bool) and number > 0


class DeviceError(UsageError):
    """`devices=` names what is not here, or cannot be read."""


class OptimizerError(UsageError):
    """An optimizer that cannot be used, by name."""


class DatasetMissing(SamestepError):
    """A dataset is neither on this machine nor can it be fetched."""


class LossError(SamestepError):
    """What the loss function returned cannot be used."""


class NonFiniteLoss(LossError):
    """The loss of some lanes is NaN or inf; the step was not committed."""

    step = 0
    lanes: tuple[int, ...] = ()


class BufferDiffers(SamestepError):
    """An integer buffer of the model came out differently in different lanes."""


class TeamError(SamestepError):
    """The workers did not take the same steps, or did not build the same model."""


class DeviceDiffers(SamestepError):
    """A device does not give the same bits as the others."""


class WorkerDied(SamestepError):
    """Workers were lost, by a signal or by leaving the process, and the run could not go on."""


class CheckpointError(SamestepError):
    """A checkpoint of a run cannot be read, or none of them is intact."""


class CheckpointDiffers(CheckpointError):
    """A checkpoint is of another training: other parameters, lanes, data or code."""


class OutOfMemory(SamestepError, MemoryError):
    """No device has the memory for a lane."""


class RemoteError(SamestepError):
    """Stands for an exception raised in a worker that cannot be sent to the launcher as it is."""
