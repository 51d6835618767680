"""Contender: a Horovod loop as a careful user writes it by hand: feed-free tf.data, one session, no hooks."""

import common
import horovod.tensorflow as hvd
import tensorflow.compat.v1 as tf

from trainer.ranks import cpu_threads

options = common.arguments()
clock = common.Clock(options)
hvd.init()
images, labels = common.arrays(options)
# The same threads as the Trainer's, so that only the loop differs.
threads = cpu_threads(hvd.local_size())
config = tf.ConfigProto(intra_op_parallelism_threads=threads, inter_op_parallelism_threads=max(2, threads))
tf.set_random_seed(common.SEED)
fed = [tf.placeholder(tf.as_dtype(array.dtype), array.shape) for array in (images, labels)]
dataset = tf.data.Dataset.from_tensor_slices(tuple(fed)).shard(hvd.size(), hvd.rank())
dataset = common.mapped(options.model, dataset.shuffle(10000 // hvd.size(), seed=common.SEED).repeat())
dataset = dataset.batch(options.batch_size).prefetch(16)
iterator = tf.data.make_initializable_iterator(dataset)
_, loss, _ = common.build(options.model)(*iterator.get_next())
optimizer = hvd.DistributedOptimizer(tf.train.AdamOptimizer(0.001 * hvd.size()))
train_op = optimizer.minimize(loss, global_step=tf.train.get_or_create_global_step())
broadcast = hvd.broadcast_global_variables(0)
with tf.Session(config=config) as session:
    session.run(tf.global_variables_initializer())
    session.run(broadcast)
    session.run(iterator.initializer, dict(zip(fed, (images, labels))))
    for step in range(1, options.steps + 1):
        if step % common.LOG_STEPS == 0:
            _, value = session.run([train_op, loss])
            if hvd.rank() == 0:
                print(f"step {step}, loss {value:.4f}", flush=True)
        else:
            session.run(train_op)
        clock.step_done()
        if options.trace and step == options.steps // 2:
            common.trace(session, train_op.name, options)
clock.report()
