"""Wrong arguments are refused before MPI starts, with what was given and what is expected."""

import subprocess
import sys

import numpy as np
import pytest
import tensorflow.compat.v2 as tf2

import trainer
from tests.trainer.launch import ROOT
from trainer.compat import tf
from trainer.ranks import HostError, Ranks, session_config
from trainer.spec import INFINITE, TrainSpec, plan_steps


def _pairs(count=8):
    return trainer.data.from_arrays(np.zeros((count, 3), np.float32), np.zeros(count, np.int64))


def _build(x, y):
    loss = tf.reduce_mean(x) * tf.get_variable("w", [])
    return None, loss, {"loss": loss}


RATE = {"learning_rate": 0.1}

# id, arguments that differ from good ones (a function makes those that need a graph), error, part of its text
BAD = [
    ("no learning rate", {"optimizer_args": {"momentum": 0.9}}, ValueError, "'learning_rate'"),
    ("learning rate word", {"optimizer_args": {"learning_rate": "0.1"}}, TypeError, "'0.1'"),
    ("learning rate nan", {"optimizer_args": {"learning_rate": float("nan")}}, ValueError, "nan"),
    ("args no dict", {"optimizer_args": 0.1}, TypeError, "0.1"),
    ("args unknown", {"optimizer_args": {"learning_rate": 1, "speed": 2}}, TypeError, "speed"),
    ("optimizer object", {"optimizer": lambda: tf.train.AdamOptimizer()}, TypeError, "class"),
    ("optimizer other class", {"optimizer": dict}, TypeError, "tf.train.Optimizer"),
    ("batch 0", {"batch_size": 0}, ValueError, "batch_size: got 0"),
    ("batch negative", {"batch_size": -3}, ValueError, "batch_size: got -3"),
    ("batch float", {"batch_size": 2.5}, TypeError, "batch_size: got 2.5"),
    ("prefetch negative", {"prefetch_size": -1}, ValueError, "prefetch_size: got -1"),
    ("log step 0", {"log_step_size": 0}, ValueError, "log_step_size: got 0"),
    ("max iteration 0", {"max_iteration": 0}, ValueError, "max_iteration: got 0"),
    ("max iteration nan", {"max_iteration": float("nan")}, ValueError, "max_iteration: got nan"),
    ("no dataset", {"training_dataset": lambda: np.zeros(3)}, TypeError, "tf.data.Dataset"),
    ("batched", {"training_dataset": lambda: _pairs().batch(4)}, ValueError, "already batched"),
    (
        "batched, then more",
        {
            "training_dataset": lambda: (
                _pairs().batch(4).map(lambda x, y: (x, y)).shuffle(2).repeat().prefetch(1)
            )
        },
        ValueError,
        "already batched",
    ),
    ("no pairs", {"training_dataset": lambda: trainer.data.from_arrays(np.zeros(4))}, TypeError, "pairs"),
    (
        "placeholder",
        {
            "training_dataset": lambda: tf.data.Dataset.from_tensor_slices(
                (tf.placeholder(tf.float32, [4, 1]),) * 2
            )
        },
        ValueError,
        "from_arrays",
    ),
    (
        "validation batched",
        {"validation_dataset": lambda: _pairs().batch(4)},
        ValueError,
        "validation_dataset",
    ),
    ("no validation func", {"validation_dataset": _pairs, "build_validation_func": None}, ValueError, "None"),
    ("no build func", {"build_training_func": 3}, TypeError, "build_training_func: got 3"),
    ("two warm-ups", {"warmup_steps": 3, "warmup_epochs": 1}, ValueError, "cannot both be set"),
    (
        "epoch of unknown length",
        {"training_dataset": lambda: _pairs().filter(lambda x, y: y > 0), "warmup_epochs": 1},
        ValueError,
        "warmup_steps",
    ),
    ("compression", {"gradient_compression": "fp8"}, ValueError, "'fp8'"),
    ("hook", {"hooks": ["x"]}, TypeError, "SessionRunHook"),
    ("seed", {"seed": -1}, ValueError, "seed: got -1"),
    ("seed beyond 64 bits", {"seed": 2**63}, ValueError, "seed: got 9223372036854775808"),
    ("endless validation", {"validation_dataset": lambda: _pairs().repeat()}, ValueError, "never ends"),
    (
        "validation placeholder",
        {
            "validation_dataset": lambda: tf.data.Dataset.from_tensor_slices(
                (tf.placeholder(tf.float32, [4, 1]),) * 2
            )
        },
        ValueError,
        "from_arrays",
    ),
    ("checkpoint dir", {"checkpoint_dir": 3}, TypeError, "checkpoint_dir: got 3"),
]

