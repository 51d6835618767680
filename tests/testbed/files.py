"""The text files of a testbed: keys, hosts table, sshd's and the SSH client's configuration."""

from __future__ import annotations

import subprocess
from collections.abc import Callable, Mapping
from pathlib import Path

from tests.testbed.state import NodeState, Place, State, write_file

KEY_NAME = "id_ed25519"
KNOWN_HOSTS_NAME = "known_hosts"
HOST_KEY_NAME = "ssh_host_ed25519_key"


def make_key(path: Path) -> None:
    """The test key pair that opens every host: `path` and `path`.pub."""
    subprocess.run(
        ["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-C", "ringmaster-testbed", "-f", str(path)],
        check=True,
    )


def hosts_text(addresses: Mapping[str, str]) -> str:
    lines = ["127.0.0.1 localhost", "::1 localhost ip6-localhost ip6-loopback"]
    lines += [f"{address} {name}" for name, address in addresses.items()]
    return "".join(f"{line}\n" for line in lines)


def sshd_config(port: int) -> str:
    """Keys only, no PAM, and enough room for a whole cluster to log in at once."""
    lines = [
        f"Port {port}",
        "HostKey /etc/ssh/ssh_host_ed25519_key",
        "PidFile /run/sshd.pid",
        "PermitRootLogin prohibit-password",
        "PasswordAuthentication no",
        "KbdInteractiveAuthentication no",
        "UsePAM no",
        "UseDNS no",
        "PrintMotd no",
        "PrintLastLog no",
        "AcceptEnv LANG LC_*",
        "MaxStartups 300",
        "MaxSessions 300",
        "Subsystem sftp internal-sftp",
    ]
    return "".join(f"{line}\n" for line in lines)


def known_hosts_text(nodes: Mapping[str, tuple[str, int, str]]) -> str:
    """`nodes`: name -> (address, port, public host key)."""
    lines = []
    for name, (address, port, key) in nodes.items():
        names = [name, address] if port == 22 else [f"[{name}]:{port}", f"[{address}]:{port}"]
        kind, blob = key.split()[:2]
        lines.append(f"{','.join(names)} {kind} {blob}")
    return "".join(f"{line}\n" for line in lines)


def ssh_config_text(nodes: Mapping[str, tuple[str, int, str]], *, key: Path, known_hosts: Path) -> str:
    """`nodes`: name -> (address, port, user)."""
    blocks = []
    for name, (address, port, user) in nodes.items():
        blocks.append(
            f"Host {name}\n"
            f"    HostName {address}\n"
            f"    Port {port}\n"
            f"    User {user}\n"
            f"    IdentityFile {key}\n"
            "    IdentitiesOnly yes\n"
            f"    UserKnownHostsFile {known_hosts}\n"
            "    StrictHostKeyChecking yes\n"
        )
    return "\n".join(blocks)


def write_ssh_files(place: Place, state: State, address_of: Callable[[NodeState], str]) -> None:
    keys, logins = {}, {}
    for name, node in state.nodes.items():
        public = place.node_dir(name) / f"{HOST_KEY_NAME}.pub"
        if not public.exists():
            continue  # not started yet
        keys[name] = (address_of(node), node.spec.port, public.read_text())
        logins[name] = (address_of(node), node.spec.port, node.spec.login)
    known_hosts = place.directory / KNOWN_HOSTS_NAME
    write_file(known_hosts, known_hosts_text(keys), 0o600)
    config = ssh_config_text(logins, key=place.directory / KEY_NAME, known_hosts=known_hosts)
    write_file(place.ssh_config, config, 0o600)
