"""The transport to this machine, for real, and the pure parts of all transports."""

from __future__ import annotations

import base64
import hashlib
import hmac
import os
import re
import socket
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import paramiko
import pytest
from paramiko.ssh_exception import ChannelException, IncompatiblePeer

from provision.cluster import Node
from provision.errors import DeadlineExceeded, HostKeyChanged, NodeUnreachable, PreconditionError, UsageError
from provision.sshconfig import HostKeyRules, SSHSettings, load_ssh_config
from provision.transport import Transport, connect, supervisor, tree
from provision.transport.endpoints import Endpoint, endpoint_of, hops_of
from provision.transport.failures import Description, NoAddressInTime
from provision.transport.hostkeys import (
    HostKeys,
    fingerprint,
    judge,
    keys_of,
    known_name,
    preferred_algorithms,
)
from provision.transport.local import LocalTransport, local_environment
from provision.transport.session import shown
from provision.transport.streams import Kept, Lines, Marked
from provision.transport.userkeys import KeysRefused
from tests.transport_contract import TransportContract, eventually, still_there

HERE = Node(name="here", host="localhost", local=True)


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A home of the test's own, beside the files that the test makes in `tmp_path`."""
    home = tmp_path.parent / f"{tmp_path.name} home"
    home.mkdir()
    monkeypatch.setenv("HOME", str(home))
    return home


@pytest.fixture
def known_hosts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("state") / "known_hosts"


@pytest.fixture
def transport(home: Path, known_hosts: Path) -> Iterator[Transport]:
    transport = connect(HERE, known_hosts=known_hosts)
    yield transport
    transport.close()


class TestLocal(TransportContract):
    pass


def test_a_local_command_sees_nothing_of_the_controller() -> None:
    environ = {
        "PATH": "/ve/bin:/usr/bin",
        "HOME": "/h",
        "VIRTUAL_ENV": "/ve",
        "PYTHONPATH": "x",
        "SLURM_JOB_ID": "1",
        "OMPI_COMM_WORLD_RANK": "0",
        "LANG": "C",
    }
    kept = local_environment(environ, python_bin=Path("/ve/bin"))
    assert kept == {"PATH": "/usr/bin", "HOME": "/h", "LANG": "C"}
    assert local_environment({"PATH": "/ve/bin"}, python_bin=None) == {"PATH": "/ve/bin"}


# -- the supervisor ----------------------------------------------------------------------------------------


def test_the_command_line_suits_every_shell() -> None:
    command = supervisor.start_command("ringmaster-0123")
    assert "\n" not in command
    assert "!" not in command
    quoted = re.fullmatch(r"exec bash --noprofile --norc -c '([^']*)' ringmaster ringmaster-0123", command)
    assert quoted is not None
    assert "\\\\" not in quoted[1]


def test_a_silent_controller_is_taken_for_dead(transport: Transport) -> None:
    words = supervisor.header(
        ["bash", "-c", "echo $$; sleep 1000"], env=None, cwd=None, input_bytes=None, silence_s=1
    )
    process = subprocess.Popen(
        supervisor.start_argv("MARK"), stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )
    assert process.stdin is not None
    assert process.stdout is not None
    begun = time.monotonic()
    process.stdin.write(words)
    process.stdin.flush()
    for _ in range(4):  # heard of in time, it lives on
        time.sleep(0.5)
        process.stdin.write(b".")
        process.stdin.flush()
    assert process.poll() is None
    out = process.stdout.read()
    assert process.wait(20) == 143
    assert 2.5 < time.monotonic() - begun < 9
    assert not still_there(transport, out.decode().split()[-1])


def test_half_an_input_is_never_ended(transport: Transport, tmp_path: Path) -> None:
    """A controller that dies while it sends must not make the command act on what has arrived."""
    script = f"cat >/dev/null; touch '{tmp_path}/acted'"
    words = supervisor.header(["sh", "-c", script], env=None, cwd=None, input_bytes=100)
    process = subprocess.Popen(
        supervisor.start_argv("MARK"), stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )
    process.communicate(words + b"x" * 60, timeout=20)
    assert process.returncode == 143
    assert not (tmp_path / "acted").exists()


