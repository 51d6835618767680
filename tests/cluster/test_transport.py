"""The SSH transport against real sshds: the contract, and everything that can be wrong with a host."""

from __future__ import annotations

import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from provision.cluster import Node
from provision.errors import (
    CommandFailed,
    DeadlineExceeded,
    HostKeyChanged,
    NodeError,
    NodeUnreachable,
    PreconditionError,
)
from provision.fanout import fan_out
from provision.sshconfig import load_ssh_config
from provision.transport import Connections, Transport
from provision.transport.supervisor import SILENCE_S
from tests.testbed import Testbed
from tests.transport_contract import ROOT, TransportContract, eventually, still_there

pytestmark = pytest.mark.cluster

CONNECT_TIMEOUT_S = 4.0
SLACK_S = 4.0  # for a machine that is busy with other work

# Every shell that a user may have as login shell, as far as this machine has it.
SHELLS = [
    shell
    for shell in ("bash", "dash", "zsh", "ksh", "mksh", "fish", "tcsh", "csh")
    if Path("/bin", shell).exists() or Path("/usr/bin", shell).exists()
]


@pytest.fixture(scope="module")
def bed(make_testbed: Callable[..., Testbed]) -> Iterator[Testbed]:
    bed = make_testbed(3, users=("alice",))
    yield bed
    bed.down()


