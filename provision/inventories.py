"""Turns whatever names hosts into a Cluster: host text, hostfile, Ansible, SLURM, Vagrant, cluster.json."""

from __future__ import annotations

import dataclasses
import os
import re
import shutil
import subprocess
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path

from provision.ansible_inventory import parse_ini, parse_list_json, parse_yaml
from provision.cluster import Cluster, Node, parse_cluster_json
from provision.errors import HostTextError, UsageError
from provision.hostfile import parse_hostfile
from provision.hosttext import MAX_SLOTS, HostSpec, Place, merge_mentions, parse_hosts
from provision.sshconfig import SSHSettings, apply_ssh_config, load_ssh_config, parse_ssh_config

MAX_FILE_BYTES = 4 << 20
ANSIBLE_TIMEOUT_S = 60.0
VAGRANT_TIMEOUT_S = 120.0
LOCAL = Node(name="localhost", host="localhost", local=True)


def resolve(
    *,
    hosts: str | None = None,
    hosts_from: str | None = None,
    slots: int | None = None,
    ssh_config: str | os.PathLike[str] | None = None,
    state_dir: Path,
    environ: Mapping[str, str] | None = None,
) -> Cluster:
    """The cluster that a task works on; contacts nothing.

    `slots` counts for every host whose text gives none; for a saved cluster it replaces what was saved. With
    neither `hosts` nor `hosts_from`: the saved cluster, else this machine alone. UsageError, mostly
    HostTextError, says what is wrong.
    """
    if slots is not None and not 1 <= slots <= MAX_SLOTS:
        raise UsageError(f"--slots: got {slots}, expected a whole number from 1 to {MAX_SLOTS}")
    if hosts is not None and hosts_from is not None:
        raise UsageError("--hosts and --hosts-from are both given", remedy="give one of them")
    if hosts is not None:
        return cluster_of(parse_hosts(hosts), load_ssh_config(ssh_config), slots)
    if hosts_from is not None:
        return _resolve_from(hosts_from, slots, ssh_config, os.environ if environ is None else environ)
    saved = state_dir / "cluster.json"
    if saved.exists():
        return with_slots(Cluster.load(saved), slots)
    return Cluster(nodes=(dataclasses.replace(LOCAL, slots=slots),))


def _resolve_from(
    hosts_from: str, slots: int | None, ssh_config: str | os.PathLike[str] | None, environ: Mapping[str, str]
) -> Cluster:
    if hosts_from == "slurm":
        return cluster_of(parse_slurm(environ), load_ssh_config(ssh_config), slots)
    if hosts_from == "vagrant":
        return from_ssh_config_text(vagrant_ssh_config(), "`vagrant ssh-config`", slots)
    path = Path(hosts_from).expanduser()
    text = "" if path.is_dir() else read_text(path)
    kind = "ansible" if path.is_dir() else kind_of(path.name, text)
    if kind == "cluster":
        return with_slots(parse_cluster_json(text, source=hosts_from), slots)
    if kind == "ssh-config":
        return from_ssh_config_text(text, hosts_from, slots)
    if kind == "hostfile":
        specs = parse_hostfile(text, source=hosts_from)
    elif kind == "ansible-json":
        specs = parse_list_json(text, source=hosts_from)
    else:
        specs = read_ansible(path, kind, text)
    return cluster_of(specs, load_ssh_config(ssh_config), slots)


def kind_of(name: str, text: str) -> str:
    """What a file is, by its extension and then by its first lines.

    `#!`: ansible (a program that prints an inventory); `.json`: cluster (it says so) or ansible-json; `.yml`,
    `.yaml`: ansible-yaml; a first word `Host`: ssh-config; `.ini`, a `[group]` line or an `ansible_…`
    variable: ansible-ini; anything else: hostfile.
    """
    suffix = Path(name).suffix.lower()
    lines = [line.strip() for line in text.lstrip("\ufeff").splitlines()]
    content = [line for line in lines if line and line[0] not in "#;"]
    first = content[0] if content else ""
    if text.startswith("#!"):
        return "ansible"
    if suffix == ".json" or first.startswith("{"):
        return "ansible-json" if '"_meta"' in text and '"kind"' not in text else "cluster"
    if suffix in (".yml", ".yaml") or first == "---" or re.fullmatch(r"\w+:", first):
        return "ansible-yaml"
    if re.match(r"(?i)host[ \t]+\S", first):
        return "ssh-config"
    section = re.compile(r"\[[^\[\]\s]*[A-Za-z][^\[\]\s]*\]\s*([#;].*)?")
    if suffix == ".ini" or any(section.fullmatch(line) or "ansible_" in line for line in content):
        return "ansible-ini"
    return "hostfile"