@pytest.mark.parametrize(
    ("argv", "env", "message"),
    [
        ([], None, "argv is empty"),
        (["a\0"], None, "NUL"),
        (["a"], {"A B": "1"}, "'A B'"),
        (["a"], {"1A": "1"}, "'1A'"),
        (["a"], {"A": "x\0y"}, "NUL"),
    ],
)
def test_headers_that_make_no_sense(argv: list[str], env: dict[str, str] | None, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        supervisor.header(argv, env=env, cwd=None, input_bytes=None)


# -- shells that do not get as far as the command ------------------------------------------------------------


@pytest.fixture
def shell(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], Transport]:
    """A transport to alice whose shell does something else before any command, as login files make it."""

    def make(text: str) -> Transport:
        program = tmp_path / "bin" / "bash"
        program.parent.mkdir()
        program.write_text(f"#!/bin/sh\n{text}\n")
        program.chmod(0o755)
        monkeypatch.setenv("PATH", f"{program.parent}:{os.environ['PATH']}")
        return LocalTransport(Node("here", "localhost", user="alice", local=True))

    return make


def test_a_shell_that_ends_too_early(shell: Callable[[str], Transport]) -> None:
    with pytest.raises(NodeUnreachable) as caught:
        shell("echo bye; exit 1").run(["true"], timeout_s=20)
    assert caught.value.message == (
        "here: the login shell ended with status 1 before a command could begin\n  it printed: `bye`"
    )
    assert caught.value.remedy == (
        "look for an `exit` in ~/.bashrc and ~/.profile of alice there (of another shell than bash: "
        "its own login files); if there is none, the login shell must be one that runs commands, "
        "with bash on its PATH"
    )


