"""samestep: the same training on any set of devices."""

__version__ = "0.1.0"

from samestep import data, metrics, models, scratch
from samestep.errors import (
    BufferDiffers,
    CheckpointDiffers,
    CheckpointError,
    DatasetMissing,
    DeviceDiffers,
    DeviceError,
    LossError,
    NonFiniteLoss,
    OptimizerError,
    OutOfMemory,
    RemoteError,
    SamestepError,
    TeamError,
    UsageError,
    WorkerDied,
)
from samestep.launch import launch
from samestep.settings import Position
from samestep.team import Team
from samestep.trainer import Trainer

__all__ = [
    "BufferDiffers",
    "CheckpointDiffers",
    "CheckpointError",
    "DatasetMissing",
    "DeviceDiffers",
    "DeviceError",
    "LossError",
    "NonFiniteLoss",
    "OptimizerError",
    "OutOfMemory",
    "Position",
    "RemoteError",
    "SamestepError",
    "Team",
    "TeamError",
    "Trainer",
    "UsageError",
    "WorkerDied",
    "data",
    "launch",
    "metrics",
    "models",
    "scratch",
]

for _error in list(globals().values()):
    # Tracebacks then say samestep.WorkerDied, which is how users know it.
    if isinstance(_error, type) and issubclass(_error, SamestepError):
        _error.__module__ = __name__
