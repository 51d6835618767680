"""Commands on a node over SSH."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

import fabric
import paramiko
from paramiko.common import cMSG_CHANNEL_REQUEST
from paramiko.ssh_exception import ChannelException, SSHException

from provision.cluster import Node
from provision.errors import DeadlineExceeded, NodeUnreachable
from provision.transport.files import FileTransport
from provision.transport.opening import WINDOW_BYTES, soon
from provision.transport.session import Session
from provision.transport.supervisor import start_command

MAX_SESSIONS = 8  # at once on one connection; sshd's MaxSessions is 10 by default
_CHUNK_BYTES = 1 << 18
_OPEN_S = 15.0  # within which a living sshd opens a session


class SSHSession:
    """A `Session` in a channel of an SSH connection."""

    def __init__(self, channel: paramiko.Channel, release: Callable[[], None]) -> None:
        self._channel = channel
        self._release = release
        self._closed = False
        self._lock = threading.Lock()

    def read(self, stream: str) -> bytes:
        receive = self._channel.recv if stream == "stdout" else self._channel.recv_stderr
        data: bytes = receive(_CHUNK_BYTES)
        return data

    def send(self, data: bytes) -> None:
        self._channel.sendall(data)

    def end_input(self) -> None:
        soon(self._channel.shutdown_write)

    def status(self) -> int | None:
        if not self._channel.exit_status_ready():
            return None
        code: int = self._channel.exit_status
        return code if code >= 0 else None

    def gone(self) -> bool:
        return bool(self._channel.closed) or not self._channel.get_transport().is_active()

    def hang_up(self) -> None:
        """Asks sshd for TERM to the shell's process group, which it grants to all but root, and closes."""
        soon(lambda: _send_signal(self._channel, "TERM"))
        self.close()

    def close(self) -> None:
        with self._lock:
            if self._closed:
                return
            self._closed = True
        soon(self._channel.close)
        self._release()


class SSHTransport(FileTransport):
    """A Transport over one SSH connection, opened at once, and once more if it has died between commands."""

    def __init__(self, node: Node, open_connection: Callable[[], fabric.Connection]) -> None:
        super().__init__(node)
        self._open_connection = open_connection
        self._slots = threading.BoundedSemaphore(MAX_SESSIONS)
        self._lock = threading.Lock()
        self._closed = False
        self._connection = open_connection()

    def close(self) -> None:
        self._closed = True
        super().close()
        soon(self._connection.client.close)

    def _start(self, marker: str, timeout_s: float, *, urgent: bool) -> Session:
        if urgent:  # sshd allows a few sessions more than are counted here
            return SSHSession(self._channel(start_command(marker), timeout_s), lambda: None)
        begun = time.monotonic()
        if not self._slots.acquire(timeout=max(0.0, timeout_s)):
            text = f"{MAX_SESSIONS} commands ran there already, and none ended within {timeout_s:g} s"
            raise DeadlineExceeded(self.node.name, text)
        try:
            left_s = max(0.1, timeout_s - (time.monotonic() - begun))
            return SSHSession(self._channel(start_command(marker), left_s), self._slots.release)
        except BaseException:
            self._slots.release()
            raise

    def _channel(self, command: str, timeout_s: float) -> paramiko.Channel:
        connection = self._alive()
        try:
            return _exec(connection, command, timeout_s)
        except (SSHException, EOFError, OSError) as error:
            if isinstance(error, ChannelException):
                text = f"sshd refused another session: {error.text or error}"
                remedy = "check that MaxSessions in its sshd_config is 8 or more and that the user's shell is enabled"
                raise NodeUnreachable(self.node.name, text, remedy=remedy) from error
            if connection.transport.is_active() and (self._running or timeout_s < _OPEN_S):
                # Slow, not dead: other commands may be running over this connection.
                text = f"sshd opened no session within {min(timeout_s, _OPEN_S):g} s"
                raise DeadlineExceeded(self.node.name, text) from error
            soon(connection.client.close)
        connection = self._alive()
        try:
            return _exec(connection, command, timeout_s)
        except (SSHException, EOFError, OSError) as error:
            text = f"the connection was lost before a command could begin: {error or type(error).__name__}"
            raise NodeUnreachable(self.node.name, text, remedy="look at sshd's log there") from error

    def _alive(self) -> fabric.Connection:
        with self._lock:
            transport = self._connection.transport
            if transport is None or not transport.is_active():
                if self._closed:
                    raise NodeUnreachable(self.node.name, "its connection was closed by this program")
                self._connection = self._open_connection()
            return self._connection


def _exec(connection: fabric.Connection, command: str, timeout_s: float) -> paramiko.Channel:
    channel = connection.transport.open_session(window_size=WINDOW_BYTES, timeout=min(timeout_s, _OPEN_S))
    try:
        channel.exec_command(command)
    except BaseException:
        soon(channel.close)
        raise
    return channel


def _send_signal(channel: paramiko.Channel, name: str) -> None:
    """The `signal` request of RFC 4254, section 6.9, for which paramiko has no method."""
    request = paramiko.Message()
    request.add_byte(cMSG_CHANNEL_REQUEST)
    request.add_int(channel.remote_chanid)
    request.add_string("signal")
    request.add_boolean(False)
    request.add_string(name)
    channel.get_transport()._send_user_message(request)
