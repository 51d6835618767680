"""Two samples, or a limit below one step; reports only if a Trainer accepts that."""

import math
import sys

import tensorflow.compat.v1 as tf
from samples import numbered
from tools import Recorder, report

import trainer

tf.disable_eager_execution()

dataset = trainer.data.from_arrays(*numbered(2))
if sys.argv[1] == "filtered":
    dataset = dataset.filter(lambda x, y: y >= 0)
job = trainer.Trainer(
    dataset,
    Recorder().build,
    tf.train.GradientDescentOptimizer,
    {"learning_rate": 0.1},
    max_iteration=0.5 if sys.argv[1] == "limit" else math.inf,
)
job.train_to_end()
report(steps=job.global_step)
