"""Trains on datasets of many sizes and kinds, one after the other; reports steps, samples and messages of each."""

import sys

import tensorflow.compat.v1 as tf
from samples import numbered
from tools import RANK, Messages, Recorder, report

import trainer

BATCH = 2


def arrays(count):
    return trainer.data.from_arrays(*numbered(count))


def slices(count):
    return tf.data.Dataset.from_tensor_slices(numbered(count)).map(
        lambda x, y: (x * 1, y), num_parallel_calls=2
    )


def filtered(count):
    return arrays(2 * count).filter(lambda x, y: y < count).shuffle(50)


def flattened(count):
    return arrays(count).flat_map(lambda x, y: tf.data.Dataset.from_tensors((x, y))).shuffle(5)


def generated(count):
    features, labels = numbered(count)
    return tf.data.Dataset.from_generator(
        lambda: zip(features, labels), (tf.float32, tf.int64), ((features.shape[1],), ())
    )


def epochs(count):
    return arrays(count).shuffle(count).repeat(2)


def epochs_of_unknown_size(count):
    return filtered(count).shuffle(count).repeat(2)


def badly_seeded(count):
    return arrays(count).shuffle(count, seed=int(sys.argv[1]) + RANK)


CASES = [
    *((kind, 13) for kind in (arrays, slices, filtered, flattened, generated, badly_seeded)),
    *((kind, 12) for kind in (arrays, epochs, epochs_of_unknown_size, badly_seeded)),
    (arrays, 15),
    (filtered, 14),
    (filtered, 16),
]


def train(kind, count, drive):
    recorder = Recorder()
    with tf.Graph().as_default():
        job = trainer.Trainer(
            kind(count),
            recorder.build,
            tf.train.GradientDescentOptimizer,
            {"learning_rate": 0.01},
            batch_size=BATCH,
        )
        drive(job)
        job.close()
        return {"steps": job.global_step, "batches": recorder.batches}


def to_end(job):
    job.train_to_end()


def by_hand(job):
    while not job.session.should_stop():
        job.train_on_batch()


def until_out_of_range(job):
    while True:
        try:
            job.train_on_batch()
        except tf.errors.OutOfRangeError:
            break


def main():
    messages, results = Messages(), {}
    for index, (kind, count) in enumerate(CASES):
        start = len(messages.lines)
        drive = (to_end, by_hand, until_out_of_range)[index % 3]
        result = train(kind, count, drive)
        result["messages"] = messages.lines[start:]
        results[f"{kind.__name__}-{count}"] = result
    report(**results)


main()