def read_text(path: Path) -> str:
    """A text file of at most 4 MiB, UTF-8 with or without a byte order mark."""
    source = str(path)
    try:
        with path.open("rb") as stream:
            data = stream.read(MAX_FILE_BYTES + 1)
    except OSError as error:
        remedy = "--hosts-from takes a file, `slurm` or `vagrant`; a list of hosts goes to --hosts"
        raise HostTextError(f"cannot be read: {error.strerror}", source=source, remedy=remedy) from error
    if len(data) > MAX_FILE_BYTES:
        raise HostTextError(f"is larger than {MAX_FILE_BYTES} bytes", source=source)
    try:
        return data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = data[: error.start].count(b"\n") + 1
        raise HostTextError(
            "is no UTF-8 text", source=source, line=line, remedy="save it as UTF-8"
        ) from error


def read_ansible(path: Path, kind: str, text: str) -> tuple[HostSpec, ...]:
    """Through `ansible-inventory` where it is installed, else by the plain readers."""
    program = shutil.which("ansible-inventory")
    if program is not None:
        listed = _output([program, "-i", str(path), "--list"], ANSIBLE_TIMEOUT_S, str(path))
        return parse_list_json(listed, source=f"ansible-inventory -i {path}")
    remedy = "install Ansible on this machine: its `ansible-inventory` is used where it is found"
    if kind == "ansible":
        raise HostTextError("only Ansible itself reads folders and programs", source=str(path), remedy=remedy)
    for name in ("group_vars", "host_vars"):
        if (path.parent / name).is_dir():
            raise HostTextError(f"{name}/ beside it is only read by Ansible", source=str(path), remedy=remedy)
    return parse_yaml(text, source=str(path)) if kind == "ansible-yaml" else parse_ini(text, source=str(path))


def vagrant_ssh_config() -> str:
    """What `vagrant ssh-config` prints for the working directory's Vagrantfile, from its first Host line."""
    program = shutil.which("vagrant")
    if program is None:
        remedy = "install Vagrant, or save the output of `vagrant ssh-config` and give that file"
        raise HostTextError("vagrant is not installed", source="--hosts-from vagrant", remedy=remedy)
    printed = _output([program, "ssh-config"], VAGRANT_TIMEOUT_S, "--hosts-from vagrant")
    found = re.search(r"(?m)^Host .*\Z", printed, re.DOTALL)
    if found is None:
        raise HostTextError("`vagrant ssh-config` names no host", source="--hosts-from vagrant")
    return found[0]


def _output(argv: Sequence[str], timeout_s: float, source: str) -> str:
    environ = {**os.environ, "ANSIBLE_NOCOLOR": "1", "ANSIBLE_INVENTORY_ANY_UNPARSED_IS_FAILED": "1"}
    try:
        done = subprocess.run(
            argv, stdin=subprocess.DEVNULL, capture_output=True, timeout=timeout_s, check=False, env=environ
        )
    except subprocess.TimeoutExpired as error:
        raise HostTextError(f"`{argv[0]}` did not end within {timeout_s:.0f} s", source=source) from error
    except OSError as error:
        raise HostTextError(f"`{argv[0]}` cannot be run: {error}", source=source) from error
    if done.returncode != 0:
        tail = "\n".join(done.stderr.decode("utf-8", "replace").strip().splitlines()[-10:])
        raise HostTextError(f"`{' '.join(argv)}` exited {done.returncode}:\n{tail}", source=source)
    return done.stdout.decode("utf-8", "replace")


def parse_slurm(environ: Mapping[str, str]) -> tuple[HostSpec, ...]:
    """The allocation of a SLURM job: its node list, and its tasks per node (`2(x3),1`) as slots."""
    listed = environ.get("SLURM_JOB_NODELIST") or environ.get("SLURM_NODELIST")
    if not listed:
        remedy = "run inside a job: `salloc -N 3` or `sbatch`"
        raise HostTextError("SLURM_JOB_NODELIST is not set", source="--hosts-from slurm", remedy=remedy)
    specs = parse_hosts(listed, source="SLURM_JOB_NODELIST")
    tasks = environ.get("SLURM_TASKS_PER_NODE")
    if not tasks:
        return specs
    place, counts = Place("SLURM_TASKS_PER_NODE"), []
    for item in tasks.split(","):
        match = re.fullmatch(r"([1-9][0-9]{0,4})(?:\(x([1-9][0-9]{0,4})\))?", item.strip())
        if match is None:
            raise place.error(f"got {tasks!r}, expected counts like `2(x3),1`", part=item)
        counts += [int(match[1])] * int(match[2] or 1)
        if len(counts) > len(specs):
            break
    if len(counts) != len(specs):
        raise place.error(f"{tasks!r} does not fit the {len(specs)} nodes of {listed!r}", part=tasks)
    return tuple(dataclasses.replace(spec, slots=count) for spec, count in zip(specs, counts))


