"""`run`, as both transports have it: everything but how a session is opened."""

from __future__ import annotations

import getpass
import threading
from collections.abc import Callable, Mapping, Sequence

from provision.cluster import Node
from provision.errors import CommandFailed, RingmasterError
from provision.transport.base import OnLine, Result
from provision.transport.session import Command, Input, Session, execute
from provision.transport.supervisor import header


class CommandTransport:
    """The base of the transports. A subclass opens sessions in `_start`."""

    def __init__(self, node: Node) -> None:
        self._node = node
        self._running: set[Session] = set()
        self._running_lock = threading.Lock()

    @property
    def node(self) -> Node:
        return self._node

    def run(
        self,
        argv: Sequence[str],
        *,
        env: Mapping[str, str] | None = None,
        cwd: str | None = None,
        stdin: bytes | None = None,
        timeout_s: float,
        check: bool = True,
        on_line: OnLine | None = None,
    ) -> Result:
        """See `Transport.run`."""
        given = None if stdin is None else Input.of(stdin)
        result = self._execute(argv, env=env, cwd=cwd, given=given, timeout_s=timeout_s, on_line=on_line)
        if check and result.status != 0:
            raise CommandFailed(self.node.name, result.argv, result.status, result.stdout, result.stderr)
        return result

    def close(self) -> None:
        """Ends what still runs: each command's group gets TERM, and KILL 5 s later."""
        with self._running_lock:
            sessions = list(self._running)
        for session in sessions:
            session.close()

    def _start(self, marker: str, timeout_s: float, *, urgent: bool) -> Session:
        """Opens a session that runs `supervisor.start_argv(marker)`, within `timeout_s`; not in a queue if urgent."""
        raise TypeError(f"{type(self).__name__} opens no sessions")

    def _execute(
        self,
        argv: Sequence[str],
        *,
        env: Mapping[str, str] | None = None,
        cwd: str | None = None,
        given: Input | None = None,
        timeout_s: float,
        on_line: OnLine | None = None,
        sink: Callable[[bytes], None] | None = None,
        names: tuple[str, ...] | None = None,
        urgent: bool = False,
    ) -> Result:
        """`names` stand for argv in results and messages."""
        command = Command(
            node=self.node.name,
            argv=tuple(argv) if names is None else names,
            header=header(argv, env=env, cwd=cwd, input_bytes=None if given is None else given.size),
            input=given,
            timeout_s=timeout_s,
            on_line=on_line,
            sink=sink,
            user=self.node.user or getpass.getuser(),
        )
        started: list[Session] = []

        def start(marker: str) -> Session:
            session = self._start(marker, timeout_s, urgent=urgent)
            started.append(session)
            with self._running_lock:
                self._running.add(session)
            return session

        try:
            return execute(start, command, end_remotely=self._end_remotely)
        finally:
            with self._running_lock:
                self._running.difference_update(started)

    def _end_remotely(self, pid: str) -> bool:
        if not pid.isdigit():
            return False
        argv = ["sh", "-c", 'kill -TERM "$1"', "kill", pid]
        try:
            return self._execute(argv, timeout_s=3.0, urgent=True).status == 0
        except RingmasterError:
            return False
