"""Carries one command through: starts it, feeds it, drains both its streams, keeps its deadline.

Local and SSH transports differ only in the `Session` they hand to `execute`.
"""

from __future__ import annotations

import io
import queue
import secrets
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import BinaryIO, Protocol

from provision.errors import DeadlineExceeded, NodeUnreachable
from provision.transport.base import OnLine, Result
from provision.transport.streams import Kept, Lines, Marked
from provision.transport.supervisor import GRACE_S, HEARTBEAT_S
from provision.transport.waiting import waiting

LOGIN_FILES_S = 30.0  # what a user's login files may take before a command begins
_CHUNK_BYTES = 1 << 16
_STREAMS = ("stdout", "stderr")


class Session(Protocol):
    """A started `supervisor.start_argv` process. Reads block; `close` wakes them."""

    def read(self, stream: str) -> bytes:
        """The next bytes of `stream`; empty at its end."""
        ...

    def send(self, data: bytes) -> None:
        """Sends to standard input; OSError once nobody reads it."""
        ...

    def end_input(self) -> None: ...

    def status(self) -> int | None:
        """The exit status, or None while there is none."""
        ...

    def gone(self) -> bool:
        """True once no exit status can come any more."""
        ...

    def hang_up(self) -> None:
        """Ends a shell that does not get past its login files, as far as that can be done from here."""
        ...

    def close(self) -> None: ...


@dataclass(frozen=True)
class Input:
    """A command's standard input: `size` bytes from `stream`."""

    stream: BinaryIO
    size: int

    @classmethod
    def of(cls, data: bytes) -> Input:
        return cls(io.BytesIO(data), len(data))


@dataclass(frozen=True)
class Command:
    node: str
    argv: tuple[str, ...]
    header: bytes
    input: Input | None
    timeout_s: float
    on_line: OnLine | None = None
    sink: Callable[[bytes], None] | None = None  # takes the stdout bytes instead of the Result
    user: str = ""  # whose login files are read, for messages

    @property
    def login_files(self) -> str:
        whose = f"of {self.user} " if self.user else ""
        return f"~/.bashrc and ~/.profile {whose}there (of another shell than bash: its own login files)"

    @property
    def login_remedy(self) -> str:
        return f"look at {self.login_files}: something in them waits or takes too long"


def new_marker() -> str:
    return "ringmaster-" + secrets.token_hex(12)


def execute(
    start: Callable[[str], Session], command: Command, *, end_remotely: Callable[[str], bool]
) -> Result:
    """Runs `command` in the session made by `start(marker)`; DeadlineExceeded, NodeUnreachable.

    `end_remotely(pid)` is asked to end the supervisor by another way, should it not see the end of its input;
    it says whether it could.
    """
    begun = time.monotonic()
    deadline = begun + command.timeout_s
    marker = new_marker()
    with waiting("sshd had opened no session yet", "check whether the machine is overloaded"):
        session = start(marker)
    run = _Run(session, command, marker)
    try:
        run.start()
        login_begun = time.monotonic()
        with waiting("the login shell had not got past its login files", command.login_remedy):
            ended = run.drain(min(deadline, login_begun + LOGIN_FILES_S), until_ready=True)
        if not ended:
            run.stop.set()
            session.hang_up()
            raise _login_deadline(command, run, time.monotonic() - login_begun)
        with waiting(f"`{shown(command.argv)}` was still running"):
            ended = run.drain(deadline)
        if not ended:
            run.stop.set()
            session.end_input()
            # The group gets TERM now and KILL after its grace; wait for that, so that nothing is left behind.
            gone = run.drain(time.monotonic() + GRACE_S + 2, quiet=True)
            if not gone and end_remotely(run.supervisor_pid):
                run.drain(time.monotonic() + GRACE_S + 2, quiet=True)
            raise _deadline(command, run)
        return run.result(time.monotonic() - begun)
    finally:
        run.stop.set()
        session.close()


def shown(argv: tuple[str, ...]) -> str:
    """The command as it is named in messages: its first words on one line."""
    text = " ".join(" ".join(argv[:6]).split())
    return text if len(text) <= 120 and len(argv) <= 6 else text[:120] + " …"


def _login_deadline(command: Command, run: _Run, after_s: float) -> DeadlineExceeded:
    text = f"no command could begin within {after_s:.2g} s: the login shell did not get past its login files"
    return DeadlineExceeded(command.node, text + run.noise_note(), remedy=command.login_remedy)


def _deadline(command: Command, run: _Run) -> DeadlineExceeded:
    text = f"`{shown(command.argv)}` did not end within {command.timeout_s:g} s and was ended"
    return DeadlineExceeded(command.node, text + run.tail_note())


