"""Fails on one rank in the middle of the training, in the way named by the argument."""

import os
import sys
import time

import tensorflow.compat.v1 as tf
from samples import numbered
from tools import RANK, Recorder, report

import trainer

tf.disable_eager_execution()

recorder = Recorder()
job = trainer.Trainer(
    trainer.data.from_arrays(*numbered(64)).repeat(),
    recorder.build,
    tf.train.GradientDescentOptimizer,
    {"learning_rate": 0.01},
    batch_size=2,
    log_step_size=100,
)
for _ in range(3):
    job.train_on_batch()
if RANK == 1:
    with open(os.path.join(os.environ["TRAINER_TEST_REPORTS"], "failed_at.txt"), "w") as note:
        note.write(str(time.time()))
    if sys.argv[1] == "exit":
        sys.exit(3)
    raise KeyError("the cause of it all")
job.train_to_end()
report(steps=job.global_step)
