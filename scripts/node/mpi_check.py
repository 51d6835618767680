"""One rank of the healthcheck: `mpi_check.py hello` (MPI alone) or `mpi_check.py allreduce` (TensorFlow and Horovod).

Prints one JSON object: who the rank is and what it got, for the controller to judge.
"""

import json
import os
import socket
import sys
import time

ELEMENTS = (7, 300000)  # one below and one far above the size at which Open MPI changes its protocol


def hello():
    """Who is there: every rank learns the host names of all the others."""
    from mpi4py import MPI

    world = MPI.COMM_WORLD
    hosts = world.allgather(socket.gethostname())
    return {
        "rank": world.Get_rank(),
        "size": world.Get_size(),
        "hosts": hosts,
        "library": MPI.Get_library_version().split(",")[0],
        "cpus": sorted(os.sched_getaffinity(0)),
        "cpu_count": os.cpu_count(),
    }


def allreduce():
    """The largest difference from the closed form: rank r contributes r + i, so element i sums to n(n-1)/2 + n i."""
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    import warnings

    warnings.simplefilter("ignore")
    import horovod.tensorflow as hvd
    import numpy as np

    try:
        import tensorflow.compat.v1 as tf
    except ImportError:
        import tensorflow as tf

    hvd.init()
    rank, size = hvd.rank(), hvd.size()
    errors = []
    started = time.time()
    with tf.Graph().as_default():
        inputs = [np.arange(count, dtype=np.float64) + rank for count in ELEMENTS]
        sums = [hvd.allreduce(tf.constant(each), op=hvd.Sum, name=f"check.{len(each)}") for each in inputs]
        threads = tf.ConfigProto(intra_op_parallelism_threads=1, inter_op_parallelism_threads=1)
        with tf.Session(config=threads) as session:
            for count, got in zip(ELEMENTS, session.run(sums)):
                expected = size * (size - 1) / 2.0 + size * np.arange(count, dtype=np.float64)
                errors.append(float(np.max(np.abs(got - expected))))
    seconds = time.time() - started
    hvd.shutdown()
    return {
        "rank": rank,
        "size": size,
        "max_error": max(errors),
        "seconds": seconds,
        "host": socket.gethostname(),
    }


if __name__ == "__main__":
    print(json.dumps({"hello": hello, "allreduce": allreduce}[sys.argv[1]]()))
