"""One host of a testbed: run commands in it, look at it, and make it fail."""

from __future__ import annotations

import itertools
import os
import signal
import subprocess
import time
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from provision.errors import CommandFailed, DeadlineExceeded
from tests.testbed import net, processes, shaping
from tests.testbed.launch import NODE_PATH
from tests.testbed.processes import Process
from tests.testbed.spec import Interface, NodeSpec, TestbedError, with_interface

if TYPE_CHECKING:
    from tests.testbed.bed import Testbed

EXEC_MARK = "RINGMASTER_TESTBED_EXEC"
SYSTEM_PROCESSES = ("sshd", "sshd-session", "sshd-auth")


@dataclass(frozen=True)
class ExecResult:
    argv: tuple[str, ...]
    status: int
    stdout: str
    stderr: str
    duration_s: float


class TestbedNode:
    """A handle by name; it stays valid over `kill` and `restart`."""

    __test__ = False

    def __init__(self, bed: Testbed, name: str) -> None:
        self.bed = bed
        self.name = name

    def __repr__(self) -> str:
        return f"<TestbedNode {self.name} {self.address}>"

    @property
    def spec(self) -> NodeSpec:
        return self.bed.state.nodes[self.name].spec

    @property
    def index(self) -> int:
        return self.bed.state.nodes[self.name].index

    @property
    def address(self) -> str:
        return self.bed.address_of(self.bed.state.nodes[self.name])

    @property
    def pid(self) -> int:
        """The host's PID 1 as this machine sees it. Raises: TestbedError where the host is not running."""
        pid = self.bed.state.nodes[self.name].pid
        if pid is None or not processes.is_alive(pid):
            raise TestbedError(f"{self.name} is not running", remedy="restart it")
        return pid

    def is_running(self) -> bool:
        pid = self.bed.state.nodes[self.name].pid
        return pid is not None and processes.is_alive(pid)

    # -- commands ------------------------------------------------------------------------------------------

    def home(self, user: str = "root") -> str:
        return "/root" if user == "root" else f"/home/{user}"

    def argv(
        self,
        argv: Sequence[str],
        *,
        user: str = "root",
        env: Mapping[str, str] | None = None,
        cwd: str | None = None,
    ) -> list[str]:
        """The command for this machine that runs `argv` in the host as `user`, in a clean environment."""
        home = self.home(user)
        variables = {"PATH": NODE_PATH, "HOME": home, "USER": user, "LOGNAME": user, "LANG": "C.UTF-8"}
        settings = [f"{key}={value}" for key, value in {**variables, **(env or {})}.items()]
        namespaces = ["--mount", "--uts", "--ipc", "--net", "--pid"]
        become = (
            [] if user == "root" else ["setpriv", f"--reuid={user}", f"--regid={user}", "--init-groups", "--"]
        )
        return [
            *("nsenter", "--target", str(self.pid), *namespaces, "--"),
            *("env", "-i", "-C", cwd or home, *settings, *become, *argv),
        ]

    def exec(
        self,
        argv: Sequence[str],
        *,
        timeout_s: float = 60.0,
        user: str = "root",
        env: Mapping[str, str] | None = None,
        cwd: str | None = None,
        stdin: bytes | None = None,
        check: bool = True,
    ) -> ExecResult:
        """Runs `argv` in the host, not over SSH: works on a cut-off host too.

        Raises: DeadlineExceeded after `timeout_s` (everything the command started is killed), CommandFailed
        for a status other than 0 unless `check` is false.
        """
        mark = uuid.uuid4().hex
        full = self.argv(argv, user=user, env={**(env or {}), EXEC_MARK: mark}, cwd=cwd)
        began = time.monotonic()
        process = subprocess.Popen(
            full,
            stdin=subprocess.DEVNULL if stdin is None else subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            start_new_session=True,
        )
        try:
            out, err = process.communicate(stdin, timeout=timeout_s)
        except BaseException as error:
            os.killpg(process.pid, signal.SIGKILL)
            processes.kill_all_with(EXEC_MARK, mark)
            process.communicate()
            if isinstance(error, subprocess.TimeoutExpired):
                raise DeadlineExceeded(
                    self.name, f"`{' '.join(argv[:6])}` did not end within {timeout_s:g} s"
                ) from error
            raise
        result = ExecResult(
            argv=tuple(argv),
            status=process.returncode,
            stdout=out.decode(errors="replace"),
            stderr=err.decode(errors="replace"),
            duration_s=time.monotonic() - began,
        )
        if check and result.status != 0:
            raise CommandFailed(self.name, argv, result.status, result.stdout, result.stderr)
        return result

    def popen(self, argv: Sequence[str], *, user: str = "root", **options: object) -> subprocess.Popen[bytes]:
        """Starts `argv` in the host and does not wait; `options` go to subprocess.Popen."""
        return subprocess.Popen(self.argv(argv, user=user), **options)  # type: ignore[call-overload,no-any-return]

    def write(self, path: str, data: str | bytes, *, mode: int = 0o644, user: str = "root") -> None:
        raw = data.encode() if isinstance(data, str) else data
        script = 'mkdir -p "$(dirname "$1")" && cat >"$1" && chmod "$2" "$1"'
        self.exec(["sh", "-c", script, "write", path, f"{mode:o}"], stdin=raw, user=user)

    def read(self, path: str) -> str:
        return self.exec(["cat", path]).stdout

    # -- looking -------------------------------------------------------------------------------------------

    def processes(self) -> list[Process]:
        """All processes of the host, its init first; empty where it is not running."""
        pid = self.bed.state.nodes[self.name].pid
        return processes.in_namespace_of(pid) if pid is not None and processes.is_alive(pid) else []

    def workload(self) -> list[Process]:
        """What runs besides init and sshd: empty on an idle host. A process that init has yet to reap runs no more."""
        found = (p for p in self.processes() if p.pid != 1 and p.name not in SYSTEM_PROCESSES)
        return [p for p in found if p.state != "Z"]

    # -- faults --------------------------------------------------------------------------------------------

    def cut(self, *, port: int | None = None, peers: Sequence[str] = ()) -> None:
        """Silently drops all traffic of the host; or TCP `port` inwards; or all with hosts `peers`.

        A later call replaces the former rules. Undone by `restore`.
        """
        net.cut(self.pid, port, [self.bed.node(peer).address for peer in peers])

    def slow(self, *, delay_ms: float = 0, rate_mbit: float | None = None, loss_percent: float = 0) -> None:
        """Delays, limits or loses packets, in each direction; a round trip takes 2 x `delay_ms` longer.

        A later call replaces the former. Undone by `restore`, and by the host's end.
        """
        shaping.slow(
            self.bed.place.tag,
            self.bed.switch,
            self.index,
            self.bed.place.node_dir(self.name) / "slow.log",
            delay_ms=delay_ms,
            rate_mbit=rate_mbit,
            loss_percent=loss_percent,
        )

    def restore(self) -> None:
        """Undoes `cut`, `slow` and `pause`."""
        self.resume()
        net.uncut(self.pid)
        shaping.unslow(self.bed.place.tag, self.bed.switch, self.index)

    def pause(self) -> None:
        """Stops every process of the host, its init too; the kernel still answers TCP handshakes."""
        self.pid  # noqa: B018 - raises where the host is not running
        deadline = time.monotonic() + 10
        # Again until all stand still: one that is being forked now is found in the next round.
        for attempt in itertools.count(1):
            moving = [p for p in self.processes() if p.state not in "TtZX"]
            if not moving:
                break
            if time.monotonic() > deadline:
                raise TestbedError(f"{self.name}: {[p.args for p in moving]} did not stop within 10 s")
            if attempt % 10 == 0:
                # A shell that used vfork cannot stop before its child has called exec: not while that one is stopped.
                self.resume()
            for process in moving:
                processes.send(process.outer_pid, signal.SIGSTOP)
            time.sleep(0.005)

    def resume(self) -> None:
        for process in self.processes():
            processes.send(process.outer_pid, signal.SIGCONT)

    def kill(self) -> None:
        """Ends the host as a power cut would: all its processes die at once; its disk stays."""
        self.bed.kill_node(self.name)

    def restart(self) -> None:
        """Kills the host if it runs, and starts it again on the same disk, address and host key."""
        if self.is_running():
            self.kill()
        self.bed.start_nodes([self.name])

    def stop_sshd(self) -> None:
        """Ends the listening sshd (connections refused); sessions stay."""
        self.exec(["sh", "-c", 'kill "$(cat /run/sshd.pid)"'])

    def start_sshd(self) -> None:
        self.exec(["/usr/sbin/sshd", "-E", "/var/log/sshd.log"])
        self.bed.wait_for_ssh([self.name])

    def add_interface(
        self, name: str, cidr: str | None = None, *, kind: str = "bridge", network: str | None = None
    ) -> None:
        """Adds a network card that also comes back after a restart.

        `bridge`: private to the host, no carrier, as docker0 or virbr0. `veth`: a cable to the testbed's
        switch; hosts that name the same `network` reach each other over it, without one nobody does.
        """
        if kind not in ("bridge", "veth"):
            raise TestbedError(f"{self.name}: interface kind {kind!r} is unknown, expected bridge or veth")
        interface = Interface(name, cidr, kind, network)
        net.add_interface(self.bed.switch, self.index, self.pid, interface)
        self.bed.update_spec(with_interface(self.spec, interface))
