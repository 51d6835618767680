"""TensorFlow executes eagerly, as version 2 does of itself: what is refused, and a training from outside its graph."""

import os
import sys
import time

import numpy as np
import tensorflow.compat.v1 as tf
import tensorflow.compat.v2 as tf2

tf.enable_eager_execution()


def switches():
    return [
        tf.executing_eagerly(),
        tf.resource_variables_enabled(),
        bool(tf.control_flow_v2_enabled()),
        tf.TensorShape([3])[0] == 3,
        isinstance(tf.TensorShape([3])[0], int),
        tf2.data.Dataset is tf.data.Dataset,
        sys.excepthook is sys.__excepthook__,
    ]


before = switches()

import trainer  # noqa: E402

after = switches()

from samples import numbered  # noqa: E402
from tools import Recorder, report  # noqa: E402

DIRECTORY = sys.argv[1]
STEPS, BATCH = 6, 2


def problem_of(action):
    try:
        action()
    except Exception as error:
        return [type(error).__name__, str(error), "horovod" in sys.modules]
    return None


def make(dataset, build=None, **options):
    return trainer.Trainer(
        dataset,
        build or Recorder().build,
        options.pop("optimizer", tf.train.GradientDescentOptimizer),
        {"learning_rate": options.pop("learning_rate", 0.01)},
        batch_size=BATCH,
        **options,
    )


def in_graph(action):
    with tf.Graph().as_default():
        return action()


def arrays():
    return trainer.data.from_arrays(*numbered(STEPS * BATCH))


eager = tf2.data.Dataset.from_tensor_slices(numbered(4))
refused = {
    "arrays": problem_of(arrays),
    "trainer": problem_of(lambda: make(eager)),
    "dataset": problem_of(lambda: in_graph(lambda: make(eager))),
    "keras_optimizer": problem_of(
        lambda: in_graph(lambda: make(arrays(), optimizer=tf.keras.optimizers.SGD))
    ),
}


def from_outside():
    """Drive a Trainer, made in a graph, where TensorFlow executes eagerly; its rate is an eager tensor."""
    recorder = Recorder()
    rate = tf.constant(0.01)
    with tf.Graph().as_default():
        job = make(
            arrays(),
            recorder.build,
            learning_rate=rate,
            checkpoint_dir=os.path.join(DIRECTORY, "checkpoints"),
            metrics_dir=os.path.join(DIRECTORY, "metrics"),
            save_checkpoint_steps=2,
            validation_dataset=arrays(),
            build_validation_func=recorder.build_validation,
        )
    while not job.session.should_stop():
        job.train_on_batch()
    validated = [value for _, value in job.validation_metrics]
    job.close()
    return {"steps": job.global_step, "samples": sorted(recorder.samples), "validated": validated[1]}


def unordered():
    """A dataset of the second API whose user allows any order: every sample comes, and in order."""
    with tf.Graph().as_default():
        options = tf.data.Options()
        if hasattr(options, "deterministic"):
            options.deterministic = False
            loose = {"deterministic": False}
        else:
            options.experimental_deterministic = False
            loose = {}

        def waiting(x, y):
            # Out of order, the first would be the last.
            return tf.numpy_function(slow, [x, y], [tf.float32, tf.int64])

        dataset = tf2.data.Dataset.from_tensor_slices(numbered(STEPS * BATCH))
        dataset = dataset.map(waiting, num_parallel_calls=4, **loose)
        dataset = dataset.map(lambda x, y: (tf.ensure_shape(x, [3]), tf.ensure_shape(y, [])))
        recorder = Recorder()
        make(dataset.with_options(options).prefetch(2), recorder.build).train_to_end()
        return recorder.samples


def slow(x, y):
    if y % 4 == 0:
        time.sleep(0.1)
    return x, np.int64(y)


def made_eagerly():
    model = tf.keras.Sequential([tf.keras.layers.Dense(1)])
    model(np.zeros((1, 3), np.float32))
    weight = tf2.Variable(1.0)

    def build_with_model(x, y):
        return model, tf.reduce_mean(model(x)), {}

    def build_with_variable(x, y):
        return None, tf.reduce_mean(x) * weight, {}

    def refusal(build):
        return problem_of(lambda: in_graph(lambda: make(arrays(), build)))

    return [refusal(build_with_model), refusal(build_with_variable)]


report(
    before=before,
    after=after,
    refused=refused,
    from_outside=from_outside(),
    unordered=unordered(),
    made_eagerly=made_eagerly(),
    still=switches()[:-1] == after[:-1],
)
