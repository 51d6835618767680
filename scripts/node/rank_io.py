"""Runs one rank's program and carries its output through mpirun unharmed.

usage: rank_io.py COMMAND [ARGUMENT...]

mpirun cuts what ranks write into chunks, mixes the chunks of all ranks, and in its XML mode loses or crashes on
long runs of characters outside ASCII. So the program's standard output and standard error are read here and
written to mpirun as short ASCII lines ("frames") which pass through it untouched; the controller joins them.

    ~o<base64>....     bytes of standard output
    ~e<base64>....     bytes of standard error
    ~x<base64>....     the end, JSON: {"status": N, "out": bytes, "err": bytes, "stopped_s": S or null}

Dots pad a frame to FRAME_MIN characters, because mpirun's buffer is too small for many short lines at once.
The status is the program's own, or 128 + N when signal N ended it.
"""

import binascii
import ctypes
import json
import os
import select
import signal
import sys
import time

FRAME_MIN = 64
BLOCK_BYTES = 2880  # 3840 characters of base64: a frame fits the 4,096 bytes that mpirun reads at a time
READ_BYTES = 1 << 16
DRAIN_S = 2.0  # after the program's end: how long what it left running may still hold the output open
FLUSH_S = 0.25  # after the last frame: time for mpirun to read it before the failing rank dies
PR_SET_PDEATHSIG = 1


def frame(kind, data):
    """One frame as bytes, padded, with its newline."""
    text = b"~" + kind + binascii.b2a_base64(data, newline=False)
    return text.ljust(FRAME_MIN, b".") + b"\n"


def write_all(data):
    """Write to mpirun; False when nobody reads there any more."""
    view = memoryview(data)
    while view:
        try:
            view = view[os.write(1, view) :]
        except OSError:
            return False
    return True


def start(command):
    """Fork the program with its output in two pipes; returns (pid, standard output, standard error)."""
    out_read, out_write = os.pipe()
    err_read, err_write = os.pipe()
    parent = os.getpid()
    libc = ctypes.CDLL(None, use_errno=True)
    pid = os.fork()
    if pid:
        os.close(out_write)
        os.close(err_write)
        return pid, out_read, err_read
    try:
        # Whoever kills this process with -9 must not leave the program behind.
        libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != parent:
            os._exit(1)
        os.dup2(out_write, 1)
        os.dup2(err_write, 2)
        for number in (
            signal.SIGPIPE,
            signal.SIGXFSZ,
        ):  # Python ignores these; the program starts with none ignored
            signal.signal(number, signal.SIG_DFL)
        os.execvp(command[0], command)
    except OSError as error:
        os.write(2, f"{command[0]}: {error.strerror}\n".encode())
    finally:
        os._exit(127)


class Child:
    """The program's state as its parent sees it."""

    def __init__(self, pid):
        self.pid = pid
        self.status = None
        self.ended_at = None
        self.stopped_at = None
        self.stopped_s = None

    def look(self):
        while self.status is None:
            pid, word = os.waitpid(self.pid, os.WNOHANG | os.WUNTRACED | os.WCONTINUED)
            if pid == 0:
                return
            if os.WIFSTOPPED(word):
                self.stopped_at = time.monotonic()
            elif os.WIFCONTINUED(word):
                self.stopped_at = None
            else:
                self.status = os.WEXITSTATUS(word) if os.WIFEXITED(word) else 128 + os.WTERMSIG(word)
                self.ended_at = time.monotonic()

    def kill(self):
        if self.status is None:
            os.kill(self.pid, signal.SIGKILL)


def pump(child, streams, stopped_limit_s):
    """Carry output until the program has ended and both pipes are at their end; returns bytes per kind."""
    totals = {b"o": 0, b"e": 0}
    wake_read, wake_write = os.pipe()
    os.set_blocking(wake_write, False)
    signal.signal(signal.SIGCHLD, lambda number, stack: None)
    signal.set_wakeup_fd(wake_write, warn_on_full_buffer=False)
    poll = select.poll()
    for descriptor in streams:
        poll.register(descriptor, select.POLLIN)
    poll.register(wake_read, select.POLLIN)
    poll.register(1, 0)  # reports only that mpirun has closed its end
    child.look()
    while streams or child.status is None:
        for descriptor, event in poll.poll(1000):
            if descriptor == wake_read:
                os.read(wake_read, 4096)
            elif descriptor == 1:
                poll.unregister(1)
                child.kill()
            elif descriptor in streams:
                data = os.read(descriptor, READ_BYTES) if event & (select.POLLIN | select.POLLHUP) else b""
                kind = streams[descriptor]
                if not data:
                    poll.unregister(descriptor)
                    del streams[descriptor]
                    continue
                totals[kind] += len(data)
                blocks = (data[at : at + BLOCK_BYTES] for at in range(0, len(data), BLOCK_BYTES))
                if not write_all(b"".join(frame(kind, block) for block in blocks)):
                    child.kill()
        child.look()
        now = time.monotonic()
        if child.ended_at is not None and now - child.ended_at > DRAIN_S:
            break
        # The other ranks would wait for a stopped one for ever.
        if child.stopped_at is not None and now - child.stopped_at > stopped_limit_s:
            child.stopped_s = round(now - child.stopped_at)
            child.stopped_at = None
            child.kill()
    return totals


def main(command):
    pid, out, err = start(command)
    # mpirun signals the whole process group; this process has to live until the program's last words are out.
    for number in (
        signal.SIGTERM,
        signal.SIGINT,
        signal.SIGHUP,
        signal.SIGUSR1,
        signal.SIGUSR2,
        signal.SIGTSTP,
    ):
        signal.signal(number, signal.SIG_IGN)
    child = Child(pid)
    totals = pump(child, {out: b"o", err: b"e"}, float(os.environ.get("RINGMASTER_STOPPED_LIMIT_S", "60")))
    end = {"status": child.status, "out": totals[b"o"], "err": totals[b"e"], "stopped_s": child.stopped_s}
    write_all(frame(b"x", json.dumps(end).encode()))
    if child.status:
        # A rank that has called MPI_Finalize and then exits with an error is no failure to mpirun until all others
        # have ended too, which they may never do. A death by signal ends the job at once.
        time.sleep(FLUSH_S)
        os.kill(os.getpid(), signal.SIGKILL)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
