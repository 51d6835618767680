"""Validation: the metrics over a whole dataset and all ranks, without touching the training."""

import numpy as np

from trainer import data, dealing
from trainer.compat import horovod, tf
from trainer.ranks import SharedError, cpu_threads
from trainer.results import explained_eager_tensors, validation_result


class Validation:
    """The validation network of this rank, its input, and the sum over all ranks."""

    def __init__(self, spec, ranks):
        batches = dealing.validation_batches(
            spec.validation_dataset,
            size=ranks.size,
            rank=ranks.rank,
            batch_size=spec.batch_size,
            prefetch=spec.prefetch_batches,
            threads=cpu_threads(ranks.local_size),
        )
        self._iterator = tf.data.make_initializable_iterator(batches)
        self._feeds = data.feeds_of(spec.validation_dataset)
        x, y = self._iterator.get_next()
        summaries = tf.get_collection_ref(tf.GraphKeys.SUMMARIES)
        training_summaries = list(summaries)
        with explained_eager_tensors("build_validation_func"):
            self.metrics = validation_result(spec.build_validation_func(x, y))
        # A training step that writes summaries has no validation samples to make these from.
        summaries[:] = training_summaries
        self._rows = tf.shape(tf.nest.flatten(x)[0])[0]
        self._values = [tf.reduce_mean(tf.cast(metric, tf.float64)) for metric in self.metrics]
        self._sums = tf.placeholder(tf.float64, [len(self.metrics) + 1], name="trainer/validation_sums")
        self._summed = self._sums
        if ranks.size > 1:
            self._summed = horovod().allreduce(self._sums, op=horovod().Sum, name="trainer_validation")

    def run(self, session):
        """Return the average of every metric over the samples of all ranks; every rank must run it.

        A metric that is no scalar counts with the mean of its elements.

        Args:
            session: the plain session below the monitored one, so that no hook takes part.

        Raises:
            SharedError: there is no sample.
        """
        session.run(self._iterator.initializer, feed_dict=self._feeds)
        sums = np.zeros(len(self.metrics) + 1)
        while True:
            try:
                rows, values = session.run([self._rows, self._values])
            except tf.errors.OutOfRangeError:
                break
            sums += np.array([*values, 1.0]) * rows
        summed = session.run(self._summed, feed_dict={self._sums: sums})
        if summed[-1] == 0:
            raise SharedError(
                "validation_dataset: it is empty; expected at least one sample (or validation_dataset=None)"
            )
        return [float(value) for value in summed[:-1] / summed[-1]]
