"""Data-parallel training of TensorFlow networks over MPI; importing it starts nothing."""

from trainer import data
from trainer.trainer import Trainer

__all__ = ["Trainer", "data"]
