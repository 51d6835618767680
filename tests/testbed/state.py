"""A testbed on disk: what `down` needs to clear it away, whoever made it and however that process ended."""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import os
import re
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from provision.errors import UsageError
from tests.testbed import net, processes
from tests.testbed.spec import NodeSpec, TestbedError

SCHEMA = 1
DEFAULT_ROOT = Path("/var/tmp/ringmaster-testbed")
NAME = re.compile(r"[a-zA-Z0-9][a-zA-Z0-9_-]{0,40}", re.ASCII)
# A directory that always exists: its lock serialises the choice of address ranges and leaves no file.
GLOBAL_LOCK = Path("/run")


@dataclass(frozen=True)
class Owner:
    """The process whose end makes the testbed a leftover; None in State means that it outlives its maker."""

    pid: int
    start_ticks: int

    @classmethod
    def me(cls) -> Owner:
        pid = os.getpid()
        ticks = processes.start_ticks(pid)
        assert ticks is not None, "this process has a /proc entry"
        return cls(pid, ticks)

    def is_alive(self) -> bool:
        return processes.is_alive(self.pid) and processes.start_ticks(self.pid) == self.start_ticks


@dataclass(frozen=True)
class NodeState:
    spec: NodeSpec
    index: int  # 1, 2, ...: its port on the switch, and its address
    pid: int | None = None  # of its init, as this machine sees it; None: not running

    @property
    def offset(self) -> int:
        return net.FIRST_HOST - 1 + self.index


@dataclass(frozen=True)
class State:
    name: str
    tag: str
    link: str
    subnet: str
    owner: Owner | None
    switch: int | None = None
    nodes: dict[str, NodeState] = field(default_factory=dict)
    frozen: int = 0  # layers made so far

    def with_node(self, node: NodeState) -> State:
        return replace(self, nodes={**self.nodes, node.spec.name: node})

    def to_json(self) -> dict[str, Any]:
        return {
            "schema": SCHEMA,
            "name": self.name,
            "tag": self.tag,
            "link": self.link,
            "subnet": self.subnet,
            "owner": None if self.owner is None else vars(self.owner),
            "switch": self.switch,
            "frozen": self.frozen,
            "nodes": [
                {"spec": node.spec.to_json(), "index": node.index, "pid": node.pid}
                for node in self.nodes.values()
            ],
        }

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> State:
        nodes = [NodeState(NodeSpec.from_json(n["spec"]), n["index"], n["pid"]) for n in data["nodes"]]
        return cls(
            name=data["name"],
            tag=data["tag"],
            link=data["link"],
            subnet=data["subnet"],
            owner=None if data["owner"] is None else Owner(**data["owner"]),
            switch=data["switch"],
            frozen=data["frozen"],
            nodes={node.spec.name: node for node in nodes},
        )


@dataclass(frozen=True)
class Place:
    """Where one testbed lies. Tag and interface follow from it, so cleaning needs no file to be intact."""

    root: Path
    name: str

    def __post_init__(self) -> None:
        if not NAME.fullmatch(self.name):
            raise UsageError(f"testbed name {self.name!r} cannot be used, expected letters, digits, - and _")
        if re.search(r"[,:\\\s]", str(self.root)) or not self.root.is_absolute():
            raise UsageError(
                f"state directory {str(self.root)!r} cannot be used, "
                "expected an absolute path without comma, colon, backslash or blank (overlayfs options)"
            )

    @property
    def directory(self) -> Path:
        return self.root / self.name

    @property
    def digest(self) -> str:
        return hashlib.sha256(str(self.directory).encode()).hexdigest()[:8]

    @property
    def tag(self) -> str:
        return f"{self.name}-{self.digest}"

    @property
    def link(self) -> str:
        return f"rt{self.digest}"

    @property
    def state_file(self) -> Path:
        return self.directory / "testbed.json"

    @property
    def ssh_config(self) -> Path:
        return self.directory / "ssh_config"

    def node_dir(self, node: str) -> Path:
        return self.directory / "nodes" / node

    def load(self) -> State | None:
        """None where there is no testbed, or a file of it that was never finished."""
        try:
            data = json.loads(self.state_file.read_text())
        except (FileNotFoundError, json.JSONDecodeError):
            return None
        if data.get("schema") != SCHEMA:
            raise TestbedError(
                f"{self.state_file} has schema {data.get('schema')!r}, expected {SCHEMA}",
                remedy="take the testbed down with the version that made it",
            )
        return State.from_json(data)

    def save(self, state: State) -> None:
        write_file(self.state_file, json.dumps(state.to_json(), indent=1) + "\n", 0o600)


def write_file(path: Path, text: str, mode: int) -> None:
    temporary = path.with_name(path.name + ".new")
    descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, mode)
    with open(descriptor, "w") as file:
        file.write(text)
    os.replace(temporary, path)


@contextlib.contextmanager
def global_lock() -> Iterator[int]:
    """Only one testbed of this machine chooses its range, or is cleared away, at a time."""
    descriptor = os.open(GLOBAL_LOCK, os.O_RDONLY | os.O_DIRECTORY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield descriptor
    finally:
        os.close(descriptor)


def is_running(place: Place) -> bool:
    return bool(processes.pids_with(processes.TAG, place.tag))


def clear(place: Place) -> bool:
    """Ends and removes everything of this testbed; whether there was anything."""
    found = net.delete_link(place.link)
    found |= processes.kill_all_with(processes.TAG, place.tag) > 0
    if place.directory.exists():
        found = True
        # No mount of the hosts is left (they went with their namespaces); stay on this disk all the same.
        done = subprocess.run(
            ["rm", "-rf", "--one-file-system", "--", str(place.directory)], capture_output=True, text=True
        )
        if done.returncode != 0:
            raise TestbedError(f"{place.directory} could not be removed: {done.stderr.strip()}")
    with contextlib.suppress(OSError):  # other testbeds lie there, or it is gone
        place.root.rmdir()
    return found


def clear_dead(root: Path) -> None:
    """Clears every testbed whose maker ended without taking it down (those that outlive it are not dead)."""
    for directory in sorted(root.iterdir()) if root.is_dir() else []:
        dead = Place(root, directory.name)
        known = dead.load()
        if known is not None and known.owner is not None and not known.owner.is_alive():
            clear(dead)


def claim(place: Place) -> State:
    """Reserves name, directory, interface and address range; clears a dead testbed of the same name first.

    Raises: TestbedError where a living one has the name.
    """
    with global_lock() as lock:
        known = place.load()
        if known is not None and known.owner is not None and known.owner.is_alive():
            raise TestbedError(
                f"testbed {place.name} belongs to process {known.owner.pid}, which is alive",
                remedy="choose another name",
            )
        if known is not None and known.owner is None and is_running(place):
            raise TestbedError(
                f"testbed {place.name} is already up",
                remedy=f"take it down first, or choose another name ({place.directory})",
            )
        clear(place)
        clear_dead(place.root)
        place.directory.mkdir(mode=0o700, parents=True)
        subnet = net.free_range(place.tag, net.used_ranges())
        state = State(place.name, place.tag, place.link, str(subnet), Owner.me())
        place.save(state)
        net.make_link(place.link, f"{subnet[1]}/{subnet.prefixlen}", lock=lock)
    return state
