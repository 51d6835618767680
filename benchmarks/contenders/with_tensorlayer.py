"""Contender: the Trainer of TensorLayer 1.11.1, unchanged but for the line that aborts on hosts without a GPU."""

import inspect

import common
import tensorflow as tf
import tensorlayer as tl

_ABORTS_WITHOUT_GPU = "config.gpu_options.visible_device_list = str(hvd.local_rank())"


def trainer_class():
    """Return TensorLayer's Trainer without that line."""
    source = inspect.getsource(tl.distributed)
    if _ABORTS_WITHOUT_GPU not in source:
        raise SystemExit("with_tensorlayer.py: tl.distributed does not look like that of TensorLayer 1.11.1")
    exec(
        compile(source.replace(_ABORTS_WITHOUT_GPU, "pass"), tl.distributed.__file__, "exec"),
        vars(tl.distributed),
    )
    return tl.distributed.Trainer


options = common.arguments()
clock = common.Clock(options)
tl.logging.set_verbosity(tl.logging.INFO)
tf.logging.set_verbosity(tf.logging.INFO)
images, labels = common.arrays(options)
tf.set_random_seed(common.SEED)
dataset = tf.data.Dataset.from_tensor_slices((images, labels)).shuffle(10000, seed=common.SEED).repeat()
dataset = common.mapped(options.model, dataset)
held_out = {}
if options.drive == "helper":
    # Both packages' own loop with both packages' defaults: a line for every step, validation every 50.
    rows = tf.data.Dataset.from_tensor_slices((images[: common.HELD_OUT], labels[: common.HELD_OUT]))
    held_out["validation_dataset"] = common.mapped(options.model, rows)
    held_out["build_validation_func"] = common.build_validation(options.model)
job = trainer_class()(
    dataset,
    common.build(options.model),
    tf.train.AdamOptimizer,
    {"learning_rate": 0.001},
    batch_size=options.batch_size,
    log_step_size=common.LOG_STEPS if options.drive == "loop" else 1,
    max_iteration=options.steps * common.SIZE,
    **held_out,
)
if options.drive == "helper":
    clock.watch(job)
    job.train_and_validate_to_end(validate_step_size=common.VALIDATE_STEPS)
while not job.session.should_stop():
    job.train_on_batch()
    clock.step_done()
clock.report()
