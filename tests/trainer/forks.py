"""Jobs whose ranks are forked from one process that has imported TensorFlow already: half a second instead of six."""

import contextlib
import os
import select
import signal
import subprocess
import sys

from tests.trainer.launch import ROOT, WORKERS, mpirun, rank_environment

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
