"""Data-parallel training of TensorFlow networks over MPI; importing it starts nothing."""

from trainer import data
from trainer.legacy import (
    DistributedSession,
    LoadCheckpoint,
    StopAtTimeHook,
    TaskSpec,
    TaskSpecDef,
    create_distributed_session,
    create_task_spec_def,
)
from trainer.trainer import Trainer

__all__ = [
    "DistributedSession",
    "LoadCheckpoint",
    "StopAtTimeHook",
    "TaskSpec",
    "TaskSpecDef",
    "Trainer",
    "create_distributed_session",
    "create_task_spec_def",
    "data",
]
