"""setup_ssh_mesh.sh: what it writes, that it writes it once, and that a real sshd takes it."""

from __future__ import annotations

import getpass
import json
import os
import shutil
import socket
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.scripts.conftest import SCRIPTS, Mesh, make_key, sha256


def mode(path: Path) -> int:
    return path.stat().st_mode & 0o7777


def test_once_and_once_only(mesh: Mesh) -> None:
    site = mesh.site
    assert site.word("setup_ssh_mesh.sh", *mesh.words()) == "changed"
    assert site.word("setup_ssh_mesh.sh", *mesh.words()) == "unchanged"
    assert site.word("setup_ssh_mesh.sh", *mesh.words("--check")) == "unchanged"
    assert (mode(mesh.ssh), mode(mesh.ssh / "id_ed25519"), mode(mesh.authorized)) == (0o700, 0o600, 0o600)
    assert mode(site.home / ".ssh") == 0o700
    assert sha256(mesh.ssh / "id_ed25519") == sha256(mesh.key)
    words = mesh.authorized.read_text().split()
    assert words[1] == Path(f"{mesh.key}.pub").read_text().split()[1]
    assert words[2] == "ringmaster-c1"
    helpers = {path.name for path in (SCRIPTS / "node").iterdir() if path.suffix in (".sh", ".py")}
    assert helpers <= {path.name for path in (site.prefix / "libexec").iterdir()}
    manifest = json.loads((site.prefix / "manifest.json").read_text())
    assert manifest["undo"]["authorized_keys_comment"] == "ringmaster-c1"


def test_what_ssh_makes_of_the_config(mesh: Mesh) -> None:
    mesh.site.word("setup_ssh_mesh.sh", *mesh.words())
    for name in ("h2", "10.0.0.2"):
        done = subprocess.run(
            ["ssh", "-G", "-F", str(mesh.ssh / "config"), name],
            capture_output=True,
            text=True,
            check=True,
            timeout=20,
        )
        settings = dict(line.split(" ", 1) for line in done.stdout.splitlines() if " " in line)
        expected = {
            "hostname": "10.0.0.2",
            "port": "2222",
            "user": getpass.getuser(),
            "identityfile": str(mesh.ssh / "id_ed25519"),
            "identitiesonly": "yes",
            "userknownhostsfile": str(mesh.ssh / "known_hosts"),
            "stricthostkeychecking": "true",
            "batchmode": "yes",
            "connecttimeout": "10",
            "controlmaster": "false",
            "forwardagent": "no",
            "loglevel": "ERROR",
            "hostkeyalias": "ringmaster-h2",
        }
        assert {key: settings.get(key) for key in expected} == expected


def test_changed_peers_are_written_and_removed_ones_go(mesh: Mesh) -> None:
    mesh.site.word("setup_ssh_mesh.sh", *mesh.words())
    mesh.write_peers(("h1", "127.0.0.1", 22), ("h3", "10.0.0.3", 22))
    assert mesh.site.word("setup_ssh_mesh.sh", *mesh.words()) == "changed"
    assert "h2" not in (mesh.ssh / "config").read_text() + (mesh.ssh / "known_hosts").read_text()
    assert "h3" in (mesh.ssh / "peers.tsv").read_text()
    assert mesh.site.word("setup_ssh_mesh.sh", *mesh.words()) == "unchanged"


@pytest.mark.parametrize("damage", ["mode", "key", "known_hosts", "authorized", "helper"])
def test_damage_is_repaired(mesh: Mesh, damage: str) -> None:
    site = mesh.site
    site.word("setup_ssh_mesh.sh", *mesh.words())
    if damage == "mode":
        (mesh.ssh / "id_ed25519").chmod(0o644)
    elif damage == "key":
        (mesh.ssh / "id_ed25519").write_text("other")
    elif damage == "known_hosts":
        (mesh.ssh / "known_hosts").unlink()
    elif damage == "authorized":
        mesh.authorized.write_text("")
    else:
        next((site.prefix / "libexec").glob("*.sh")).write_text("#!/bin/sh\n")
    assert site.word("setup_ssh_mesh.sh", *mesh.words()) == "changed"
    assert site.word("setup_ssh_mesh.sh", *mesh.words()) == "unchanged"
    assert mode(mesh.ssh / "id_ed25519") == 0o600


