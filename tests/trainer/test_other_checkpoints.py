"""Which checkpoints of other programs training goes on from, and which are refused."""

import pytest

from trainer.compat import tf
from trainer.others import saver_for
from trainer.ranks import SharedError


def _network(optimizer, names, shape=(3,)):
    """Weights and their optimizer, as a training has them."""
    weights = [tf.get_variable(name, shape, initializer=tf.ones_initializer()) for name in names]
    loss = tf.add_n([tf.reduce_sum(tf.square(weight)) for weight in weights])
    return optimizer.minimize(loss, global_step=tf.train.get_or_create_global_step())


def _written(directory, optimizer, names, shape=(3,)):
    with tf.Graph().as_default(), tf.Session() as session:
        train = _network(optimizer, names, shape)
        session.run(tf.global_variables_initializer())
        for _ in range(2):
            session.run(train)
        tf.train.Saver().save(session, str(directory / "model.ckpt"), global_step=2)


def _state():
    return tf.Variable([0, 0, 9], trainable=False, use_resource=True, dtype=tf.int64, name="trainer/state")


def _refusal(directory, optimizer, names, shape=(3,)):
    with tf.Graph().as_default():
        state = _state()
        _network(optimizer, names, shape)
        with pytest.raises(SharedError) as caught:
            saver_for(str(directory), state, 2)
        return str(caught.value)


def test_no_checkpoint_needs_no_saver(tmp_path):
    with tf.Graph().as_default():
        assert saver_for(str(tmp_path), _state(), 2) is None


def test_one_of_another_optimizer_is_refused(tmp_path):
    _written(tmp_path, tf.train.MomentumOptimizer(0.1, 0.9), ["a", "b"])
    text = _refusal(tmp_path, tf.train.AdamOptimizer(0.1), ["a", "b"])
    assert "model.ckpt-2: it lacks " in text
    assert "it lacks a/Adam" in text


def test_one_that_lacks_weights_is_refused_with_their_names(tmp_path):
    _written(tmp_path, tf.train.MomentumOptimizer(0.1, 0.9), ["a"])
    assert "it lacks b;" in _refusal(tmp_path, tf.train.MomentumOptimizer(0.1, 0.9), ["a", "b"])


def test_one_of_other_shapes_is_refused(tmp_path):
    _written(tmp_path, tf.train.GradientDescentOptimizer(0.1), ["a"], (4,))
    text = _refusal(tmp_path, tf.train.GradientDescentOptimizer(0.1), ["a"])
    assert "it has a in shape [4] instead of [3]" in text


def test_optimizer_starts_anew_for_weights_that_were_not_trained(tmp_path):
    with tf.Graph().as_default(), tf.Session() as session:
        tf.get_variable("b", [3], initializer=tf.zeros_initializer(), trainable=False)
        train = _network(tf.train.MomentumOptimizer(0.1, 0.9), ["a"])
        session.run(tf.global_variables_initializer())
        session.run(train)
        tf.train.Saver().save(session, str(tmp_path / "model.ckpt"), global_step=1)
    with tf.Graph().as_default(), tf.Session() as session:
        state = _state()
        _network(tf.train.MomentumOptimizer(0.1, 0.9), ["a", "b"])
        saver = saver_for(str(tmp_path), state, 2)
        saver.restore(session, tf.train.latest_checkpoint(str(tmp_path)))
        values = {variable.op.name: session.run(variable).tolist() for variable in tf.global_variables()}
    assert values["b"] == [0.0] * 3
    assert values["a"] == pytest.approx([0.8] * 3)
    assert values["a/Momentum"] == [2.0] * 3
    assert values["b/Momentum"] == [0.0] * 3
    # One step, which counts as a mini-batch on each of two ranks; the order of the data is this job's own.
    assert values["global_step"] == 1
    assert values["trainer/state"] == [0, 2, 9]