def from_ssh_config_text(text: str, source: str, slots: int | None) -> Cluster:
    """The hosts that an SSH configuration names outright (no wildcards), each with its settings there."""
    settings = parse_ssh_config([(source, text, os.path.expanduser("~/.ssh"))], lambda pattern, folder: [])
    words = re.findall(r"(?im)^[ \t]*host(?:[ \t]+|[ \t]*=[ \t]*)(.+?)[ \t\r]*$", text)
    names = [name.strip('"') for line in words for name in line.split() if not re.search(r"[*?!]", name)]
    specs: list[HostSpec] = []
    for name in dict.fromkeys(names):
        specs += parse_hosts(name, source=source)
    if not specs:
        raise HostTextError("names no host", source=source, remedy="expected `Host NAME` lines")
    return cluster_of(specs, settings, slots)


def cluster_of(specs: Sequence[HostSpec], settings: SSHSettings, slots: int | None) -> Cluster:
    """Fills what the texts left open from the SSH configuration, and gives every node its name."""
    if len(specs) == 1 and specs[0].is_local:
        here = dataclasses.replace(LOCAL, slots=specs[0].slots, max_slots=specs[0].max_slots)
        return with_slots(Cluster(nodes=(here,)), slots if here.slots is None else None)
    for spec in specs:
        if spec.is_local:
            raise spec.place.error(
                "localhost is another machine on every host",
                part=spec.host,
                remedy="beside other hosts, name this machine as they know it",
            )
    filled = merge_mentions(apply_ssh_config(spec, settings) for spec in specs)
    names = node_names(filled)
    nodes = tuple(_node(spec, name, slots) for spec, name in zip(filled, names))
    if all(node.slots == 0 for node in nodes):
        raise specs[0].place.error("every host has 0 slots", remedy="give at least one host slots=1 or more")
    return Cluster(nodes=nodes)


def _node(spec: HostSpec, name: str, slots: int | None) -> Node:
    given = slots if spec.slots is None else spec.slots
    if given is not None and spec.max_slots is not None and given > spec.max_slots:
        raise spec.place.error(
            f"{name}: {given} slots are more than its max_slots={spec.max_slots}", part=name
        )
    return Node(
        name=name,
        host=spec.host,
        user=spec.user,
        port=spec.port,
        slots=given,
        max_slots=spec.max_slots,
        identity_files=spec.identity_files,
        identities_only=spec.identities_only,
        proxy_jump=spec.proxy_jump,
    )


def node_names(specs: Sequence[HostSpec]) -> list[str]:
    """One name a node that mpirun accepts: `_` becomes `-`, an IPv6 address `ip6-fe80--1`.

    Hosts that differ only by their port (forwarded ports of one address) get it as suffix: `127-0-0-1-2222`.
    """
    plain = [_plain_name(spec.alias or spec.host) for spec in specs]
    counts = Counter(name.lower() for name in plain)
    names = [
        f"{name.replace('.', '-')}-{spec.port or 22}" if counts[name.lower()] > 1 else name
        for name, spec in zip(plain, specs)
    ]
    for i, name in enumerate(names):
        if name.lower() in (other.lower() for other in names[:i]):
            raise specs[i].place.error(f"two hosts would both be called {name!r}", part=name)
    return names


def _plain_name(host: str) -> str:
    return "ip6-" + re.sub("[:%_]", "-", host).strip("-") if ":" in host else host.replace("_", "-")


def with_slots(cluster: Cluster, slots: int | None) -> Cluster:
    """The cluster with `slots` on every node that runs ranks; None changes nothing."""
    if slots is None:
        return cluster
    for node in cluster.nodes:
        if node.max_slots is not None and slots > node.max_slots:
            raise UsageError(f"--slots: {slots} is above {node.name}'s max_slots={node.max_slots}")
    return dataclasses.replace(
        cluster,
        nodes=tuple(
            node if node.slots == 0 else dataclasses.replace(node, slots=slots) for node in cluster.nodes
        ),
    )
