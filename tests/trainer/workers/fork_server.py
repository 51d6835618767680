"""Starts ranks by fork: TensorFlow is imported once, not in every process of every job.

Called with a socket's path and a script; what `fork_rank.py` sends over the socket says who the rank is.
"""

import array
import json
import os
import runpy
import select
import signal
import socket
import sys

import horovod.tensorflow
import tensorflow.compat.v1

import trainer

_POLL_S = 0.02
_PARENT_POLL_S = 1.0


def serve(path):
    """Answer every connection by a fork; return in the forked rank, dressed up as the process it stands for."""
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(path)
    listener.listen(16)
    print("ready", trainer.__name__, tensorflow.compat.v1.__version__, horovod.__version__, flush=True)
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    tests = os.getppid()
    while True:
        if not select.select([listener], [], [], _PARENT_POLL_S)[0]:
            if os.getppid() != tests:
                # The tests were killed: nobody will end this server.
                os._exit(1)
            continue
        connection, _ = listener.accept()
        if os.fork():
            connection.close()
            continue
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        listener.close()
        job, streams = _receive(connection)
        pid = os.fork()
        if not pid:
            connection.close()
            os.environ.clear()
            os.environ.update(job["environment"])
            os.chdir(job["directory"])
            for number, stream in enumerate(streams, 1):
                os.dup2(stream, number)
                os.close(stream)
            sys.argv = job["arguments"]
            return
        for stream in streams:
            os.close(stream)
        _keep(pid, connection)


def _receive(connection):
    streams = array.array("i")
    data, ancillary, _, _ = connection.recvmsg(1 << 20, socket.CMSG_LEN(2 * streams.itemsize))
    for _, _, content in ancillary:
        streams.frombytes(content)
    while not data.endswith(b"\0"):
        data += connection.recv(1 << 20)
    return json.loads(data[:-1].decode()), streams


def _keep(pid, connection):
    """Pass on how the rank ended, and end it when the process that it stands for is ended."""
    while True:
        done, status = os.waitpid(pid, os.WNOHANG)
        if done:
            connection.send(str(status).encode())
            os._exit(0)
        if select.select([connection], [], [], _POLL_S)[0]:
            os.kill(pid, signal.SIGKILL)
            os._exit(0)


serve(sys.argv[1])
sys.path.insert(0, os.path.dirname(sys.argv[0]))
runpy.run_path(sys.argv[0], run_name="__main__")
