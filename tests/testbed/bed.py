"""The testbed: makes its hosts, keeps its state on disk, and clears everything away."""

from __future__ import annotations

import ipaddress
import signal
import socket
import time
import uuid
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from types import TracebackType
from typing import Any

from provision.errors import UsageError
from tests.testbed import bare, files, net, preconditions, processes, shaping, state
from tests.testbed.launcher import Launcher
from tests.testbed.node import TestbedNode
from tests.testbed.spec import Nodes, NodeSpec, TestbedError, node_specs
from tests.testbed.state import NodeState, Place, State

HIDDEN = (("/root", 0o700), ("/home", 0o755), ("/tmp", 0o1777), ("/var/tmp", 0o1777), ("/run", 0o755))


class Testbed:
    """Hosts on this machine. As a context manager it is up inside the block and gone after it.

        with Testbed(3, name="lab") as bed:
            bed.node("h1").exec(["hostname"])

    `nodes`: a number (h1, h2, ...), names, or NodeSpecs; the other host options (`kind`, `users`, `port`,
    `binds`, `login`, `base`) are defaults for those that are not NodeSpecs.
    """

    __test__ = False

    def __init__(
        self,
        nodes: Nodes,
        *,
        name: str = "default",
        state_root: Path = state.DEFAULT_ROOT,
        **defaults: Any,
    ) -> None:
        self.specs = node_specs(nodes, **defaults)
        self.place = Place(Path(state_root), name)
        self._state: State | None = None

    @classmethod
    def attach(cls, name: str = "default", *, state_root: Path = state.DEFAULT_ROOT) -> Testbed:
        """A handle on a testbed that is up. Raises: TestbedError where there is none of this name."""
        place = Place(Path(state_root), name)
        known = place.load()
        if known is None or not known.nodes:
            raise TestbedError(f"no testbed {name!r} under {state_root}", remedy="take one up first")
        bed = cls([node.spec for node in known.nodes.values()], name=name, state_root=state_root)
        bed._state = known
        return bed

    def __enter__(self) -> Testbed:
        return self.up()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.down()

    # -- state ---------------------------------------------------------------------------------------------

    @property
    def state(self) -> State:
        if self._state is None:
            raise TestbedError(f"testbed {self.place.name} is not up")
        return self._state

    @property
    def name(self) -> str:
        return self.place.name

    @property
    def directory(self) -> Path:
        return self.place.directory

    @property
    def ssh_config(self) -> Path:
        """For `ssh -F` and `fab --ssh-config`: every host with user, port, key and pinned host key."""
        return self.place.ssh_config

    @property
    def private_key(self) -> Path:
        return self.directory / files.KEY_NAME

    @property
    def known_hosts(self) -> Path:
        return self.directory / files.KNOWN_HOSTS_NAME

    @property
    def subnet(self) -> ipaddress.IPv4Network:
        return ipaddress.IPv4Network(self.state.subnet)

    @property
    def machine_address(self) -> str:
        """This machine's address in the testbed's network."""
        return str(self.subnet[1])

    @property
    def switch(self) -> int:
        switch = self.state.switch
        if switch is None or not processes.is_alive(switch):
            raise TestbedError(
                f"testbed {self.name}: its switch is not running", remedy="take it down and up"
            )
        return switch

    @property
    def names(self) -> list[str]:
        return list(self.state.nodes)

    def node(self, name: str) -> TestbedNode:
        if name not in self.state.nodes:
            raise UsageError(f"testbed {self.name} has no host {name!r}, only {', '.join(self.names)}")
        return TestbedNode(self, name)

    def nodes(self) -> list[TestbedNode]:
        return [TestbedNode(self, name) for name in self.names]

    def address_of(self, node: NodeState) -> str:
        return str(self.subnet[node.offset])

    def hosts_text(self) -> str:
        return files.hosts_text({name: self.address_of(node) for name, node in self.state.nodes.items()})

    def _save(self, changed: State) -> None:
        self.place.save(changed)
        self._state = changed

    def update_spec(self, spec: NodeSpec) -> None:
        self._save(self.state.with_node(replace(self.state.nodes[spec.name], spec=spec)))

    # -- life ----------------------------------------------------------------------------------------------

    def up(self) -> Testbed:
        """Makes the hosts and waits until their sshd answer. If it fails, nothing is left behind."""
        preconditions.check(frozenset(spec.kind for spec in self.specs))
        # Before anything is claimed: it may take a minute.
        if any(spec.kind == "bare" for spec in self.specs):
            bare.ensure_root()
        self._state = state.claim(self.place)
        try:
            files.make_key(self.private_key)
            self._add_states(self.specs)
            self.start_nodes(self.names)
        except BaseException:
            self.down()
            raise
        return self

    def down(self) -> bool:
        """Removes everything of this testbed; whether there was anything."""
        with state.global_lock():
            found = state.clear(self.place)
        self._state = None
        return found

    def detach(self) -> None:
        """The testbed outlives this process and counts as up until `down`."""
        self._save(replace(self.state, owner=None))

    def add(self, nodes: Sequence[str | NodeSpec], **defaults: Any) -> None:
        """More hosts for a testbed that is up; the others learn their names."""
        specs = node_specs(nodes, **defaults)
        known = sorted(spec.name for spec in specs if spec.name in self.state.nodes)
        if known:
            raise UsageError(f"testbed {self.name} already has hosts {known}")
        self._add_states(specs)
        self.start_nodes([spec.name for spec in specs])
        for node in self.nodes():
            if node.is_running():
                node.write("/etc/hosts", self.hosts_text())

    def _add_states(self, specs: Sequence[NodeSpec]) -> None:
        changed = self.state
        for number, spec in enumerate(specs, start=len(changed.nodes) + 1):
            if number > net.MAX_INDEX:
                raise UsageError(f"a testbed holds at most {net.MAX_INDEX} hosts")
            changed = changed.with_node(NodeState(spec, number))
        self._save(changed)

    def freeze(self, name: str, *, to: Path | None = None) -> str:
        """Turns all that host `name` has written into a read-only layer, for `base=` of other hosts.

        The host restarts on top of it. The layer lies in the testbed's directory and goes with it,
        unless `to` (on the same file system) is given: then it is the caller's to remove.
        """
        spec = self.state.nodes[name].spec
        if spec.base is not None:
            raise TestbedError(f"{name} already stands on a layer ({spec.base}), expected a host without one")
        layer = to or self.directory / "layers" / f"{name}-{self.state.frozen + 1}"
        if layer.exists():
            raise TestbedError(f"layer {layer} already exists", remedy="remove it or choose another path")
        layer.parent.mkdir(parents=True, exist_ok=True)
        node = self.node(name)
        if node.is_running():
            node.kill()
        (self.place.node_dir(name) / "upper").rename(layer)
        self._save(replace(self.state, frozen=self.state.frozen + 1))
        self.update_spec(replace(spec, base=str(layer)))
        self.start_nodes([name])
        return str(layer)

    # -- starting and ending hosts -------------------------------------------------------------------------

    def start_nodes(self, names: Sequence[str]) -> None:
        """Starts these hosts in parallel and waits for their sshd."""
        chosen = [self.state.nodes[name] for name in names]
        needs_switch = self.state.switch is None or not processes.is_alive(self.state.switch)
        plan = {"switch": needs_switch, "nodes": [self._launch_plan(node) for node in chosen]}
        with (
            open(self.directory / "launch.log", "ab") as log,
            Launcher(plan, self.place.tag, log) as launcher,
        ):
            pids = launcher.pids()
            if needs_switch:
                self._save(replace(self.state, switch=pids["switch"]))
                net.start_switch(self.place.link, self.switch)
            cards = [(node.index, pids["nodes"][node.spec.name]) for node in chosen]
            for index, _ in cards:
                if not needs_switch:  # a restart: the former life's end of the cable may still be there
                    shaping.unslow(self.place.tag, self.switch, index)
                    net.unplug(self.switch, index)
            net.plug_in(self.switch, [card for card in cards if card[1]], tag=self.place.tag)
            errors = launcher.go()
        if errors:
            text = "\n".join(f"  {name}: {error}" for name, error in errors.items())
            raise TestbedError(f"{len(errors)} of {len(chosen)} hosts did not start\n{text}")
        changed = self.state
        for node in chosen:
            changed = changed.with_node(replace(node, pid=pids["nodes"][node.spec.name]))
        self._save(changed)
        for node in chosen:
            for interface in node.spec.interfaces:
                net.add_interface(self.switch, node.index, self.node(node.spec.name).pid, interface)
        files.write_ssh_files(self.place, self.state, self.address_of)
        self.wait_for_ssh(names)

    def kill_node(self, name: str) -> None:
        node = self.state.nodes[name]
        if node.pid is not None and processes.is_alive(node.pid):
            processes.send(node.pid, signal.SIGKILL)
            if not processes.wait_gone(node.pid, timeout_s=20):
                raise TestbedError(f"{name}: init {node.pid} did not end within 20 s of SIGKILL")
        shaping.unslow(self.place.tag, self.switch, node.index)
        net.unplug(self.switch, node.index)
        self._save(self.state.with_node(replace(node, pid=None)))

    def wait_for_ssh(self, names: Sequence[str], *, timeout_s: float = 20.0) -> None:
        """Until the sshd of each has sent its greeting. Raises: TestbedError naming those that have not."""
        deadline = time.monotonic() + timeout_s
        waiting = list(names)
        while waiting:
            waiting = [name for name in waiting if not self._greets(name)]
            if waiting and time.monotonic() > deadline:
                logs = {
                    name: self.node(name).exec(["cat", "/var/log/sshd.log"], check=False) for name in waiting
                }
                text = "\n".join(f"  {name}: {result.stdout.strip()}" for name, result in logs.items())
                raise TestbedError(f"sshd did not answer within {timeout_s:g} s on {waiting}\n{text}")

    def _greets(self, name: str) -> bool:
        node = self.state.nodes[name]
        try:
            with socket.create_connection((self.address_of(node), node.spec.port), timeout=1) as connection:
                return connection.recv(4) == b"SSH-"
        except OSError:
            time.sleep(0.02)
            return False

    def _launch_plan(self, node: NodeState) -> dict[str, Any]:
        spec, folder = node.spec, self.place.node_dir(node.spec.name)
        folder.mkdir(parents=True, exist_ok=True)
        hidden = list(HIDDEN) if spec.base is None else []
        if not any(self.place.root.is_relative_to(path) for path, _ in HIDDEN):
            hidden.append((str(self.place.root), 0o700))  # no host sees the others' layers and the key
        return {
            "name": spec.name,
            "lower": str(bare.ensure_root()) if spec.kind == "bare" else "/",
            "base": spec.base,
            "base_work": str(folder / "base_work"),
            "base_root": str(folder / "base_root"),
            "upper": str(folder / "upper"),
            "work": str(folder / "work"),
            "root": str(folder / "root"),
            "hidden": hidden,
            "binds": [[bind.source, bind.target, bind.readonly] for bind in spec.binds],
            "users": spec.users,
            "cidr": f"{self.address_of(node)}/{self.subnet.prefixlen}",
            "hosts": self.hosts_text(),
            "machine_id": uuid.uuid5(uuid.NAMESPACE_OID, f"{self.place.tag}/{spec.name}").hex,
            "sshd_config": files.sshd_config(spec.port),
            "authorized_keys": self.private_key.with_suffix(".pub").read_text(),
            "host_key_path": str(folder / files.HOST_KEY_NAME),
            "log": str(folder / "launch.log"),
            "environment": {processes.TAG: self.place.tag},
        }
