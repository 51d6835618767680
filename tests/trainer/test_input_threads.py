"""How many threads make the samples: a rank's share of the cores, and more where they wait."""

from trainer.compat import tf
from trainer.data import from_arrays, may_wait
from trainer.dealing import training_batches, validation_batches


def plain():
    return from_arrays([[1.0], [2.0]], [0, 1])


def python(value):
    return tf.py_func(lambda given: given, [value], value.dtype)


def threads_of(options):
    kind = type(options)
    threading = options.threading if hasattr(kind, "threading") else options.experimental_threading
    return threading.private_threadpool_size


def dealt(dataset):
    given = {"size": 1, "rank": 0, "batch_size": 2, "prefetch": 1, "threads": 2}
    position = tf.constant(0, tf.int64)
    yield training_batches(dataset(), **given, position=position, lookahead=False)
    yield training_batches(dataset(), **given, position=position, lookahead=True)
    yield validation_batches(dataset(), **given)


def test_maps_that_compute_get_the_share_of_the_cores():
    def computed():
        return plain().map(lambda x, y: (tf.cond(x[0] > 1, lambda: x * 2, lambda: x), y), 8)

    with tf.Graph().as_default():
        assert [threads_of(batches.options()) for batches in dealt(computed)] == [2, 2, 2]


def test_maps_that_wait_get_more():
    def waiting():
        return plain().map(lambda x, y: (python(x), y), 8)

    with tf.Graph().as_default():
        assert [threads_of(batches.options()) for batches in dealt(waiting)] == [4, 4, 4]


def test_the_number_of_the_user_holds():
    own = tf.data.Options()
    (
        own.threading if hasattr(type(own), "threading") else own.experimental_threading
    ).private_threadpool_size = 7

    def asked():
        return plain().map(lambda x, y: (python(x), y)).with_options(own)

    with tf.Graph().as_default():
        assert [threads_of(batches.options()) for batches in dealt(asked)] == [7, 7, 7]


def test_what_may_wait():
    def nested(x, y):
        return tf.cond(x[0] > 1, lambda: python(x), lambda: x), y

    def generate():
        yield 1

    with tf.Graph().as_default():
        names = tf.data.Dataset.from_tensor_slices(["a", "b"])
        assert may_wait(plain().map(nested).repeat())
        assert may_wait(names.map(tf.io.read_file))
        assert may_wait(names.interleave(tf.data.TFRecordDataset, cycle_length=2))
        assert may_wait(tf.data.TextLineDataset("a").map(tf.strings.length))
        assert may_wait(tf.data.Dataset.from_generator(generate, tf.int64, ()))
        assert not may_wait(plain().filter(lambda x, y: y > 0).shuffle(2).repeat())
        assert not may_wait(names.interleave(lambda name: tf.data.Dataset.from_tensors(name), cycle_length=2))
