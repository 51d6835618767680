"""Scripts as they were written for TensorLayer 1.11.1, but for the import of the Trainer; and TensorLayer's own."""

import inspect
import sys

import numpy as np
import tensorflow as tf
import tensorlayer as tl
from samples import numbered
from tools import RANK, SIZE, Messages, report

import trainer as distributed

DIRECTORY, STEPS, BATCH, CLASSES, VALIDATION_ROWS = sys.argv[1], 3, 4, 3, 5
DECAY = 0.7
_ABORTS_WITHOUT_GPU = "config.gpu_options.visible_device_list = str(hvd.local_rank())"


# ---- the script ------------------------------------------------------------------------------------------------


def model(x, is_train, reuse):
    with tf.variable_scope("model", reuse=reuse):
        net = tl.layers.InputLayer(x, name="input")
        net = tl.layers.ReshapeLayer(net, (-1, 4, 4, 1), name="reshape")
        net = tl.layers.Conv2d(net, 2, (3, 3), act=tf.nn.relu, name="conv")
        net = tl.layers.BatchNormLayer(net, decay=DECAY, is_train=is_train, name="bn")
        net = tl.layers.FlattenLayer(net, name="flatten")
        net = tl.layers.DropoutLayer(net, keep=0.8, is_fix=True, is_train=is_train, name="drop")
        net = tl.layers.DenseLayer(net, n_units=8, act=tf.nn.relu, name="relu")
        return tl.layers.DenseLayer(net, n_units=CLASSES, name="output")


def cost_and_accuracy(net, y, name):
    cost = tl.cost.cross_entropy(net.outputs, y, name=name)
    right = tf.equal(tf.argmax(net.outputs, 1), y)
    return cost, tf.reduce_mean(tf.cast(right, tf.float32), name=name + "_accuracy")


def dataset(rows):
    features, numbers = numbered(rows, 16)
    return tf.data.Dataset.from_tensor_slices((features, numbers % CLASSES))


def make(
    reuse_training,
    reuse_validation,
    log,
    collect,
    class_=distributed.Trainer,
    max_iteration=STEPS * SIZE,
    **options,
):
    def build_train(x, y):
        net = model(x, is_train=True, reuse=reuse_training)
        cost, accuracy = cost_and_accuracy(net, y, "train")
        return net, cost, log(cost, accuracy)

    def build_validation(x, y):
        net = model(x, is_train=False, reuse=reuse_validation)
        return net, collect(cost_and_accuracy(net, y, "validate"))

    return class_(
        training_dataset=dataset(STEPS * BATCH * SIZE).repeat(2),
        build_training_func=build_train,
        optimizer=tf.train.AdamOptimizer,
        optimizer_args={"learning_rate": 0.01},
        batch_size=BATCH,
        validation_dataset=dataset(VALIDATION_ROWS),
        build_validation_func=build_validation,
        log_step_size=1,
        max_iteration=max_iteration,
        **options,
    )


def drive_by_loop(trainer):
    # Endless on purpose: the error is the way out.
    while True:
        try:
            trainer.train_on_batch()
        except tf.errors.OutOfRangeError:
            break


def drive_by_should_stop(trainer):
    while not trainer.session.should_stop():
        trainer.train_on_batch()
        if trainer.global_step % 2 == 0:
            for metric, average in trainer.validation_metrics:
                tl.logging.info(f"{metric.name}: {average:f}")


# ---- what the test asks ----------------------------------------------------------------------------------------


def value_of(trainer, tensors):
    return trainer.session.run_step_fn(lambda step_context: step_context.session.run(tensors))


def plain(values):
    return {name: np.asarray(value).tolist() for name, value in values.items()}


def variables():
    return {v.op.name: v for v in tf.global_variables() if v.op.name.startswith("model/")}


def driven(drive, reuse_training, reuse_validation, log, collect):
    with tf.Graph().as_default():
        messages = Messages()
        trainer = make(reuse_training, reuse_validation, log, collect)
        weights = {v.op.name: v for v in tf.trainable_variables()}
        before = value_of(trainer, weights)
        drive(trainer)
        after = value_of(trainer, weights)
        net = trainer.training_network
        return {
            "steps": trainer.global_step,
            "is_layer": isinstance(net, tl.layers.Layer),
            "params": [each.op.name for each in net.all_params],
            "moved": sorted(name for name in weights if not np.array_equal(before[name], after[name])),
            "weights": plain(after),
            "validated": [[metric.name, average] for metric, average in trainer.validation_metrics],
            "messages": list(messages.lines),
        }


