"""Commands on this very machine, run as they would be run over SSH."""

from __future__ import annotations

import contextlib
import os
import select
import subprocess
import sys
import threading
from collections.abc import Mapping
from pathlib import Path

from provision.cluster import Node
from provision.errors import PreconditionError
from provision.transport.files import FileTransport
from provision.transport.session import Session
from provision.transport.supervisor import start_argv

# What a controller's shell, virtual environment or batch job sets and an SSH session would not have.
_DROPPED = ("VIRTUAL_ENV", "VIRTUAL_ENV_PROMPT", "PYTHONHOME", "PYTHONPATH", "BASH_ENV", "ENV", "OLDPWD")
_DROPPED_PREFIXES = ("SLURM_", "PMI_", "PMIX_", "OMPI_", "PRTE_", "HOROVOD_")


def local_environment(environ: Mapping[str, str], *, python_bin: Path | None) -> dict[str, str]:
    """`environ` without traces of the controller; `python_bin` (its virtual environment's) leaves PATH."""
    kept = {
        name: value
        for name, value in environ.items()
        if name not in _DROPPED and not name.startswith(_DROPPED_PREFIXES)
    }
    if python_bin is not None:
        parts = environ.get("PATH", "").split(os.pathsep)
        kept["PATH"] = os.pathsep.join(part for part in parts if Path(part) != python_bin)
    return kept


class LocalSession:
    """A `Session` over pipes to a child process in a session of its own: Ctrl-C does not reach it."""

    def __init__(self, argv: list[str], env: Mapping[str, str]) -> None:
        pipe = subprocess.PIPE
        self._process = subprocess.Popen(
            argv, stdin=pipe, stdout=pipe, stderr=pipe, env=dict(env), start_new_session=True
        )
        assert self._process.stdin
        assert self._process.stdout
        assert self._process.stderr
        self._files = {"stdout": self._process.stdout, "stderr": self._process.stderr}
        self._input = self._process.stdin
        self._input_ended = False
        self._input_lock = threading.Lock()
        self._closed = threading.Event()
        os.set_blocking(self._input.fileno(), False)

    def read(self, stream: str) -> bytes:
        file = self._files[stream]
        waiter = select.poll()
        waiter.register(file, select.POLLIN)
        while not waiter.poll(200):
            # Whoever left the command's group may hold the pipe open for as long as it likes.
            if self._closed.is_set():
                file.close()
                return b""
        data = os.read(file.fileno(), 1 << 16)
        if not data:
            file.close()  # only the reading thread closes it: nobody else can be inside read() then
        return data

    def send(self, data: bytes) -> None:
        view = memoryview(data)
        writable = select.poll()
        with self._input_lock:
            if not self._input_ended:
                writable.register(self._input, select.POLLOUT)
        while view:
            with self._input_lock:
                if self._input_ended:
                    raise BrokenPipeError("the input was ended")
                # Short waits: whoever ends the input needs the lock, so that the descriptor stays ours here.
                if writable.poll(50):
                    with contextlib.suppress(BlockingIOError):
                        view = view[os.write(self._input.fileno(), view) :]

    def end_input(self) -> None:
        with self._input_lock:
            if not self._input_ended:
                self._input_ended = True
                with contextlib.suppress(OSError):
                    self._input.close()

    def status(self) -> int | None:
        code = self._process.poll()
        return 128 - code if code is not None and code < 0 else code

    def gone(self) -> bool:
        return False  # a child's exit status always comes

    def hang_up(self) -> None:
        self._process.terminate()  # itself only: it has started nothing yet

    def close(self) -> None:
        self.end_input()
        self._closed.set()
        if self._process.poll() is None:
            # Its group is ended within seconds; somebody has to take the exit status.
            threading.Thread(target=self._process.wait, name="reap", daemon=True).start()


class LocalTransport(FileTransport):
    """A Transport without SSH, for `Node(local=True)`."""

    def __init__(self, node: Node) -> None:
        super().__init__(node)
        in_venv = sys.prefix != sys.base_prefix
        self._env = local_environment(os.environ, python_bin=Path(sys.prefix, "bin") if in_venv else None)

    def _start(self, marker: str, timeout_s: float, *, urgent: bool) -> Session:
        try:
            return LocalSession(start_argv(marker), self._env)
        except FileNotFoundError as error:
            raise PreconditionError("bash is not on PATH", remedy="install bash") from error
