"""One process of a cluster with parameter servers, which tells in a file of its name what it saw.

A worker trains until every training task has made its steps, the evaluator reads the last checkpoint, and the master
trains a second time after the parameter server was replaced. Usage: parameter_server.py NAME FOLDER
"""

import json
import os
import sys
import time
import warnings

import numpy as np
import tensorflow.compat.v1 as tf

import trainer
from trainer import legacy

NAME, FOLDER = sys.argv[1:]
CHECKPOINTS = os.path.join(FOLDER, "checkpoints")
STEPS_OF_EACH = 15
LIMIT_S = 150


def wait_for(name):
    """Wait until the test, or another process, leaves a file."""
    end_s = time.monotonic() + LIMIT_S
    while not os.path.exists(os.path.join(FOLDER, name)):
        assert time.monotonic() < end_s, name
        time.sleep(0.05)


def tell(name, **values):
    path = os.path.join(FOLDER, name)
    with open(path + ".part", "w") as target:
        json.dump(values, target)
    os.rename(path + ".part", path)


def build(spec):
    """Return (train, steps of each task): each step adds 1 to `w`, on the parameter server, and notes who made it."""
    with tf.device(spec.device_fn()):
        tf.train.get_or_create_global_step()
        w = tf.get_variable("w", [], initializer=tf.zeros_initializer(), use_resource=True)
        made = tf.get_variable(
            "made", [spec.num_workers], tf.int64, tf.zeros_initializer(), use_resource=True, trainable=False
        )
        loss = tf.negative(w, name="loss")
        optimizer = tf.train.GradientDescentOptimizer(1.0, use_locking=True)
        step = optimizer.minimize(loss, tf.train.get_global_step())
        row = np.arange(spec.num_workers) == spec.shard_index
        with tf.control_dependencies([step]):
            train = tf.group(tf.assign_add(made, row.astype(np.int64)))
    return train, made, w, loss


def session_of(spec, **options):
    return trainer.DistributedSession(
        spec, CHECKPOINTS, hooks=[trainer.StopAtTimeHook(LIMIT_S)], save_summaries_steps=None, **options
    )


def train_first(spec):
    with tf.Graph().as_default():
        train, made, w, loss = build(spec)
        with session_of(spec, save_checkpoint_secs=600) as session:
            own = 0
            while not session.should_stop():
                session.run(train)
                own += 1
                time.sleep(0.02)  # the others may still be starting, on few cores
                if session.run(made).min() >= STEPS_OF_EACH:
                    break
            seen_w = float(session.run(w))
        return {"own": own, "w": seen_w, "w_device": w.device, "loss_device": loss.device}


def train_again(spec):
    # What is missing is the parameter server, which the test starts when it has read that it is waited for.
    legacy.PATIENCE_S = 1
    with tf.Graph().as_default():
        train, _, w, _ = build(spec)
        with session_of(spec) as session:
            restored = [float(session.run(w)), int(session.run(tf.train.get_global_step()))]
            for _ in range(5):
                session.run(train)
            after = [float(session.run(w)), int(session.run(tf.train.get_global_step()))]
    return {"restored": restored, "after": after}


def evaluate(spec):
    wait_for("master.first")
    before = sorted(os.listdir(CHECKPOINTS))
    with tf.Graph().as_default():
        _, _, w, _ = build(spec)
        with session_of(spec, save_checkpoint_secs=1) as session:
            value = [float(session.run(w)), int(session.run(tf.train.get_global_step()))]
            time.sleep(1.5)
            session.run(w)
    return {"value": value, "same_files": before == sorted(os.listdir(CHECKPOINTS))}


def main():
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        whole = trainer.TaskSpec()
        trainer.TaskSpec()
    spec = whole.use_last_worker_as_evaluator()
    facts = {
        "warnings": [[str(w.message), w.category.__name__, os.path.basename(w.filename)] for w in caught],
        "is": [spec.is_ps(), spec.is_worker(), spec.is_master(), spec.is_evaluator()],
        "numbers": [spec.num_workers, spec.num_ps, spec.shard_index],
        "whole": [whole.num_workers, whole.is_evaluator()],
        "trial": spec.trial,
        "eager": tf.executing_eagerly(),
    }
    if spec.is_ps():
        if NAME == "ps2":
            wait_for("go")
        tell(NAME, **facts)
        spec.create_server()
        raise AssertionError("a parameter server came back from create_server()")
    if spec.is_evaluator():
        facts.update(target=spec.target(), **evaluate(spec))
    else:
        facts.update(first=train_first(spec))
        if spec.is_master():
            tell("master.first")
            wait_for("again")
            facts.update(again=train_again(spec))
    facts["horovod"] = "horovod" in sys.modules
    tell(NAME, **facts)


main()
