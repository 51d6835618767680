"""What old scripts may return from their build functions: tensors by name, metrics in anything that makes a list."""

import pytest

from trainer.compat import tf
from trainer.results import training_result, validation_result


@pytest.fixture(autouse=True)
def _graph():
    with tf.Graph().as_default():
        yield


@pytest.mark.parametrize("collect", [list, tuple, iter, lambda tensors: dict(enumerate(tensors)).values()])
def test_metrics_come_in_any_iterable(collect):
    tensors = [tf.constant(1.0), tf.constant(2)]
    assert [id(t) for t in validation_result((None, collect(tensors)))] == [id(t) for t in tensors]


def test_metrics_by_name():
    tensor = tf.constant(1.0, name="accuracy")
    assert validation_result((None, ["accuracy:0"]))[0] is tensor


@pytest.mark.parametrize("collect", [dict, list, tuple])
def test_log_tensors_by_name(collect):
    loss = tf.identity(tf.constant(1.0), name="loss")
    tf.constant(2.0, name="scope/rate")
    given = {"loss": "loss", "scope/rate": "scope/rate:0"}
    logged = training_result((None, loss, given if collect is dict else collect(given.values())))[2]
    assert {name: tensor.name for name, tensor in logged.items()} == {
        "loss": "loss:0",
        "scope/rate": "scope/rate:0",
    }


@pytest.mark.parametrize("log_tensors", [["absent"], {"loss": "absent:0"}, ["loss:7"], ["a:b:c"], "loss"])
def test_name_of_no_tensor_is_refused(log_tensors):
    loss = tf.identity(tf.constant(1.0), name="loss")
    with pytest.raises(TypeError, match=r"log_tensors is .*(absent|loss:7|a:b:c|loss)"):
        training_result((None, loss, log_tensors))


@pytest.mark.parametrize("metrics", [["absent"], "absent", iter([1.0]), 3, {}])
def test_other_metrics_are_refused(metrics):
    with pytest.raises(TypeError, match="build_validation_func: its metrics are"):
        validation_result((None, metrics))


def test_single_tensor_is_no_list_of_metrics():
    with pytest.raises(TypeError, match="build_validation_func: its metrics are"):
        validation_result((None, tf.constant([1.0, 2.0])))
