"""What a node says of itself: scripts/probe.sh's JSON as a value, and how it is asked for."""

from __future__ import annotations

import json
from pathlib import Path

from provision.errors import CommandFailed, NodeError, UsageError
from provision.facts.reader import Reader
from provision.facts.values import (
    Cpu,
    Cuda,
    Disk,
    Gpu,
    Interface,
    NodeFacts,
    OpenMPI,
    OperatingSystem,
    Python,
    SshServer,
    Stack,
)
from provision.transport import Transport

__all__ = [
    "Cpu",
    "Cuda",
    "Disk",
    "Gpu",
    "Interface",
    "NodeFacts",
    "OpenMPI",
    "OperatingSystem",
    "Python",
    "SshServer",
    "Stack",
    "gather",
    "parse_facts",
]

SCHEMA = 1
PROBE_TIMEOUT_S = 60.0

# A leading $HOME is the node's own; the script itself comes on standard input, nothing is left there.
_START = (
    'case $1 in "\\$HOME" | "\\$HOME/"*) set -- "$HOME${1#"\\$HOME"}" ;; esac; exec bash -s -- "--prefix=$1"'
)


def gather(transport: Transport, scripts: Path, prefix: str) -> NodeFacts:
    """Asks the node; NodeError if its answer is no set of facts, else the transport's own errors."""
    path = scripts / "probe.sh"
    try:
        script = path.read_bytes()
    except OSError as error:
        raise UsageError(f"{path} cannot be read: {error.strerror}") from error
    argv = ["bash", "-c", _START, "probe", prefix]
    result = transport.run(argv, stdin=script, timeout_s=PROBE_TIMEOUT_S, check=False)
    if result.status != 0:
        raise CommandFailed(
            transport.node.name,
            ["probe.sh", f"--prefix={prefix}"],
            result.status,
            result.stdout,
            result.stderr,
        )
    return parse_facts(result.stdout, transport.node.name)


def parse_facts(text: str, node: str) -> NodeFacts:
    """Reads probe.sh's JSON; NodeError names the key that is missing or of the wrong kind."""
    try:
        value = json.loads(text)
    except ValueError as error:
        shown = text.strip()[:80]
        raise NodeError(node, f"probe.sh printed {shown!r}, expected one JSON object ({error})") from error
    facts = Reader(node, "", value, value.get("unknown") if isinstance(value, dict) else None)
    if facts.integer("schema") != SCHEMA:
        text = f"probe.sh speaks schema {value.get('schema')!r}, expected {SCHEMA}"
        raise NodeError(node, text, remedy="use the probe.sh of this installation")
    home, prefix = facts.must("home", facts.text), facts.must("prefix", facts.text)
    if not prefix.startswith("/"):
        raise NodeError(node, f"probe.sh: `prefix` is {prefix!r}, expected an absolute path")
    return NodeFacts(
        hostname=facts.text("hostname"),
        fqdn=facts.text("fqdn"),
        user=facts.must("user", facts.text),
        uid=facts.must("uid", facts.integer),
        home=home,
        shell=facts.text("shell"),
        kernel=facts.text("kernel"),
        arch=facts.text("arch"),
        glibc=facts.text("glibc"),
        clock_epoch_s=facts.number("clock_epoch_s"),
        os=_os(facts.sub("os")),
        cpu=_cpu(facts.sub("cpu")),
        memory_bytes=facts.integer("memory_bytes"),
        disk=_disk(facts.sub("disk")),
        gpus=facts.items("gpus", _gpu),
        cuda=facts.optional("cuda", lambda it: Cuda(it.text("home"), it.text("version"))),
        interfaces=facts.items("interfaces", _interface),
        ssh_server=facts.optional("ssh_server", lambda it: SshServer(it.text("address"), it.integer("port"))),
        host_keys=facts.texts("host_keys"),
        tools=facts.tools("tools"),
        pythons=facts.items("pythons", _python),
        sudo=facts.text("sudo"),
        ptrace_scope=facts.integer("ptrace_scope"),
        prefix=prefix,
        home_token=facts.text("home_token"),
        openmpi=facts.optional("openmpi", _openmpi),
        stacks={name: _stack(facts.sub("stacks").sub(name)) for name in facts.sub("stacks").names()},
        manifest=facts.mapping("manifest"),
        unknown={str(key): str(why) for key, why in (facts.mapping("unknown") or {}).items()},
    )


def _os(it: Reader) -> OperatingSystem:
    return OperatingSystem(it.text("id"), it.text("version"), it.text("pretty"))


def _cpu(it: Reader) -> Cpu:
    return Cpu(it.integer("count"), it.text("model"), it.texts("flags"))


def _disk(it: Reader) -> Disk:
    return Disk(it.integer("prefix_free_bytes"), it.integer("tmp_free_bytes"), it.boolean("tmp_noexec"))


def _gpu(it: Reader) -> Gpu:
    index = it.must("index", it.integer)
    return Gpu(index, it.text("name"), it.integer("memory_mib"), it.text("driver"))


def _interface(it: Reader) -> Interface:
    return Interface(
        name=it.must("name", it.text),
        up=it.must("up", it.boolean),
        loopback=it.must("loopback", it.boolean),
        mtu=it.integer("mtu"),
        cidrs=it.texts("cidrs") or (),
    )


def _python(it: Reader) -> Python:
    usable = it.must("usable", it.boolean)
    return Python(it.must("path", it.text), it.text("version"), usable, it.text("problem"))


def _openmpi(it: Reader) -> OpenMPI:
    return OpenMPI(it.text("version"), it.text("from"), it.text("digest"), it.text("path"))


def _stack(it: Reader) -> Stack:
    packages = {name: str(version) for name, version in (it.mapping("packages") or {}).items()}
    return Stack(it.text("python"), it.text("digest"), packages, it.mapping("horovod_build") or {})