def test_the_users_own_lines_stay(mesh: Mesh) -> None:
    mesh.authorized.parent.mkdir(mode=0o700)
    mine = (
        '# a comment\n\nrestrict,command="x y" ssh-rsa AAAA me@home\nssh-ed25519 BBBB no-newline-at-the-end'
    )
    mesh.authorized.write_text(mine)
    mesh.authorized.chmod(0o600)
    assert mesh.site.word("setup_ssh_mesh.sh", *mesh.words()) == "changed"
    assert mesh.authorized.read_text().startswith(mine + "\n")
    assert mesh.authorized.read_text().count("ringmaster-c1") == 1
    # A second cluster adds its own line; a new key of the first replaces the first's.
    assert mesh.site.word("setup_ssh_mesh.sh", *mesh.words(cluster="c2")) == "changed"
    mesh.key.unlink()
    make_key(mesh.key, "new")
    assert mesh.site.word("setup_ssh_mesh.sh", *mesh.words()) == "changed"
    text = mesh.authorized.read_text()
    assert (text.count("ringmaster-c1"), text.count("ringmaster-c2")) == (1, 1)
    assert text.startswith(mine + "\n")


def test_a_cluster_of_one_leaves_authorized_keys_alone(mesh: Mesh) -> None:
    assert mesh.site.word("setup_ssh_mesh.sh", *mesh.words("--no-authorize")) == "changed"
    assert not mesh.authorized.exists()
    assert mesh.site.word("setup_ssh_mesh.sh", *mesh.words("--no-authorize")) == "unchanged"


@pytest.mark.parametrize(
    ("row", "said"),
    [
        ("h1\t127.0.0.1\t22\troot\t/root/local", "host keys"),
        ("h1\t127.0.0.1\ttwo\troot\t/root/local\tssh-ed25519 AAAA", "port"),
        ("h 1\t127.0.0.1\t22\troot\t/root/local\tssh-ed25519 AAAA", "name"),
        ("h1\t-oProxyCommand=x\t22\troot\t/root/local\tssh-ed25519 AAAA", "address"),
        ("h1\t127.0.0.1\t22\t\t/root/local\tssh-ed25519 AAAA", "user"),
        ("h1\t127.0.0.1\t22\troot\t/root/my local\tssh-ed25519 AAAA", "prefix"),
        ("", "names no node"),
    ],
)
def test_a_bad_peers_table_is_65(mesh: Mesh, row: str, said: str) -> None:
    mesh.peers.write_text(row + "\n")
    done = mesh.site.run("setup_ssh_mesh.sh", *mesh.words())
    assert (done.returncode, done.stdout) == (65, "")
    assert said in done.stderr
    assert not mesh.ssh.exists()


def test_a_public_key_for_a_private_one_is_65(mesh: Mesh) -> None:
    shutil.copy(f"{mesh.key}.pub", mesh.key)
    done = mesh.site.run("setup_ssh_mesh.sh", *mesh.words())
    assert (done.returncode, done.stdout) == (65, "")


@pytest.fixture
def sshd_port(mesh: Mesh, tmp_path: Path) -> Iterator[int]:
    """A real sshd on the loopback that reads this test's authorized_keys."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = int(probe.getsockname()[1])
    config = tmp_path / "sshd_config"
    config.write_text(
        f"ListenAddress 127.0.0.1\nPort {port}\nHostKey {mesh.host_key}\nPidFile none\nStrictModes no\n"
        f"AuthorizedKeysFile {mesh.authorized}\nPasswordAuthentication no\nPermitRootLogin yes\nUsePAM no\n"
    )
    if os.getuid() == 0:
        Path("/run/sshd").mkdir(exist_ok=True)
    daemon = subprocess.Popen(["/usr/sbin/sshd", "-D", "-e", "-f", str(config)], stderr=subprocess.DEVNULL)
    try:
        deadline = time.monotonic() + 10
        while time.monotonic() < deadline:
            with socket.socket() as client:
                if client.connect_ex(("127.0.0.1", port)) == 0:
                    break
            time.sleep(0.05)
        yield port
    finally:
        daemon.terminate()
        daemon.wait(timeout=10)


def test_a_real_sshd_takes_the_key_and_a_wrong_host_key_is_refused(mesh: Mesh, sshd_port: int) -> None:
    mesh.write_peers(("h1", "127.0.0.1", sshd_port))
    mesh.site.word("setup_ssh_mesh.sh", *mesh.words())
    argv = ["ssh", "-F", str(mesh.ssh / "config"), "h1", "echo", "reached"]
    done = subprocess.run(argv, capture_output=True, text=True, timeout=30, check=False)
    assert (done.returncode, done.stdout.splitlines()[-1:]) == (0, ["reached"]), done.stderr
    stranger = mesh.host_key.with_name("stranger")
    make_key(stranger, "another machine")
    mesh.write_peers(("h1", "127.0.0.1", sshd_port), host_key=stranger)
    mesh.site.word("setup_ssh_mesh.sh", *mesh.words())
    done = subprocess.run(argv, capture_output=True, text=True, timeout=30, check=False)
    assert done.returncode == 255
    assert "HOST IDENTIFICATION HAS CHANGED" in done.stderr or "Host key verification failed" in done.stderr
