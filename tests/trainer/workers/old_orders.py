"""Networks that share variables with explicit reuse, batch normalisation, and a checkpoint of another program."""

import sys
import tempfile

import tensorflow.compat.v1 as tf
from samples import numbered
from tools import RANK, SIZE, Messages, report

import trainer

DIRECTORY, STEPS, BATCH = sys.argv[1], 3, 3
ROWS = STEPS * BATCH * SIZE


def value_of(job, tensors):
    return job.session.run_step_fn(lambda step_context: step_context.session.run(tensors))


def network(x, reuse, training):
    with tf.variable_scope("mlp", reuse=reuse):
        w = tf.get_variable("w", [3, 4], initializer=tf.ones_initializer(), trainable=training)
        normal = tf.layers.batch_normalization(
            tf.matmul(x, w), momentum=0.9, training=training, name="normal"
        )
        return tf.layers.dense(normal, 1, kernel_initializer=tf.ones_initializer(), name="out")


class Keras:
    """The same network of Keras layers, which share their variables by being the same objects."""

    def __init__(self):
        self.normal = tf.keras.layers.BatchNormalization(momentum=0.8, name="normal")
        self.first, self.out = (
            tf.keras.layers.Dense(units, use_bias=False, kernel_initializer="ones") for units in (4, 1)
        )

    def __call__(self, x, reuse, training):
        return self.out(self.normal(self.first(x), training=training))


def make(reuse_training, reuse_validation, apply=network, runs_updates=False, **options):
    def build(x, y):
        out = apply(x, reuse_training, True)
        # Many scripts have the updates run themselves.
        with tf.control_dependencies(tf.get_collection(tf.GraphKeys.UPDATE_OPS) if runs_updates else []):
            loss = tf.reduce_mean(tf.square(out[:, 0] - tf.cast(y, tf.float32) / 10))
        return out, loss, [loss]

    def build_validation(x, y):
        return None, [tf.reduce_mean(apply(x, reuse_validation, False))]

    return trainer.Trainer(
        trainer.data.from_arrays(*numbered(ROWS)),
        build,
        tf.train.MomentumOptimizer,
        # What the layers see stays the same, so that their statistics can be told exactly.
        {"learning_rate": 0.0, "momentum": 0.9},
        BATCH,
        validation_dataset=trainer.data.from_arrays(*numbered(5)),
        build_validation_func=build_validation,
        **options,
    )


def order(reuse_training, reuse_validation, apply=None, **options):
    directory = tempfile.mkdtemp(dir=DIRECTORY)
    with tf.Graph().as_default():
        apply = network if apply is None else apply()
        job = make(reuse_training, reuse_validation, apply, checkpoint_dir=directory, **options)
        statistics = {
            name: next(v for v in tf.global_variables() if v.op.name.endswith("moving_" + name))
            for name in ("mean", "variance")
        }
        job.train_to_end()
        before = value_of(job, statistics)
        averages = [value for _, value in job.validation_metrics]
        after = value_of(job, statistics)
        job.close()
        saved = {}
        if RANK == 0:
            reader = tf.train.load_checkpoint(directory)
            saved = {name: reader.get_tensor(v.op.name).tolist() for name, v in statistics.items()}
        return {
            "trained": sorted(v.op.name for v in tf.trainable_variables()),
            "statistics": {name: value.tolist() for name, value in before.items()},
            "after_validation": {name: value.tolist() for name, value in after.items()},
            "saved": saved,
            "averages": averages,
            "steps": job.global_step,
        }


def refused():
    with tf.Graph().as_default():
        try:
            make(True, True)
        except ValueError as error:
            return str(error)
    return None


def other_program(directory):
    """A checkpoint as TensorLayer's Trainer leaves it: step 5, no trainer/state."""
    with tf.Graph().as_default():
        out = network(tf.zeros([2, 3]), False, True)
        step = tf.train.get_or_create_global_step()
        tf.train.MomentumOptimizer(0.1, 0.9).minimize(tf.reduce_mean(tf.square(out)), global_step=step)
        bias = next(v for v in tf.global_variables() if v.op.name == "mlp/out/bias")
        with tf.Session() as session:
            session.run(tf.global_variables_initializer())
            session.run([tf.assign(step, 5), tf.assign(bias, [7.0])])
            tf.train.Saver().save(session, directory + "/model.ckpt", global_step=step)


def restored():
    directory = DIRECTORY + "/whole"
    if RANK == 0:
        tf.io.gfile.makedirs(directory)
        other_program(directory)
    with tf.Graph().as_default():
        messages = Messages()
        job = make(tf.AUTO_REUSE, tf.AUTO_REUSE, checkpoint_dir=directory, max_iteration=6 * SIZE)
        bias = next(v for v in tf.global_variables() if v.op.name == "mlp/out/bias")
        result = {"started_at": job.global_step, "bias": value_of(job, bias).tolist()}
        job.train_to_end()
        job.close()
        return dict(result, ended_at=job.global_step, messages=messages.lines)


report(
    training_first=order(False, True),
    validation_first=order(True, False),
    auto=order(tf.AUTO_REUSE, tf.AUTO_REUSE, runs_updates=True),
    keras=order(None, None, Keras),
    refused=refused(),
    restored=restored(),
)