def test_login_files_have_a_shorter_time_than_the_command(
    shell: Callable[[str], Transport], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr("provision.transport.session.LOGIN_FILES_S", 1.0)
    transport = shell(f"echo 'Enter token:'; echo $$ >'{tmp_path}/pid'; exec sleep 1000")
    begun = time.monotonic()
    with pytest.raises(DeadlineExceeded) as caught:
        transport.run(["true"], timeout_s=60)
    assert time.monotonic() - begun < 10
    assert caught.value.message == (
        "here: no command could begin within 1 s: the login shell did not get past its login files\n"
        "  it printed: `Enter token:`"
    )
    assert caught.value.remedy == (
        "look at ~/.bashrc and ~/.profile of alice there (of another shell than "
        "bash: its own login files): something in them waits or takes too long"
    )
    pid = int((tmp_path / "pid").read_text())
    assert eventually(lambda: not Path(f"/proc/{pid}").exists())


def test_a_command_may_take_longer_than_login_files(
    transport: Transport, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("provision.transport.session.LOGIN_FILES_S", 2.0)
    assert transport.run(["sh", "-c", "sleep 3; echo x"], timeout_s=30).stdout == "x\n"


# -- output ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("size", [1, 2, 3, 7, 1000])
def test_noise_ends_at_the_marker_however_it_arrives(size: int) -> None:
    data = b"motd\nno newlineMARK-MARKER 4711\nout\nMARKER 2\n"
    marked = Marked("MARKER")
    output = b"".join(marked.feed(data[at : at + size]) for at in range(0, len(data), size))
    assert (marked.all_noise(), marked.rest_of_line, output) == (
        "motd\nno newlineMARK-",
        "4711",
        b"out\nMARKER 2\n",
    )


def test_without_a_marker_all_is_noise() -> None:
    marked = Marked("MARKER")
    assert marked.feed(b"This account is not available.\nMARK") == b""
    assert marked.all_noise() == "This account is not available.\nMARK"


@pytest.mark.parametrize("size", [1, 2, 3, 1000])
def test_lines_are_cut_at_newlines_only(size: int) -> None:
    data = "a\r\nü\r5%\r\x0b\u2028é\n\nlast".encode()
    lines = Lines()
    found = [line for at in range(0, len(data), size) for line in lines.feed(data[at : at + size])]
    assert found == ["a\r", "ü\r5%\r\x0b\u2028é", ""]
    assert lines.feed(b"", end=True) == ["last"]


def test_an_endless_line_comes_in_pieces() -> None:
    lines = Lines()
    found = [line for _ in range(40) for line in lines.feed(b"x" * 100_000)]
    found += lines.feed(b"", end=True)
    assert len(found) > 1
    assert "".join(found) == "x" * 4_000_000


@pytest.mark.parametrize(
    ("pieces", "text"),
    [
        ([b"abc", b"def"], "abcdef"),
        ([b"0123456789"], "0123456789"),
        ([b"01234567890"], "01234\n[1 bytes left out here]\n67890"),
        ([b"0123", b"4567", b"89ab", b"cdef"], "01234\n[6 bytes left out here]\nbcdef"),
    ],
)
def test_the_first_and_last_bytes_are_kept(pieces: list[bytes], text: str) -> None:
    kept = Kept(10)
    for piece in pieces:
        kept.feed(piece)
    assert kept.text() == text


def test_a_command_in_a_message_is_short_and_one_line() -> None:
    assert shown(("echo", "a\nb")) == "echo a b"
    assert len(shown(("x" * 1000,))) < 130
    assert shown(tuple("abcdefgh")) == "a b c d e f …"


# -- host keys ---------------------------------------------------------------------------------------------

KEY_A = base64.b64encode(b"key a").decode()
KEY_B = base64.b64encode(b"key b").decode()


def hashed(name: str) -> str:
    salt = b"0123456789abcdefghij"
    digest = hmac.new(salt, name.encode(), hashlib.sha1).digest()
    return f"|1|{base64.b64encode(salt).decode()}|{base64.b64encode(digest).decode()}"


@pytest.mark.parametrize(
    ("line", "name", "found"),
    [
        (f"h1 ssh-ed25519 {KEY_A}", "h1", True),
        (f"h1,10.0.0.1 ssh-ed25519 {KEY_A} comment", "10.0.0.1", True),
        (f"h1 ssh-ed25519 {KEY_A}", "h10", False),
        (f"H1 ssh-ed25519 {KEY_A}", "h1", True),
        (f"h1 ssh-ed25519 {KEY_A}", "[h1]:2222", False),
        (f"[h1]:2222 ssh-ed25519 {KEY_A}", "[h1]:2222", True),
        (f"*.example.org ssh-ed25519 {KEY_A}", "a.example.org", True),
        (f"*.example.org,!b.example.org ssh-ed25519 {KEY_A}", "b.example.org", False),
        (f"{hashed('h1')} ssh-ed25519 {KEY_A}", "h1", True),
        (f"{hashed('h1')} ssh-ed25519 {KEY_A}", "h2", False),
        (f"# h1 ssh-ed25519 {KEY_A}", "h1", False),
        (f"@cert-authority h1 ssh-ed25519 {KEY_A}", "h1", False),
        ("h1 ssh-ed25519 not-base64!", "h1", False),
        ("h1 ssh-ed25519", "h1", False),
        ("|1|broken ssh-ed25519 " + KEY_A, "h1", False),
    ],
)
def test_known_hosts_lines(line: str, name: str, found: bool) -> None:
    keys = keys_of(f"\n{line}\n", name, "file")
    assert [(key.type, key.blob, key.source) for key in keys] == (
        [("ssh-ed25519", b"key a", "file:2")] if found else []
    )


def test_known_names() -> None:
    assert [known_name("H1", 22), known_name("h1", 2222), known_name("fe80::1", 22)] == [
        "h1",
        "[h1]:2222",
        "fe80::1",
    ]


def test_a_changed_key_is_told_with_both_fingerprints() -> None:
    known = keys_of(f"h1 ssh-rsa {KEY_B}\nh1 ssh-ed25519 {KEY_A}\n", "h1", "/s/known_hosts")
    judge("n1", "h1", "ssh-ed25519", b"key a", known)
    with pytest.raises(HostKeyChanged) as caught:
        judge("n1", "h1", "ssh-ed25519", b"key c", known)
    text = str(caught.value)
    assert re.search(
        r"^n1: .*got ssh-ed25519 SHA256:\S+, expected ssh-ed25519 SHA256:\S+ \(/s/known_hosts:2\)", text
    )
    assert "ssh-keygen -R 'h1' -f /s/known_hosts" in text


def test_every_file_that_knows_the_host_must_agree() -> None:
    known = [*keys_of(f"h1 t {KEY_A}", "h1", "/pins"), *keys_of(f"h1 t {KEY_B}", "h1", "/user")]
    with pytest.raises(HostKeyChanged, match="/user:1"):
        judge("n1", "h1", "t", b"key a", known)


def test_a_revoked_key_is_refused() -> None:
    known = keys_of(f"@revoked h1 t {KEY_A}\nh1 t {KEY_A}", "h1", "/user")
    with pytest.raises(HostKeyChanged, match="revoked"):
        judge("n1", "h1", "t", b"key a", known)


def test_the_server_is_asked_for_the_key_that_is_known() -> None:
    offered = ["ssh-ed25519", "ecdsa-sha2-nistp256", "rsa-sha2-512", "rsa-sha2-256"]
    known = keys_of(f"h1 ssh-rsa {KEY_A}", "h1", "f")
    assert preferred_algorithms(known, offered) == [
        "rsa-sha2-512",
        "rsa-sha2-256",
        "ssh-ed25519",
        "ecdsa-sha2-nistp256",
    ]
    assert preferred_algorithms([], offered) == offered


@pytest.fixture(scope="module")
def host_keys() -> tuple[paramiko.PKey, paramiko.PKey]:
    return paramiko.ECDSAKey.generate(), paramiko.ECDSAKey.generate()


def line_of(name: str, key: paramiko.PKey) -> str:
    return f"{name} {key.get_name()} {key.get_base64()}\n"


def test_the_files_of_the_configuration_are_obeyed_and_not_written(
    tmp_path: Path, host_keys: tuple[paramiko.PKey, paramiko.PKey]
) -> None:
    right, wrong = host_keys
    theirs = tmp_path / "theirs"
    theirs.write_text(line_of("[h1]:2222", right))
    rules = HostKeyRules(("/dev/null", str(tmp_path / "missing"), str(tmp_path), str(theirs)))
    keys = HostKeys(tmp_path / "state" / "pins")
    keys.check("n1", "[h1]:2222", right, rules)
    with pytest.raises(HostKeyChanged, match=f"{theirs}:1"):
        keys.check("n1", "[h1]:2222", wrong, rules)
    assert theirs.read_text() == line_of("[h1]:2222", right)
    assert not (tmp_path / "state").exists(), "what is known needs no pin, nor a place to write it"
    assert keys.pinned == []


def test_an_unknown_host_is_refused_where_the_configuration_is_strict(
    tmp_path: Path, host_keys: tuple[paramiko.PKey, paramiko.PKey]
) -> None:
    pins, (key, other) = tmp_path / "pins", host_keys
    strict = HostKeyRules(("/f1", "/f2"), strict=True)
    with pytest.raises(NodeUnreachable) as caught:
        HostKeys(pins).check("n1", "h1", key, strict)
    text = str(caught.value)
    assert text.startswith(f"n1: its host key {key.get_name()} {fingerprint(key.asbytes())} is unknown: h1 ")
    assert "in none of /f1, /f2, and the SSH configuration says StrictHostKeyChecking yes; compare" in text
    assert not pins.exists()
    HostKeys(pins).check("n1", "h1", key, HostKeyRules())
    HostKeys(pins).check("n1", "h1", key, strict)  # pinned before
    with pytest.raises(HostKeyChanged):
        HostKeys(pins).check("n1", "h1", other, strict)
    assert pins.read_text() == line_of("h1", key)


def test_pins_that_cannot_be_written_or_read_are_told_as_such(
    tmp_path: Path, host_keys: tuple[paramiko.PKey, paramiko.PKey]
) -> None:
    (tmp_path / "file").touch()
    pins = tmp_path / "file" / "pins"
    with pytest.raises(PreconditionError) as caught:
        HostKeys(pins).check("n1", "h1", host_keys[0], HostKeyRules())
    assert str(caught.value) == (
        f"the host key of h1 cannot be written to {pins}: File exists; "
        "start the task in a directory that you may write to, or make that file writable"
    )
    with pytest.raises(UsageError, match=f"{tmp_path}, the pinned host keys, cannot be read: Is a directory"):
        HostKeys(tmp_path).known("h1", ())


def settings_of(tmp_path: Path, text: str) -> SSHSettings:
    path = tmp_path / "cfg"
    path.write_text(text)
    return load_ssh_config(path)


def test_nodes_and_jump_hosts_get_their_own_rules(tmp_path: Path) -> None:
    text = "Host h1\n HostName 10.0.0.1\n UserKnownHostsFile /k1\n StrictHostKeyChecking yes\n"
    text += "Host j1\n HostName 10.0.0.9\n HostKeyAlias jump\n UserKnownHostsFile /k9\n"
    text += "Host *\n GlobalKnownHostsFile none\n UserKnownHostsFile /rest\n"
    config = settings_of(tmp_path, text)
    node = Node("h1", "10.0.0.1", user="u", port=2222, proxy_jump="v@j1:23")
    target, (hop,) = endpoint_of(node, config), hops_of(node, config)
    assert target.rules == HostKeyRules(("/k1",), True, None, "h1")
    assert hop.rules == HostKeyRules(("/k9",), False, "jump", "j1")
    assert (target.key_name, hop.key_name) == ("[10.0.0.1]:2222", "jump")
    text = 'Host x *\n User y\nHost = my_box "your_box"\n HostName 10.0.0.2\n UserKnownHostsFile /mine\n'
    boxes = settings_of(tmp_path, text)
    for name in ("my", "your"):
        rules = endpoint_of(Node(f"{name}-box", "10.0.0.2"), boxes).rules
        assert (rules.files[0], rules.asked) == ("/mine", f"{name}_box")
    # A node that is only called like an entry of the configuration is another machine.
    assert endpoint_of(Node("h1", "10.0.0.5"), config).rules == HostKeyRules(("/rest",), asked="10.0.0.5")


# -- failures in words -------------------------------------------------------------------------------------

CAUSES = [
    KeysRefused([]),
    KeysRefused(["k (refused)"]),
    socket.gaierror(-2, "Name or service not known"),
    ChannelException(2, "Connect failed"),
    NoAddressInTime(),
    TimeoutError("no answer to the login"),
    TimeoutError(),
    ConnectionRefusedError(),
    IncompatiblePeer("kex"),
    paramiko.SSHException("Error reading SSH protocol banner"),
    OSError(113, "No route to host"),
    paramiko.SSHException("odd"),
]


@pytest.mark.parametrize("cause", CAUSES, ids=repr)
def test_a_failed_connection_ends_with_a_command_that_finds_the_same_host(
    cause: Exception, tmp_path: Path
) -> None:
    config = settings_of(tmp_path, "Host h1\n HostName 10.0.0.1\n")
    target = endpoint_of(Node("h1", "10.0.0.1", user="u", port=2222, identity_files=("/a b",)), config)
    text = str(Description("h1", target, (), 4.0, config.file).error(cause, 0.1))
    command = f"ssh -F {tmp_path}/cfg -o BatchMode=yes -p 2222 -i '/a b' u@h1 true"
    assert text.endswith(f"; to see it by hand: `{command}`")
    assert "?;" not in text
    plain = Description("h1", Endpoint("h1", "10.0.0.1", "u", 22), (), 4.0).try_command
    assert plain == "ssh -o BatchMode=yes u@10.0.0.1 true"


# -- trees -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("path", "excluded"),
    [
        (".git", True),
        (".git/config", True),
        ("sub/__pycache__/x.pyc", True),
        ("a.pyc", True),
        ("git", False),
        (".gitignore", False),
        ("build/out/x", True),
        ("other/build/x", False),
    ],
)
def test_exclusion(path: str, excluded: bool) -> None:
    assert tree.is_excluded(path, (*tree.DEFAULT_EXCLUDE, "build/*")) is excluded


@pytest.mark.parametrize(
    ("target", "message"),
    [
        ("/etc/passwd", "outside the tree"),
        ("..", "outside the tree"),
        ("sub/../../x", "outside the tree"),
        ("sub/../file", None),
        ("gone", None),
    ],
)
def test_links_that_lead_out_are_refused(tmp_path: Path, target: str, message: str | None) -> None:
    (tmp_path / "link").symlink_to(target)
    if message is None:
        assert tree.scan(tmp_path, ())["link"] == tree.Entry("link", "l", target)
    else:
        with pytest.raises(UsageError, match=message):
            tree.scan(tmp_path, ())
        assert tree.scan(tmp_path, ("link",)) == {}


@pytest.mark.parametrize("name", ["new\nline", "back\\slash", b"\xff".decode("utf-8", "surrogateescape")])
def test_names_that_cannot_be_sent(tmp_path: Path, name: str) -> None:
    (tmp_path / name).touch()
    with pytest.raises(UsageError, match="rename or exclude it"):
        tree.scan(tmp_path, ())


def test_a_listing_is_read_back() -> None:
    output = b"d\0sub\0\0f\0sub/a b\0\0l\0ln\0sub\0p\0stray\0\0\0aa11  ./sub/a b\n"
    listing = tree.parse_listing(output)
    assert listing.every_path == ("stray",)
    assert listing.entries == {
        "sub": tree.Entry("sub", "d", ""),
        "sub/a b": tree.Entry("sub/a b", "f", "aa11"),
        "ln": tree.Entry("ln", "l", "sub"),
    }


def test_close_ends_what_runs(transport: Transport) -> None:
    pids: list[str] = []

    def run() -> None:
        transport.run(
            ["bash", "-c", "echo $$; sleep 1000"],
            timeout_s=60,
            check=False,
            on_line=lambda _, line: pids.append(line),
        )

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    assert eventually(lambda: bool(pids))
    transport.close()
    thread.join(10)
    assert not thread.is_alive()
    assert eventually(lambda: not still_there(transport, pids[0]))
