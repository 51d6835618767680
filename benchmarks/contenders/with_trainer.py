"""Contender: this project's Trainer, driven by the user's own loop."""

import os

import common
import tensorflow.compat.v1 as tf

import trainer

options = common.arguments()
clock = common.Clock(options)
images, labels = common.arrays(options)
dataset = trainer.data.from_arrays(images, labels).shuffle(10000, seed=common.SEED).repeat()
dataset = common.mapped(options.model, dataset)
held_out = {}
if options.drive == "helper":
    # Both packages' own loop with both packages' defaults: a line for every step, validation every 50.
    rows = trainer.data.from_arrays(images[: common.HELD_OUT], labels[: common.HELD_OUT])
    held_out["validation_dataset"] = common.mapped(options.model, rows)
    held_out["build_validation_func"] = common.build_validation(options.model)
job = trainer.Trainer(
    dataset,
    common.build(options.model),
    tf.train.AdamOptimizer,
    {"learning_rate": 0.001},
    batch_size=options.batch_size,
    log_step_size=common.LOG_STEPS if options.drive == "loop" else 1,
    max_iteration=options.steps * int(os.environ.get("OMPI_COMM_WORLD_SIZE", 1)),
    **held_out,
    seed=common.SEED,
)
if options.drive == "helper":
    clock.watch(job)
    job.train_and_validate_to_end(validate_step_size=common.VALIDATE_STEPS)
while not job.session.should_stop():
    job.train_on_batch()
    clock.step_done()
    if options.trace and job.global_step == options.steps // 2:
        job.session.run_step_fn(
            lambda step_context: common.trace(step_context.session, "trainer/train", options)
        )
clock.report()
