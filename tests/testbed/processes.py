"""Looks at and ends processes of this machine by what only the testbed's own can carry."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

PROC = Path("/proc")
TAG = "RINGMASTER_TESTBED"  # in the environment of every process that holds a testbed's namespaces


@dataclass(frozen=True)
class Process:
    pid: int  # as the host sees it
    outer_pid: int  # as this machine sees it
    state: str  # one letter, as in ps: R S D T Z
    name: str
    args: tuple[str, ...]


def all_pids() -> Iterator[int]:
    return (int(entry) for entry in os.listdir(PROC) if entry.isdigit())


def read_bytes(pid: int, name: str) -> bytes:
    """A file of /proc/PID; empty where the process has ended meanwhile (or is a zombie)."""
    try:
        return (PROC / str(pid) / name).read_bytes()
    except (FileNotFoundError, ProcessLookupError, PermissionError):
        return b""


def stat_fields(pid: int) -> list[str]:
    """/proc/PID/stat from field 3 (state) on; empty where there is no such process."""
    text = read_bytes(pid, "stat").decode(errors="replace")
    return text.rpartition(")")[2].split()


def is_alive(pid: int) -> bool:
    fields = stat_fields(pid)
    return bool(fields) and fields[0] not in "ZX"


def start_ticks(pid: int) -> int | None:
    """When the process started, in clock ticks since boot: with its pid, its identity."""
    fields = stat_fields(pid)
    return int(fields[19]) if fields else None


def pids_with(variable: str, value: str) -> list[int]:
    """Living processes that were started with this environment variable."""
    wanted = f"{variable}={value}".encode()
    return [pid for pid in all_pids() if wanted in read_bytes(pid, "environ").split(b"\0") and is_alive(pid)]


def kill_all_with(variable: str, value: str, *, timeout_s: float = 20.0) -> int:
    """SIGKILL to each of them until none is left; how many there were."""
    killed: set[int] = set()
    deadline = time.monotonic() + timeout_s
    while pids := pids_with(variable, value):
        if time.monotonic() > deadline:
            raise TimeoutError(f"processes {pids} did not end within {timeout_s:g} s of SIGKILL")
        for pid in pids:
            send(pid, signal.SIGKILL)
        killed.update(pids)
        time.sleep(0.005)
    return len(killed)


def send(pid: int, number: int) -> None:
    try:
        os.kill(pid, number)
    except ProcessLookupError:
        return


def wait_gone(pid: int, *, timeout_s: float) -> bool:
    deadline = time.monotonic() + timeout_s
    while is_alive(pid):
        if time.monotonic() > deadline:
            return False
        time.sleep(0.005)
    return True


def pid_namespace(pid: int) -> int | None:
    try:
        return os.stat(PROC / str(pid) / "ns" / "pid").st_ino
    except (
        FileNotFoundError,
        ProcessLookupError,
        PermissionError,
    ):  # a process of no testbed may be shielded
        return None


def in_namespace_of(init: int) -> list[Process]:
    """Every process of the host whose PID 1 is `init`, in the order of the host's own pids."""
    namespace = pid_namespace(init)
    if namespace is None:
        return []
    found = []
    for pid in all_pids():
        if pid_namespace(pid) != namespace:
            continue
        status = read_bytes(pid, "status").decode(errors="replace")
        values = dict(line.split(":", 1) for line in status.splitlines() if ":" in line)
        if "NSpid" not in values:
            continue
        args = read_bytes(pid, "cmdline").decode(errors="replace").rstrip("\0").split("\0")
        found.append(
            Process(
                pid=int(values["NSpid"].split()[-1]),
                outer_pid=pid,
                state=values["State"].split()[0],
                name=values["Name"].strip(),
                args=tuple(args),
            )
        )
    return sorted(found, key=lambda process: process.pid)
