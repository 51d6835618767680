"""This process among the ranks: start of Horovod, devices, and the end of the whole job when one rank fails."""

import contextlib
import logging
import os
import socket
import sys
import time
import traceback
from dataclasses import dataclass

from trainer import memory
from trainer.compat import HAS_DRIVER, horovod, tf

logger = logging.getLogger("trainer")

# Time for the launcher to pass on what a failed rank wrote before it ends the job.
_FORWARD_S = 0.5
# Ranks that fail alike leave the word to rank 0, which ends the job; they end on their own if it does not.
_YIELD_S = 10.0


# Horovod looks for gradients to send every so often, by default every millisecond: long beside a step of a few. Ranks
# on one host agree on that in microseconds; over a network it would keep a core busy.
_ONE_HOST_CYCLE_MS = "0.3"


class SharedError(ValueError):
    """An error that every rank raises alike; rank 0 alone shows it."""


class HostError(ValueError):
    """An error that every rank on one host raises alike; the first of them alone shows it."""


@dataclass(frozen=True)
class Ranks:
    """The place of this process in the job."""

    rank: int
    size: int
    local_rank: int
    local_size: int

    @property
    def is_master(self):
        """Whether this process logs, writes and restores."""
        return self.rank == 0


def start():
    """Start Horovod and with it MPI; from now on an uncaught exception ends the job on all ranks.

    Raises:
        RuntimeError: mpirun started several processes that do not see each other.
    """
    hvd = horovod()
    choose_cycle_time()
    # Before the threads that allocate are there.
    memory.keep_between_steps()
    hvd.init()
    ranks = Ranks(hvd.rank(), hvd.size(), hvd.local_rank(), hvd.local_size())
    for name in ("RINGMASTER_NP", "OMPI_COMM_WORLD_SIZE"):
        launched = os.environ.get(name)
        if launched is not None and launched != str(ranks.size):
            raise RuntimeError(
                f"trainer: {launched} ranks were started ({name}), but Horovod sees {ranks.size}; expected the same "
                "number: the mpirun in use and the MPI that Horovod was built with differ"
            )
    if not isinstance(sys.excepthook, _EndJob):
        sys.excepthook = _EndJob(ranks, sys.excepthook)
    return ranks


def choose_cycle_time():
    """Set Horovod's cycle time where the whole job is on one host without an NVIDIA GPU and the user has not set it.

    Horovod reads it when it starts; mpirun tells before that how many ranks there are.
    """
    launched = os.environ.get("OMPI_COMM_WORLD_SIZE")
    if launched is not None and launched == os.environ.get("OMPI_COMM_WORLD_LOCAL_SIZE") and not HAS_DRIVER:
        os.environ.setdefault("HOROVOD_CYCLE_TIME", _ONE_HOST_CYCLE_MS)


def has_failed():
    """Say whether an uncaught exception is ending this process."""
    return isinstance(sys.excepthook, _EndJob) and sys.excepthook.has_failed


def before_last_words(action):
    """Call `action` before an uncaught exception is shown."""
    if isinstance(sys.excepthook, _EndJob):
        sys.excepthook.actions.append(action)


class _EndJob:
    """An excepthook that shows the traceback and then ends the whole job."""

    def __init__(self, ranks, previous):
        self._ranks = ranks
        self._previous = previous
        self.has_failed = False
        self.actions = []

    def __call__(self, kind, error, trace):
        self.has_failed = True
        for action in self.actions:
            with contextlib.suppress(OSError, ValueError):
                action()
        if self._ranks.size == 1 or issubclass(kind, KeyboardInterrupt):
            self._previous(kind, error, trace)
            return
        try:
            self._tell(kind, error, trace)
        finally:
            # No ordinary exit: it would finalise MPI first, and mpirun takes a finalised rank for a finished one
            # while the others wait for it in their next allreduce.
            os._exit(1)

    def _tell(self, kind, error, trace):
        ranks = self._ranks
        if not issubclass(kind, (SharedError, HostError)):
            text = "".join(traceback.format_exception(kind, error, trace))
            text = f"trainer: rank {ranks.rank} of {ranks.size} failed:\n{text}"
        elif ranks.local_rank == 0 if issubclass(kind, HostError) else ranks.is_master:
            text = f"trainer: {error}\n"
        else:
            time.sleep(_YIELD_S)
            return
        # What goes first may be closed; the reason is told all the same.
        with contextlib.suppress(OSError, ValueError):
            sys.stdout.flush()
        sys.stderr.write(text)
        sys.stderr.flush()
        time.sleep(_FORWARD_S)


def visible_gpus():
    """Return the number of GPUs that TensorFlow sees; occupies none of them."""
    return len(tf.config.experimental.list_physical_devices("GPU"))


def session_config(ranks, gpus):
    """Make the session's configuration: one of `gpus` GPUs per local rank, or a share of the host's cores.

    Raises:
        HostError: there are GPUs, but fewer than local ranks.
    """
    config = tf.ConfigProto()
    if gpus:
        if ranks.local_size > gpus:
            raise HostError(
                f"{socket.gethostname()}: {ranks.local_size} ranks on this host for {gpus} visible "
                f"GPU{'' if gpus == 1 else 's'}; expected at most one rank per GPU: start fewer ranks here, or hide "
                "the GPUs with CUDA_VISIBLE_DEVICES=''"
            )
        config.gpu_options.allow_growth = True
        # Only where there is a GPU: naming one on a host without any aborts the process.
        config.gpu_options.visible_device_list = str(ranks.local_rank)
        return config
    threads = cpu_threads(ranks.local_size)
    os.environ.setdefault("OMP_NUM_THREADS", str(threads))
    config.intra_op_parallelism_threads = threads
    # One thread alone could not run the input pipeline's functions beside a training step.
    config.inter_op_parallelism_threads = max(2, threads)
    return config


def cpu_threads(local_size):
    """Return the threads for one rank: what the user says in OMP_NUM_THREADS, else its share of the cores."""
    wish = os.environ.get("OMP_NUM_THREADS", "").split(",")[0].strip()
    if wish.isdigit() and int(wish) > 0:
        return int(wish)
    return max(1, len(os.sched_getaffinity(0)) // local_size)


def does_log(ranks):
    """Say whether this rank logs its steps: rank 0, and with TRAINER_LOG_RANKS=all every rank."""
    return ranks.is_master or os.environ.get("TRAINER_LOG_RANKS") == "all"


def set_up_logging(ranks):
    """Let the ranks that log do so; the others keep to warnings."""
    if not logger.hasHandlers():
        handler = logging.StreamHandler()
        handler.setFormatter(logging.Formatter("%(asctime)s %(message)s", "%H:%M:%S"))
        logger.addHandler(handler)
        logger.propagate = False
    if not does_log(ranks):
        logger.setLevel(logging.WARNING)
    elif logger.level == logging.NOTSET:
        logger.setLevel(logging.INFO)