# id, result of build_training_func, error, part of its text
BAD_RESULTS = [
    ("none", lambda loss: None, TypeError, "NoneType"),
    ("two", lambda loss: (None, loss), TypeError, "tuple of 2"),
    ("loss number", lambda loss: (None, 1.0, {}), TypeError, "1.0"),
    ("loss vector", lambda loss: (None, tf.stack([loss, loss]), {}), ValueError, "(2,)"),
    ("log number", lambda loss: (None, loss, {"loss": 3}), TypeError, "log_tensors"),
    ("log none", lambda loss: (None, loss, None), TypeError, "log_tensors"),
]


def _make(**changes):
    arguments = {
        "training_dataset": _pairs,
        "build_training_func": _build,
        "optimizer": tf.train.MomentumOptimizer,
        "optimizer_args": {"learning_rate": 0.1, "momentum": 0.9},
        "build_validation_func": lambda x, y: (None, [tf.reduce_mean(x)]),
    }
    arguments.update(changes)
    for name in ("training_dataset", "validation_dataset"):
        if callable(arguments.get(name)):
            arguments[name] = arguments[name]()
    return trainer.Trainer(**arguments)


@pytest.fixture(autouse=True)
def _graph():
    with tf.Graph().as_default():
        yield


@pytest.mark.parametrize(("changes", "error", "text"), [row[1:] for row in BAD], ids=[row[0] for row in BAD])
def test_refused_before_mpi_starts(changes, error, text):
    changes = {k: v() if k == "optimizer" and v is not dict else v for k, v in changes.items()}
    with pytest.raises(error) as caught:
        _make(**changes)
    assert text in str(caught.value)
    assert "horovod" not in sys.modules


@pytest.mark.parametrize(
    ("result", "error", "text"), [row[1:] for row in BAD_RESULTS], ids=[row[0] for row in BAD_RESULTS]
)
def test_wrong_build_result_is_refused(result, error, text):
    with pytest.raises(error) as caught:
        trainer.results.training_result(result(tf.constant(1.0)))
    assert "build_training_func" in str(caught.value)
    assert text in str(caught.value)


@pytest.mark.parametrize("metrics", [None, [], [1.0], {"a": 1}])
def test_wrong_validation_result_is_refused(metrics):
    with pytest.raises(TypeError, match="build_validation_func"):
        trainer.results.validation_result((None, metrics))


def test_importing_starts_nothing():
    check = "import sys, trainer; sys.exit('horovod' in sys.modules or 'mpi4py' in sys.modules)"
    assert subprocess.call([sys.executable, "-c", check], cwd=str(ROOT)) == 0


# id, dataset, its size as the Trainer sees it
COUNTS = [
    ("arrays", lambda: _pairs(8), 8),
    ("map shuffle prefetch", lambda: _pairs(8).map(lambda x, y: (x, y)).shuffle(3).prefetch(2), 8),
    ("repeat", lambda: _pairs(8).repeat(3), 24),
    ("repeat without end", lambda: _pairs(8).repeat(), -1),
    ("shuffle_and_repeat", lambda: _pairs(8).apply(tf.data.experimental.shuffle_and_repeat(4, 2)), 16),
    ("take skip", lambda: _pairs(8).take(5).skip(2), 3),
    ("take more", lambda: _pairs(8).take(50), 8),
    ("take of endless", lambda: _pairs(8).repeat().take(30), 30),
    ("zip", lambda: tf.data.Dataset.zip((_pairs(8), tf.data.Dataset.range(1, 12, 2))), 6),
    ("concatenate", lambda: _pairs(8).concatenate(_pairs(3)), 11),
    ("filter", lambda: _pairs(8).filter(lambda x, y: y > 0), -2),
    ("flat_map", lambda: _pairs(8).flat_map(lambda x, y: tf.data.Dataset.range(2)), -2),
    ("filter then take", lambda: _pairs(8).filter(lambda x, y: y > 0).take(2), -2),
    ("second API", lambda: tf2.data.Dataset.range(9).shuffle(4).repeat(2).map(lambda x: x).prefetch(1), 18),
    ("second API, options", lambda: tf2.data.Dataset.range(9).with_options(tf.data.Options()).take(4), 4),
    ("enumerate", lambda: tf2.data.Dataset.from_tensors(1).repeat(5).enumerate(), 5),
    ("scan", lambda: _pairs(8).apply(tf.data.experimental.scan(0, lambda s, e: (s, e))), 8),
    ("generator", lambda: tf.data.Dataset.from_generator(lambda: iter([1]), tf.int64).repeat(2), -2),
]


@pytest.mark.parametrize(("make", "expected"), [row[1:] for row in COUNTS], ids=[row[0] for row in COUNTS])
def test_count_is_that_of_tensorflow(make, expected):
    dataset = make()
    assert trainer.data.count_samples(dataset) == expected
    if expected >= 0:
        batches = tf.data.make_initializable_iterator(dataset.batch(1000))
        rows = tf.shape(tf.nest.flatten(batches.get_next())[0])[0]
        with tf.Session() as session:
            session.run(batches.initializer, feed_dict=trainer.data.feeds_of(dataset))
            assert session.run(rows) == expected