def normalised():
    """A layer that normalises what the data holds, while no weight moves."""
    with tf.Graph().as_default():

        def network(x, is_train):
            with tf.variable_scope("model", reuse=tf.AUTO_REUSE):
                net = tl.layers.InputLayer(x, name="input")
                return tl.layers.BatchNormLayer(
                    net, decay=DECAY, is_train=is_train, gamma_init=tf.ones_initializer(), name="bn"
                )

        def build_train(x, y):
            net = network(x, True)
            cost = tf.reduce_mean(net.outputs)
            return net, cost, [cost]

        def build_validation(x, y):
            net = network(x, False)
            return net, [tf.reduce_mean(net.outputs[:, column]) for column in range(16)]

        trainer = distributed.Trainer(
            dataset(STEPS * BATCH * SIZE),
            build_train,
            tf.train.GradientDescentOptimizer,
            {"learning_rate": 0.0},
            batch_size=BATCH,
            checkpoint_dir=DIRECTORY + "/normalised",
            validation_dataset=dataset(VALIDATION_ROWS),
            build_validation_func=build_validation,
        )
        trainer.train_to_end()
        statistics = {name: v for name, v in variables().items() if "moving" in name}
        before = value_of(trainer, statistics)
        averages = [average for _, average in trainer.validation_metrics]
        after = value_of(trainer, statistics)
        trainer.close()
        reader = tf.train.load_checkpoint(DIRECTORY + "/normalised") if RANK == 0 else None
        return {
            "statistics": plain(before),
            "after_validation": plain(after),
            "saved": plain({name: reader.get_tensor(name) for name in statistics}) if reader else None,
            "averages": averages,
        }


def their_trainer():
    """TensorLayer's own Trainer, without the line that aborts on hosts without a GPU."""
    source = inspect.getsource(tl.distributed)
    assert _ABORTS_WITHOUT_GPU in source
    exec(
        compile(source.replace(_ABORTS_WITHOUT_GPU, "pass"), tl.distributed.__file__, "exec"),
        vars(tl.distributed),
    )
    return tl.distributed.Trainer


def log_dict(cost, accuracy):
    return {"cost": cost, "accuracy": accuracy}


def restored():
    """Trains with theirs, then goes on with ours."""
    directory = DIRECTORY + "/theirs"
    with tf.Graph().as_default():
        theirs = make(
            tf.AUTO_REUSE, tf.AUTO_REUSE, log_dict, list, class_=their_trainer(), checkpoint_dir=directory
        )
        while not theirs.session.should_stop():
            theirs.train_on_batch()
        theirs.session.close()
    saved = {}
    if RANK == 0:
        reader = tf.train.load_checkpoint(directory)
        saved = {name: reader.get_tensor(name) for name in reader.get_variable_to_shape_map()}
    with tf.Graph().as_default():
        messages = Messages()
        ours = make(
            tf.AUTO_REUSE,
            tf.AUTO_REUSE,
            log_dict,
            list,
            checkpoint_dir=directory,
            max_iteration=(STEPS + 2) * SIZE,
        )
        kept = {v.op.name: v for v in tf.global_variables() if not v.op.name.startswith("trainer/")}
        started_at, values = ours.global_step, value_of(ours, kept)
        ours.train_to_end()
        ours.close()
        return {
            "saved": plain(saved),
            "started_at": started_at,
            "values": plain(values),
            "ended_at": ours.global_step,
            "messages": list(messages.lines),
        }


report(
    loop=driven(drive_by_loop, False, True, log_dict, list),
    to_end=driven(
        lambda trainer: trainer.train_to_end(), True, False, lambda cost, accuracy: [cost, accuracy], tuple
    ),
    should_stop=driven(
        drive_by_should_stop, tf.AUTO_REUSE, tf.AUTO_REUSE, lambda cost, accuracy: [cost.name], list
    ),
    validating=driven(
        lambda trainer: trainer.train_and_validate_to_end(validate_step_size=2),
        tf.AUTO_REUSE,
        tf.AUTO_REUSE,
        log_dict,
        lambda metrics: dict(enumerate(metrics)).values(),
    ),
    normalised=normalised(),
    restored=restored(),
)
