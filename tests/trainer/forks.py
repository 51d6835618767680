"""Jobs whose ranks are forked from one process that has imported TensorFlow already: half a second instead of six."""

import atexit
import contextlib
import functools
import os
import select
import signal
import subprocess
import sys
import tempfile

from tests.trainer.launch import ROOT, WORKERS, mpirun, rank_environment, run

_READY_S = 120


@contextlib.contextmanager
def fork_server(directory):
    """Run the server meanwhile; yields the first words of the command of a rank, a script and its arguments to follow.

    Raises:
        AssertionError: the server did not start.
    """
    path = os.path.join(str(directory), "forks")
    server = subprocess.Popen(
        [sys.executable, str(WORKERS / "fork_server.py"), path],
        env=rank_environment({}),
        cwd=str(ROOT),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        universal_newlines=True,
    )
    try:
        is_answered = select.select([server.stdout], [], [], _READY_S)[0]
        assert is_answered
        assert server.stdout.readline().startswith("ready")
        yield [sys.executable, "-S", str(WORKERS / "fork_rank.py"), path]
    finally:
        server.kill()
        server.wait()
        server.stdout.close()


@functools.lru_cache(maxsize=None)
def _shared_words():
    """The first words of a rank of a server that serves all tests of this session."""
    stack = contextlib.ExitStack()
    atexit.register(stack.close)
    return stack.enter_context(fork_server(stack.enter_context(tempfile.TemporaryDirectory())))


def run_forked(name, size, *arguments, **options):
    """Run a worker of this folder as `launch.run` does, its ranks forked."""
    return run(WORKERS / name, size, *arguments, words=_shared_words(), **options)


def run_worker(name, size, *arguments, report_dir, is_fresh=False, **options):
    """Run a worker of this folder that must succeed on every rank.

    Args:
        is_fresh: start every rank as an interpreter of its own, where what is imported or in memory matters.
    """
    words = None if is_fresh else _shared_words()
    job = run(WORKERS / name, size, *arguments, report_dir=report_dir, words=words, **options)
    assert job.status == 0, job.output
    assert len(job.reports) == size, job.output
    # What goes wrong while a rank ends has no part in its exit status.
    assert "Error in atexit" not in job.output, job.output
    return job


def start(words, size, log, **variables):
    """Start a job in a process group of its own, its output in the file `log`; returns the process of mpirun.

    Args:
        variables: more environment variables of the ranks.
    """
    command = [*mpirun(), "--oversubscribe", "--bind-to", "none", "--tag-output", "-np", str(size), *words]
    return subprocess.Popen(
        command,
        env=rank_environment(variables),
        cwd=str(ROOT),
        stdin=subprocess.DEVNULL,
        stdout=log,
        stderr=subprocess.STDOUT,
        start_new_session=True,
    )


def wait(process, timeout_s):
    """Wait for mpirun, and end its group where it takes too long; returns the exit status.

    Raises:
        AssertionError: it did not end in time.
    """
    try:
        return process.wait(timeout=timeout_s)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGTERM)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(timeout=10)
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        raise AssertionError(f"mpirun {process.args} did not end within {timeout_s} s")