# id, dataset, the samples before it repeats
EPOCHS = [
    ("repeat", lambda: _pairs(8).shuffle(4).repeat(3).prefetch(1), 8),
    ("no repeat", lambda: _pairs(8).take(5), 5),
    ("enumerate", lambda: tf2.data.Dataset.from_tensors(1).repeat(5).enumerate().map(lambda i, x: x), 1),
    (
        "zip alike",
        lambda: tf.data.Dataset.zip((_pairs(8).repeat(), (_pairs(8).repeat(2), _pairs(8).repeat()))),
        8,
    ),
    ("zip unlike", lambda: tf.data.Dataset.zip((_pairs(8).repeat(3), _pairs(6).repeat(4))), -2),
    ("zip, one repeats", lambda: tf.data.Dataset.zip((_pairs(8).repeat(3), _pairs(24))), -2),
    ("zip, then repeat", lambda: tf.data.Dataset.zip((_pairs(8), _pairs(6).repeat())).repeat(2), 8),
    ("zip of ranges", lambda: tf.data.Dataset.zip((tf.data.Dataset.range(8), tf.data.Dataset.range(9))), 8),
    ("take of repeat", lambda: _pairs(8).repeat().take(30), 8),
    ("skip before repeat", lambda: _pairs(8).skip(2).repeat(3), 6),
    ("concatenate", lambda: _pairs(8).concatenate(_pairs(3)).repeat(2), 11),
    ("concatenate repeats", lambda: _pairs(8).repeat(2).concatenate(_pairs(3)), -2),
]


@pytest.mark.parametrize(("make", "expected"), [row[1:] for row in EPOCHS], ids=[row[0] for row in EPOCHS])
def test_an_epoch_ends_where_the_samples_repeat(make, expected):
    assert trainer.data.samples_per_epoch(make()) == expected


def test_from_arrays_refuses_unequal_lengths():
    with pytest.raises(ValueError, match="equal first dimensions"):
        trainer.data.from_arrays(np.zeros(3), np.zeros(4))


def test_arrays_stay_out_of_the_graph():
    trainer.data.from_arrays(np.zeros((1000, 1000), np.float32), np.zeros(1000))
    assert tf.get_default_graph().as_graph_def().ByteSize() < 10000


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        (lambda dataset: dataset.repeat(), True),
        (lambda dataset: dataset.filter(lambda x, y: y > 0).repeat().map(lambda x, y: (x, y)), True),
        (lambda dataset: dataset.filter(lambda x, y: y > 0).repeat(2), False),
        (lambda dataset: dataset.filter(lambda x, y: y > 0).repeat().take(3), False),
    ],
)
def test_a_dataset_that_never_ends(change, expected):
    assert trainer.data.never_ends(change(_pairs(8))) is expected


def test_constant_that_the_network_uses_too_keeps_its_value():
    rows = tf.constant(np.full((600, 1000), 3, np.float32))
    dataset = tf.data.Dataset.from_tensor_slices((rows, tf.zeros([600])))
    replaced = trainer.constants.feed_arrays([dataset])
    assert replaced == [rows.op]
    mean = tf.reduce_mean(rows)
    trainer.constants.empty(replaced)
    with tf.Session() as session:
        assert session.run(mean) == 3


def test_more_ranks_than_gpus_names_both():
    with pytest.raises(HostError, match=r"^\S+: 3 ranks on this host for 2 visible GPUs"):
        session_config(Ranks(0, 3, 0, 3), gpus=2)


def test_one_gpu_for_each_local_rank():
    config = session_config(Ranks(3, 4, 1, 2), gpus=2)
    assert config.gpu_options.visible_device_list == "1"
    assert config.gpu_options.allow_growth


def test_no_gpu_is_named_where_there_is_none():
    assert session_config(Ranks(0, 1, 0, 1), gpus=0).gpu_options.visible_device_list == ""


@pytest.mark.parametrize(("batch", "wish", "ready"), [(8, None, 8), (64, None, 16), (64, 40, 40), (8, 0, 0)])
def test_batches_kept_ready(batch, wish, ready):
    spec = TrainSpec(None, _build, lambda learning_rate: None, RATE, batch_size=batch, prefetch_size=wish)
    assert spec.prefetch_batches == ready


@pytest.mark.parametrize("limit", [1e300, 10**30, 2**63 - 1])
@pytest.mark.parametrize(("samples", "steps"), [(100, 13), (0, 0)])
def test_limit_beyond_64_bits_is_no_limit(limit, samples, steps):
    plan = plan_steps(
        samples, np.int64(0), size=2, batch_size=4, minibatches_done=np.int64(3), max_iteration=limit
    )
    assert plan.steps == steps
    assert plan_steps(INFINITE, 0, size=2, batch_size=4, max_iteration=limit).steps == limit // 2