class _Run:
    """The moving parts of one `execute`: two readers and a sender beside the calling thread."""

    def __init__(self, session: Session, command: Command, marker: str) -> None:
        self.session = session
        self.command = command
        self.ready = threading.Event()  # the marker was seen: the login files are through
        self.stop = threading.Event()
        self.supervisor_pid = ""
        self._marked = {name: Marked(marker) for name in _STREAMS}
        self._lines = {name: Lines() for name in _STREAMS}
        self._kept = {name: Kept() for name in _STREAMS}
        self._open = set(_STREAMS)
        self._chunks: queue.Queue[tuple[str, bytes]] = queue.Queue(maxsize=32)
        self._status: int | None = None

    def start(self) -> None:
        for name in _STREAMS:
            threading.Thread(target=self._read, args=(name,), name=f"read-{name}", daemon=True).start()
        threading.Thread(target=self._send, name="send", daemon=True).start()

    def drain(self, deadline: float, *, quiet: bool = False, until_ready: bool = False) -> bool:
        """Takes output until the command has ended (True) or the deadline is over (False).

        With `until_ready` also True as soon as the login files are through.
        """
        quiet_since = time.monotonic()
        while True:
            now = time.monotonic()
            if until_ready and self.ready.is_set():
                return True
            if not self._open:
                # The exit status may come a moment after the last output.
                self._status = self.session.status()
                if self._status is not None or self.session.gone():
                    return True
            if now >= deadline:
                return False
            try:
                wait_s = 0.01 if not self._open else min(0.2, deadline - now)
                name, data = self._chunks.get(timeout=wait_s)
            except queue.Empty:
                # A process that left the group may hold the streams open: the command itself has ended.
                self._status = self.session.status()
                if self._status is not None and time.monotonic() - quiet_since > 1.0:
                    self._finish()
                    return True
                continue
            quiet_since = time.monotonic()
            self._take(name, data, quiet)

    def _take(self, name: str, data: bytes, quiet: bool) -> None:
        if not data:
            self._open.discard(name)
        marked = self._marked[name]
        output = marked.feed(data)
        if name == "stdout" and marked.found and not self.ready.is_set():
            self.supervisor_pid = marked.rest_of_line
            self.ready.set()
        if not output and data:
            return
        if name == "stdout" and self.command.sink is not None:
            if output and not quiet:
                self.command.sink(output)
            return
        self._kept[name].feed(output)
        if self.command.on_line is not None and not quiet:
            for line in self._lines[name].feed(output, end=not data):
                self.command.on_line(name, line)

    def _finish(self) -> None:
        for name in tuple(self._open):
            self._take(name, b"", False)

    def result(self, duration_s: float) -> Result:
        command = self.command
        if not self.ready.is_set():
            status = "without a status" if self._status is None else f"with status {self._status}"
            text = f"the login shell ended {status} before a command could begin"
            remedy = f"look for an `exit` in {command.login_files}; if there is none, "
            remedy += "the login shell must be one that runs commands, with bash on its PATH"
            raise NodeUnreachable(command.node, text + self.noise_note(), remedy=remedy)
        if self._status is None:
            text = f"the connection was lost while `{shown(command.argv)}` ran" + self.tail_note()
            remedy = "what it started there is ended within 2 minutes; check the node and run the task again"
            raise NodeUnreachable(command.node, text, remedy=remedy)
        return Result(
            node=command.node,
            argv=command.argv,
            status=self._status,
            stdout=self._kept["stdout"].text(),
            stderr=self._kept["stderr"].text(),
            duration_s=duration_s,
            noise="".join(self._marked[name].all_noise() for name in _STREAMS),
        )

    def noise_note(self) -> str:
        lines = "".join(self._marked[name].all_noise() for name in _STREAMS).split("\n")
        shown_lines = [line for line in lines if line.strip()][-5:]
        return f"\n  it printed: `{' | '.join(shown_lines)}`" if shown_lines else ""

    def tail_note(self) -> str:
        text = self._kept["stderr"].text() or self._kept["stdout"].text()
        last = [line for line in text.rstrip().splitlines() if line.strip()][-3:]
        return "\n  last output: " + " | ".join(last) if last else ""

    def _read(self, name: str) -> None:
        while True:
            try:
                data = self.session.read(name)
            except OSError:
                data = b""
            while not self._offer(name, data):
                if self.stop.is_set():
                    return
            if not data:
                return

    def _offer(self, name: str, data: bytes) -> bool:
        try:
            self._chunks.put((name, data), timeout=0.5)
        except queue.Full:
            return False
        return True

    def _send(self) -> None:
        while not self.ready.wait(0.5):
            if self.stop.is_set():
                return
        try:
            self.session.send(self.command.header)
            if self.command.input is not None:
                left = self.command.input.size
                while left > 0 and not self.stop.is_set():
                    data = self.command.input.stream.read(min(_CHUNK_BYTES, left))
                    if not data:
                        return  # the file became shorter: without its last bytes nothing is acted on
                    self.session.send(data)
                    left -= len(data)
                if left == 0:
                    self.session.send(b".")
            while not self.stop.wait(HEARTBEAT_S):
                self.session.send(b".")
        except OSError:
            return  # the command has ended, or the connection: the readers see which