@pytest.fixture(autouse=True)
def own_home(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Nothing of the tester's own keys and SSH settings takes part."""
    home = tmp_path_factory.mktemp("home")
    monkeypatch.setenv("HOME", str(home))
    monkeypatch.delenv("SSH_AUTH_SOCK", raising=False)
    return home


@pytest.fixture
def known_hosts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("state") / "known_hosts"


@pytest.fixture
def connections(known_hosts: Path) -> Iterator[Connections]:
    with Connections(known_hosts, connect_timeout_s=CONNECT_TIMEOUT_S) as connections:
        yield connections


def node_of(bed: Testbed, called: str, **fields: Any) -> Node:
    key = (str(bed.private_key),)
    return Node(
        **{"name": called, "host": bed.node(called).address, "user": "root", "identity_files": key, **fields}
    )


@pytest.fixture
def transport(bed: Testbed, connections: Connections) -> Transport:
    return connections.to(node_of(bed, "h1"))


class TestSSH(TransportContract):
    pass


class TestContractBehindChattyLoginFiles(TransportContract):
    """The same promises where bash prints to both streams before every command."""

    @pytest.fixture(autouse=True)
    def chatty(self, bed: Testbed) -> Iterator[None]:
        text = "echo 'Welcome to h1!'; printf 'no newline'; echo 'module: warning' >&2\n"
        with login_file(bed, "h1", text):
            yield


class login_file:
    """Puts `text` in front of root's ~/.bashrc on a host for the length of a block."""

    def __init__(self, bed: Testbed, name: str, text: str) -> None:
        self._node = bed.node(name)
        self._text = text

    def __enter__(self) -> None:
        self._node.write("/root/.bashrc", self._text)

    def __exit__(self, *_: object) -> None:
        self._node.exec(["rm", "-f", "/root/.bashrc"])


def timed_error(connections: Connections, node: Node, kind: type[NodeError]) -> tuple[str, float]:
    begun = time.monotonic()
    with pytest.raises(kind) as caught:
        connections.to(node)
    assert caught.value.node == node.name
    assert str(caught.value).startswith(f"{node.name}: ")
    assert caught.value.remedy
    return str(caught.value), time.monotonic() - begun


# -- login files and shells --------------------------------------------------------------------------------


def test_noise_is_kept_apart(bed: Testbed, transport: Transport) -> None:
    text = "echo 'Welcome!'; printf 'no newline'; echo 'module: warning' >&2\n"
    with login_file(bed, "h1", text):
        lines: list[tuple[str, str]] = []
        result = transport.run(["echo", "x"], timeout_s=20, on_line=lambda *line: lines.append(line))
    assert (result.stdout, result.stderr, lines) == ("x\n", "", [("stdout", "x")])
    assert "Welcome!\nno newline" in result.noise
    assert "module: warning" in result.noise
    assert transport.run(["echo", "x"], timeout_s=20).noise == ""


def test_bash_scripts_do_not_read_login_files_again(bed: Testbed, transport: Transport) -> None:
    with login_file(bed, "h1", "echo noise\n"):
        assert transport.run(["bash", "-c", "echo x"], timeout_s=20).stdout == "x\n"
        assert transport.run(["bash", "-c", "exec bash -c 'echo x'"], timeout_s=20).stdout == "x\n"


def test_login_files_that_hang(bed: Testbed, transport: Transport) -> None:
    with login_file(bed, "h1", "echo 'Enter token:'; sleep 300\n"):
        begun = time.monotonic()
        with pytest.raises(DeadlineExceeded, match=r"did not get past its login files") as caught:
            transport.run(["true"], timeout_s=2)
        assert time.monotonic() - begun < 20
        assert "Enter token:" in str(caught.value)


def test_login_files_that_hang_are_found_before_the_deadline_and_the_shell_is_ended(
    bed: Testbed, connections: Connections, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("provision.transport.session.LOGIN_FILES_S", 2.0)
    host, alice = bed.node("h2"), node_of(bed, "h2", name="a2", user="alice")
    host.write("/home/alice/.bashrc", "sleep 1009\n")
    try:
        begun = time.monotonic()
        outcomes = fan_out(
            [alice],
            lambda node: connections.to(node).run(["true"], timeout_s=60),
            deadline_s=60,
            what="asking",
        )
        assert time.monotonic() - begun < 20
        text = str(outcomes["a2"].error)
        assert text.startswith("a2: no command could begin within 2 s: ")
        assert "look at ~/.bashrc and ~/.profile of alice there" in text
        assert eventually(lambda: not [p for p in host.workload() if "1009" in p.args])
        outcomes = fan_out(
            [alice],
            lambda node: connections.to(node).run(["true"], timeout_s=60),
            deadline_s=1,
            what="asking",
        )
        text = str(outcomes["a2"].error)
        assert "asking did not end within 1 s: the login shell had not got past its login files; look" in text
    finally:
        host.exec(["rm", "-f", "/home/alice/.bashrc"])


def test_login_files_that_exit(bed: Testbed, transport: Transport) -> None:
    with (
        login_file(bed, "h1", "echo 'use the other host' >&2; exit 3\n"),
        pytest.raises(NodeUnreachable, match=r"ended with status 3 before a command could begin") as caught,
    ):
        transport.run(["true"], timeout_s=20)
    assert "use the other host" in str(caught.value)
    assert "look for an `exit` in ~/.bashrc and ~/.profile of root there" in str(caught.value)


@pytest.mark.parametrize("shell", SHELLS)
def test_login_shells(bed: Testbed, connections: Connections, shell: str) -> None:
    bed.node("h2").exec(["usermod", "-s", f"/bin/{shell}", "alice"])
    transport = connections.to(node_of(bed, "h2", name="a2", user="alice"))
    words = ["it's", "a\nb", "!x", "$HOME", "\\n", "~", "*"]
    result = transport.run(["printf", "%s\\0", *words], env={"X": "'!"}, cwd="$HOME", timeout_s=20)
    assert result.stdout.split("\0")[:-1] == words
    assert transport.run(["sha256sum"], stdin=b"abc", timeout_s=20).stdout.startswith("ba7816bf")
    assert transport.run(["sh", "-c", "exit 5"], timeout_s=20, check=False).status == 5


def test_an_account_without_a_shell(bed: Testbed, connections: Connections) -> None:
    bed.node("h2").exec(["usermod", "-s", "/usr/sbin/nologin", "alice"])
    transport = connections.to(node_of(bed, "h2", name="a2", user="alice"))
    with pytest.raises(NodeUnreachable, match=r"ended with status 1 .*\n.*not available"):
        transport.run(["true"], timeout_s=20)
    bed.node("h2").exec(["usermod", "-s", "/bin/bash", "alice"])


# -- keys --------------------------------------------------------------------------------------------------


def test_a_host_key_is_pinned_once_and_reported(bed: Testbed, known_hosts: Path) -> None:
    heard: list[str] = []
    for _ in range(2):
        with Connections(
            known_hosts, connect_timeout_s=CONNECT_TIMEOUT_S, on_pin=heard.append
        ) as connections:
            connections.to(node_of(bed, "h1"))
    address = bed.node("h1").address
    fingerprint = (
        bed.node("h1").exec(["ssh-keygen", "-lf", "/etc/ssh/ssh_host_ed25519_key.pub"]).stdout.split()[1]
    )
    assert heard == [f"pinned host key of h1 ({address}): ssh-ed25519 {fingerprint}"]
    key = bed.node("h1").read("/etc/ssh/ssh_host_ed25519_key.pub").split()[:2]
    assert known_hosts.read_text() == f"{address} {' '.join(key)}\n"
    assert known_hosts.stat().st_mode & 0o777 == 0o600


def test_many_hosts_are_pinned_at_once(bed: Testbed, connections: Connections, known_hosts: Path) -> None:
    nodes = [node_of(bed, name) for name in bed.names]
    outcomes = fan_out(nodes, connections.to, deadline_s=20, what="connect")
    assert all(outcome.ok for outcome in outcomes.values())
    assert len(known_hosts.read_text().splitlines()) == len(connections.pinned) == 3


def test_a_changed_host_key_is_never_accepted(bed: Testbed, known_hosts: Path) -> None:
    host = bed.node("h3")
    with Connections(known_hosts, connect_timeout_s=CONNECT_TIMEOUT_S) as before:
        before.to(node_of(bed, "h3"))
    host.exec(["cp", "-a", "/etc/ssh/ssh_host_ed25519_key", "/root/kept"])
    host.exec(
        [
            "sh",
            "-c",
            "rm /etc/ssh/ssh_host_ed25519_key; ssh-keygen -q -t ed25519 -N '' -f /etc/ssh/ssh_host_ed25519_key",
        ]
    )
    host.stop_sshd()
    host.start_sshd()
    try:
        with Connections(known_hosts, connect_timeout_s=CONNECT_TIMEOUT_S) as connections:
            text, took = timed_error(connections, node_of(bed, "h3"), HostKeyChanged)
        assert "has changed: got ssh-ed25519 SHA256:" in text
        assert f"({known_hosts}:1)" in text
        assert f"ssh-keygen -R '{host.address}' -f {known_hosts}" in text
        assert took < CONNECT_TIMEOUT_S
        assert len(known_hosts.read_text().splitlines()) == 1
    finally:
        host.exec(
            [
                "sh",
                "-c",
                "rm /etc/ssh/ssh_host_ed25519_key*; cp -a /root/kept /etc/ssh/ssh_host_ed25519_key; "
                "ssh-keygen -y -f /root/kept >/etc/ssh/ssh_host_ed25519_key.pub",
            ]
        )
        host.stop_sshd()
        host.start_sshd()


def test_the_users_known_hosts_is_obeyed_and_not_written(
    bed: Testbed, connections: Connections, own_home: Path, known_hosts: Path
) -> None:
    address = bed.node("h1").address
    key = " ".join(bed.node("h1").read("/etc/ssh/ssh_host_ed25519_key.pub").split()[:2])
    other = " ".join(bed.node("h2").read("/etc/ssh/ssh_host_ed25519_key.pub").split()[:2])
    file = own_home / ".ssh" / "known_hosts"
    file.parent.mkdir()
    file.write_text(f"{address} {other}\n")
    with Connections(known_hosts, connect_timeout_s=CONNECT_TIMEOUT_S) as fresh:
        text, _ = timed_error(fresh, node_of(bed, "h1"), HostKeyChanged)
    assert f"{file}:1" in text
    file.write_text(f"{address} {key}\n")
    with Connections(known_hosts, connect_timeout_s=CONNECT_TIMEOUT_S) as fresh:
        fresh.to(node_of(bed, "h1"))
        assert fresh.pinned == ()
    assert file.read_text() == f"{address} {key}\n"


def test_the_known_hosts_of_the_ssh_configuration_are_obeyed(
    bed: Testbed, known_hosts: Path, tmp_path: Path
) -> None:
    """The testbed's configuration names its known_hosts and says StrictHostKeyChecking yes."""

    def connections(config: Path) -> Connections:
        settings = load_ssh_config(config)
        return Connections(known_hosts, connect_timeout_s=CONNECT_TIMEOUT_S, ssh_config=settings)

    with connections(bed.ssh_config) as given:
        assert given.to(node_of(bed, "h1")).run(["hostname"], timeout_s=20).stdout == "h1\n"
        assert given.pinned == ()
    assert not known_hosts.exists()

    config, theirs = tmp_path / "cfg", tmp_path / "theirs"
    config.write_text(bed.ssh_config.read_text().replace(str(bed.known_hosts), str(theirs)))
    theirs.write_text("")
    with connections(config) as given:
        text, _ = timed_error(given, node_of(bed, "h1"), NodeUnreachable)
    assert f"stands in none of {theirs}, " in text
    assert "StrictHostKeyChecking yes" in text
    other = " ".join(bed.node("h2").read("/etc/ssh/ssh_host_ed25519_key.pub").split()[:2])
    theirs.write_text(f"{bed.node('h1').address} {other}\n")
    with connections(config) as given:
        text, _ = timed_error(given, node_of(bed, "h1"), HostKeyChanged)
    assert f"({theirs}:1)" in text
    assert not known_hosts.exists()


def test_pins_that_cannot_be_written_are_not_the_hosts_fault(bed: Testbed, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with (
        Connections(tmp_path / "file" / "pins", connect_timeout_s=CONNECT_TIMEOUT_S) as connections,
        pytest.raises(PreconditionError, match=f"cannot be written to {tmp_path}/file/pins: File exists; "),
    ):
        connections.to(node_of(bed, "h1"))


def test_no_authorized_keys(bed: Testbed, connections: Connections) -> None:
    host = bed.node("h2")
    keys = host.read("/root/.ssh/authorized_keys")
    host.exec(["rm", "/root/.ssh/authorized_keys"])
    try:
        text, took = timed_error(connections, node_of(bed, "h2"), NodeUnreachable)
    finally:
        host.write("/root/.ssh/authorized_keys", keys, mode=0o600)
    assert f"no key was accepted for root@{host.address}: {bed.private_key} (refused)" in text
    assert f"ssh-copy-id root@{host.address}" in text
    assert f"`ssh -o BatchMode=yes -i {bed.private_key} root@{host.address} true`" in text
    assert took < CONNECT_TIMEOUT_S + SLACK_S


def test_no_key_at_all(bed: Testbed, connections: Connections) -> None:
    text, _ = timed_error(connections, node_of(bed, "h1", identity_files=()), NodeUnreachable)
    assert "no key to log in" in text
    assert "~/.ssh/id_ed25519" in text


def test_a_key_with_a_passphrase_is_no_reason_to_ask(
    bed: Testbed, connections: Connections, own_home: Path
) -> None:
    key = own_home / "locked"
    bed.node("h1").exec(["ssh-keygen", "-q", "-t", "ed25519", "-N", "secret", "-f", "/root/locked"])
    key.write_text(bed.node("h1").read("/root/locked"))
    bed.node("h1").exec(["rm", "/root/locked", "/root/locked.pub"])
    text, _ = timed_error(connections, node_of(bed, "h1", identity_files=(str(key),)), NodeUnreachable)
    assert f"{key} (has a passphrase and is not in the agent: run ssh-add)" in text


@pytest.fixture
def agent(own_home: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """An ssh-agent without keys."""
    address = own_home / "agent"
    process = subprocess.Popen(["ssh-agent", "-D", "-a", str(address)], stdout=subprocess.DEVNULL)
    monkeypatch.setenv("SSH_AUTH_SOCK", str(address))
    assert eventually(address.exists)
    yield
    process.terminate()
    process.wait(10)


def test_a_key_with_a_passphrase_is_used_through_the_agent(
    bed: Testbed, connections: Connections, own_home: Path, agent: None
) -> None:
    key, stranger = own_home / "mine", own_home / "stranger"
    for path in (key, stranger):
        subprocess.run(
            ["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(path)], check=True, timeout=20
        )
        subprocess.run(["ssh-add", "-q", str(path)], check=True, timeout=20)
    subprocess.run(["ssh-keygen", "-q", "-p", "-N", "secret", "-f", str(key)], check=True, timeout=20)
    host = bed.node("h2")
    keys = host.read("/root/.ssh/authorized_keys")
    host.write("/root/.ssh/authorized_keys", (own_home / "mine.pub").read_text(), mode=0o600)
    try:
        for name, files, only in (("a", (str(key),), True), ("b", (), False)):
            node = node_of(bed, "h2", name=name, identity_files=files, identities_only=only)
            assert connections.to(node).run(["hostname"], timeout_s=20).stdout == "h2\n"
        node = node_of(bed, "h2", name="c", identity_files=(str(stranger),), identities_only=True)
        text, _ = timed_error(connections, node, NodeUnreachable)
    finally:
        host.write("/root/.ssh/authorized_keys", keys, mode=0o600)
    assert f"no key was accepted for root@{host.address}: {stranger} (refused)" in text
    assert "of the agent" not in text


def test_the_default_keys_are_found(bed: Testbed, connections: Connections, own_home: Path) -> None:
    (own_home / ".ssh").mkdir()
    (own_home / ".ssh" / "id_ed25519").write_bytes(bed.private_key.read_bytes())
    transport = connections.to(node_of(bed, "h1", identity_files=()))
    assert transport.run(["hostname"], timeout_s=20).stdout == "h1\n"


# -- hosts that do not answer ------------------------------------------------------------------------------


@pytest.fixture
def silent_port() -> Iterator[int]:
    """A port of this machine that accepts connections and never says a word."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen(8)
        yield listener.getsockname()[1]


def test_a_dropped_port(bed: Testbed, connections: Connections) -> None:
    bed.node("h3").cut(port=22)
    try:
        text, took = timed_error(connections, node_of(bed, "h3"), NodeUnreachable)
    finally:
        bed.node("h3").restore()
    assert f"no answer from {bed.node('h3').address}:22 within 4 s" in text
    assert took < CONNECT_TIMEOUT_S + SLACK_S


def test_a_silent_listener(connections: Connections, silent_port: int) -> None:
    text, took = timed_error(connections, Node("mute", "127.0.0.1", port=silent_port), NodeUnreachable)
    assert (
        f"127.0.0.1:{silent_port} accepts connections but did not greet as an SSH server within 4 s" in text
    )
    assert took < CONNECT_TIMEOUT_S + SLACK_S


def test_a_stopped_host(bed: Testbed, connections: Connections) -> None:
    bed.node("h3").pause()
    try:
        text, took = timed_error(connections, node_of(bed, "h3"), NodeUnreachable)
    finally:
        bed.node("h3").resume()
    assert "did not greet as an SSH server" in text
    assert took < CONNECT_TIMEOUT_S + SLACK_S


def test_a_closed_port(bed: Testbed, connections: Connections) -> None:
    text, took = timed_error(connections, node_of(bed, "h1", port=2222), NodeUnreachable)
    assert f"connection refused by {bed.node('h1').address}:2222" in text
    assert "-p 2222" in text
    assert took < CONNECT_TIMEOUT_S


def test_a_name_that_cannot_be_resolved(connections: Connections) -> None:
    text, took = timed_error(connections, Node("h9", "no-such-host.invalid"), NodeUnreachable)
    assert "the name 'no-such-host.invalid' cannot be resolved" in text
    assert took < CONNECT_TIMEOUT_S + SLACK_S


def test_bad_hosts_do_not_hide_the_good_ones(
    bed: Testbed, connections: Connections, silent_port: int
) -> None:
    nodes = [
        Node("mute", "127.0.0.1", port=silent_port),
        node_of(bed, "h1"),
        Node("nowhere", "no-such-host.invalid"),
        node_of(bed, "h2"),
    ]
    begun = time.monotonic()
    outcomes = fan_out(
        nodes,
        lambda node: connections.to(node).run(["hostname"], timeout_s=20).stdout.strip(),
        deadline_s=20,
        what="ask",
    )
    assert time.monotonic() - begun < CONNECT_TIMEOUT_S + SLACK_S
    assert {name: outcome.value for name, outcome in outcomes.items()} == {
        "mute": None,
        "h1": "h1",
        "nowhere": None,
        "h2": "h2",
    }
    assert [type(outcomes[name].error) for name in ("mute", "nowhere")] == [NodeUnreachable] * 2


# -- jump hosts --------------------------------------------------------------------------------------------


def test_a_chain_of_jump_hosts(bed: Testbed, own_home: Path, known_hosts: Path, tmp_path: Path) -> None:
    config = tmp_path / "ssh_config"
    lines = ["Host *", f"  IdentityFile {bed.private_key}", "  User root"]
    for name, jump in (("h1", None), ("h2", "h1")):
        lines += [f"Host {name}", f"  HostName {bed.node(name).address}"]
        lines += [f"  ProxyJump {jump}"] if jump else []
    config.write_text("\n".join(lines) + "\n")
    settings = load_ssh_config(config)
    with Connections(known_hosts, connect_timeout_s=CONNECT_TIMEOUT_S, ssh_config=settings) as connections:
        transport = connections.to(node_of(bed, "h3", proxy_jump="h2"))
        result = transport.run(["bash", "-c", 'hostname; echo "$SSH_CONNECTION"'], timeout_s=20)
        name, client = result.stdout.splitlines()
        assert name == "h3"
        assert client.split()[0] == bed.node("h2").address
        assert len(connections.pinned) == 3


def test_the_last_hop_is_dead(bed: Testbed, connections: Connections) -> None:
    host = bed.node("h3")
    jump = f"root@{bed.node('h1').address},root@{bed.node('h2').address}"
    node = node_of(bed, "h3", proxy_jump=jump)
    host.cut(port=22)
    try:
        text, took = timed_error(connections, node, NodeUnreachable)
        assert f"through jump host {jump.replace(',', ', ')}: " in text
        assert host.address in text
        assert f"-J root@{bed.node('h1').address}:22,root@{bed.node('h2').address}:22" in text
        assert took < 3 * CONNECT_TIMEOUT_S + SLACK_S
    finally:
        host.restore()
    host.stop_sshd()
    try:
        text, took = timed_error(connections, node, NodeUnreachable)
    finally:
        host.start_sshd()
    assert f"root@{bed.node('h2').address} could not connect to {host.address}:22" in text
    assert took < CONNECT_TIMEOUT_S + SLACK_S
    assert connections.to(node).run(["hostname"], timeout_s=20).stdout == "h3\n"


def test_an_unknown_jump_host(bed: Testbed, connections: Connections) -> None:
    node = node_of(bed, "h2", proxy_jump="no-such-hop.invalid")
    text, _ = timed_error(connections, node, NodeUnreachable)
    assert "jump host no-such-hop.invalid" in text
    assert "cannot be resolved" in text


# -- connections that break --------------------------------------------------------------------------------


def test_a_connection_that_died_is_opened_again(bed: Testbed, connections: Connections) -> None:
    transport = connections.to(node_of(bed, "h2"))
    assert transport.run(["hostname"], timeout_s=20).stdout == "h2\n"
    bed.node("h2").restart()
    assert transport.run(["hostname"], timeout_s=30).stdout == "h2\n"


def test_a_host_that_dies_while_a_command_runs(bed: Testbed, connections: Connections) -> None:
    transport = connections.to(node_of(bed, "h2"))
    timer = threading.Timer(1.5, bed.node("h2").kill)
    timer.start()
    begun = time.monotonic()
    try:
        with pytest.raises((NodeUnreachable, DeadlineExceeded)):
            transport.run(["sleep", "300"], timeout_s=8)
        assert time.monotonic() - begun < 30
    finally:
        timer.join()
        bed.node("h2").restart()


def test_the_deadline_holds_on_a_cut_network_and_closing_does_not_hang(
    bed: Testbed, known_hosts: Path
) -> None:
    connections = Connections(known_hosts, connect_timeout_s=CONNECT_TIMEOUT_S)
    transport = connections.to(node_of(bed, "h2"))
    timer = threading.Timer(1.0, bed.node("h2").cut)
    timer.start()
    begun = time.monotonic()
    try:
        with pytest.raises(DeadlineExceeded, match=r"`sleep 300` did not end within 3 s"):
            transport.run(["sleep", "300"], timeout_s=3)
        assert time.monotonic() - begun < 35
        begun = time.monotonic()
        connections.close()
        assert time.monotonic() - begun < 8
    finally:
        timer.join()
        bed.node("h2").restore()


def test_closing_ends_what_runs_on_the_nodes(bed: Testbed, known_hosts: Path) -> None:
    pids: list[str] = []
    connections = Connections(known_hosts, connect_timeout_s=CONNECT_TIMEOUT_S)
    transport = connections.to(node_of(bed, "h1"))

    def run() -> None:
        with pytest.raises(NodeError):
            transport.run(
                ["sh", "-c", "echo $$; sleep 1000"], timeout_s=600, on_line=lambda _, line: pids.append(line)
            )

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    assert eventually(lambda: bool(pids))
    connections.close()
    thread.join(10)
    assert not thread.is_alive()
    with Connections(known_hosts) as fresh:
        again = fresh.to(node_of(bed, "h1"))
        assert eventually(lambda: not still_there(again, pids[0]))
    assert eventually(lambda: not [p for p in bed.node("h1").workload() if "sleep 1000" in p.args])


# -- files -------------------------------------------------------------------------------------------------


def test_a_full_disk(bed: Testbed, transport: Transport, tmp_path: Path) -> None:
    bed.node("h1").exec(["sh", "-c", "mkdir -p /mnt/small && mount -t tmpfs -o size=1m none /mnt/small"])
    (tmp_path / "big").write_bytes(b"x" * 3_000_000)
    tree = tmp_path / "tree"
    tree.mkdir()
    (tree / "big").write_bytes(b"x" * 3_000_000)
    try:
        with pytest.raises(CommandFailed, match=r"/mnt/small/f.*\n.*No space left(.*\n)*.*free some space"):
            transport.put(tmp_path / "big", "/mnt/small/f", timeout_s=30)
        assert bed.node("h1").exec(["ls", "-A", "/mnt/small"]).stdout == ""
        with pytest.raises(CommandFailed, match=r"/mnt/small/t.*\n(.*\n)*.*free some space"):
            transport.put_tree(tree, "/mnt/small/t", timeout_s=30)
    finally:
        bed.node("h1").exec(["umount", "/mnt/small"])


def test_a_controller_that_is_killed_while_it_sends_leaves_nothing(
    bed: Testbed, transport: Transport, known_hosts: Path, tmp_path: Path
) -> None:
    (tmp_path / "big").write_bytes(bytes(50_000_000))
    program = (
        "import sys\n"
        "from pathlib import Path\n"
        "from provision.cluster import Node\n"
        "from provision.transport import connect\n"
        "node = Node('h1', sys.argv[1], user='root', identity_files=(sys.argv[2],))\n"
        "connect(node, known_hosts=Path(sys.argv[3])).put(Path(sys.argv[4]), 'sent/big', timeout_s=600)\n"
    )
    transport.run(["mkdir", "-p", "sent"], timeout_s=20)
    bed.node("h1").slow(rate_mbit=40)
    try:
        process = subprocess.Popen(
            [
                sys.executable,
                "-c",
                program,
                bed.node("h1").address,
                str(bed.private_key),
                str(known_hosts),
                str(tmp_path / "big"),
            ],
            cwd=ROOT,
        )
        listing = "ls -A /root/sent"
        assert eventually(lambda: ".ringmaster." in bed.node("h1").exec(["sh", "-c", listing]).stdout)
        process.kill()
        process.wait(10)
    finally:
        bed.node("h1").restore()
    assert eventually(lambda: bed.node("h1").exec(["sh", "-c", listing]).stdout == "")
    transport.run(["rm", "-rf", "sent"], timeout_s=20)


@pytest.mark.slow
def test_a_host_that_is_cut_off_ends_the_command_and_a_quiet_one_does_not(
    bed: Testbed, connections: Connections
) -> None:
    """Without this, sshd would let the command run for the two hours of TCP's keepalive."""
    outcomes: list[str] = []

    def quiet() -> None:
        script = f"sleep {SILENCE_S + 15}; echo whole"
        outcomes.append(connections.to(node_of(bed, "h1")).run(["sh", "-c", script], timeout_s=300).stdout)

    def cut_off() -> None:
        with pytest.raises(NodeError):
            connections.to(node_of(bed, "h2")).run(["sleep", "1234"], timeout_s=300)

    threads = [threading.Thread(target=each, daemon=True) for each in (quiet, cut_off)]
    for thread in threads:
        thread.start()

    def is_running() -> bool:
        return any(process.args == ("sleep", "1234") for process in bed.node("h2").workload())

    assert eventually(is_running)
    bed.node("h2").cut()
    try:
        time.sleep(SILENCE_S / 2)
        assert is_running(), "a short interruption must not end it"
        assert eventually(lambda: not is_running(), SILENCE_S)
    finally:
        bed.node("h2").restore()
    for thread in threads:
        thread.join(60)
    assert outcomes == ["whole\n"]


def test_another_user_and_home(bed: Testbed, connections: Connections, tmp_path: Path) -> None:
    (tmp_path / "f").write_text("hers")
    transport = connections.to(node_of(bed, "h1", name="a1", user="alice"))
    transport.put(tmp_path / "f", "$HOME/f", mode=0o600, timeout_s=20)
    assert bed.node("h1").exec(["stat", "-c", "%U %a", "/home/alice/f"]).stdout == "alice 600\n"
    with pytest.raises(CommandFailed, match="Permission denied"):
        transport.put(tmp_path / "f", "/etc/f", timeout_s=20)
