"""The judges of single nodes and pairs: evidence in, findings out; pure."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from provision.facts import Gpu
from provision.healthcheck.evidence import Evidence
from provision.healthcheck.model import FAILED, INFO, OK, WARNING, Finding
from provision.launch.preflight import NODE_TIMEOUT_S

PROVISION = "fab provision"
CLOCK_LIMIT_S = 5.0
DISK_LIMIT_BYTES = 1_000_000_000
STACK = "tf1"


def reach(evidence: Evidence, name: str) -> Finding:
    error = evidence.unreachable.get(name)
    if error is None:
        return Finding(OK, "answers")
    return Finding(
        FAILED,
        error.message.removeprefix(f"{name}: "),
        error.remedy or f"ssh -v {evidence.cluster.node(name).host} true",
    )


def login_noise(evidence: Evidence, name: str) -> Finding:
    lines = evidence.looks[name].noise.strip().splitlines()
    if not lines:
        return Finding(OK, "login files print nothing")
    return Finding(
        WARNING,
        f"login files print {len(lines)} lines, first {lines[0][:60]!r}; harmless here, but it breaks scp and sftp",
        "put `[[ $- == *i* ]] || return` at the top of ~/.bashrc there",
    )


def clock(evidence: Evidence, name: str) -> Finding:
    look = evidence.looks[name]
    offset = abs(look.clock_offset_s)
    if offset - look.clock_error_s > CLOCK_LIMIT_S:
        which = "ahead" if look.clock_offset_s > 0 else "behind"
        return Finding(
            FAILED,
            f"clock {offset:.0f} s {which} of this machine, expected at most {CLOCK_LIMIT_S:g} s",
            "timedatectl set-ntp true",
        )
    return Finding(OK, f"clock within {CLOCK_LIMIT_S:g} s")


def disk(evidence: Evidence, name: str) -> Finding:
    facts = evidence.facts[name]
    free = facts.disk.prefix_free_bytes
    if free is None:
        return Finding(
            WARNING, "free space could not be read", f"ssh {evidence.cluster.node(name).host} df -h"
        )
    if free < DISK_LIMIT_BYTES:
        need = f"expected at least {DISK_LIMIT_BYTES / 1e9:g} GB"
        return Finding(FAILED, f"{free / 1e9:.2f} GB free at {facts.prefix}, {need}", f"df -h {facts.prefix}")
    return Finding(OK, f"more than {DISK_LIMIT_BYTES / 1e9:g} GB free")


def cpu(evidence: Evidence, name: str) -> Finding:
    facts = evidence.facts[name]
    if facts.has_avx is None:
        return Finding(WARNING, "CPU flags could not be read", "grep flags /proc/cpuinfo")
    if not facts.has_avx:
        return Finding(
            FAILED,
            f"the CPU ({facts.cpu.model}) has no AVX: TensorFlow would end with 'Illegal instruction'",
            f"fab provision --hosts {','.join(n for n in evidence.cluster.names if n != name) or 'OTHER'}",
        )
    return Finding(OK, "has AVX")


def openmpi(evidence: Evidence, name: str) -> Finding:
    expected = evidence.expected_mpi
    installed = evidence.facts[name].openmpi
    if installed is None:
        return Finding(FAILED, f"Open MPI is missing, expected {expected or 'one'}", PROVISION)
    answer = evidence.answers.get(name)
    started = answer.facts.get("openmpi", "") if answer is not None and answer.status == 0 else ""
    for got, what in ((installed.version, "mpirun"), (started or installed.version, "orted")):
        if got != expected:
            return Finding(FAILED, f"{what} says {got or 'nothing'}, expected Open MPI {expected}", PROVISION)
    return Finding(OK, f"Open MPI {expected}")


def stack(evidence: Evidence, name: str) -> Finding:
    wanted = evidence.cluster.stack or STACK
    found = evidence.facts[name].stacks.get(wanted)
    if found is None:
        return Finding(FAILED, f"the {wanted} stack is missing", PROVISION)
    return Finding(OK, f"{wanted}, Python {found.python}")


def packages(evidence: Evidence, name: str) -> Finding:
    found = evidence.facts[name].stacks.get(evidence.cluster.stack or STACK)
    wrong = list(drift(evidence.lock, found.packages if found is not None else {}))
    if not wrong:
        return Finding(OK, f"{len(evidence.lock)} packages as locked")
    more = f" and {len(wrong) - 3} more" if len(wrong) > 3 else ""
    return Finding(FAILED, "; ".join(wrong[:3]) + more, PROVISION)


def drift(expected: Mapping[str, str], found: Mapping[str, str]) -> Iterator[str]:
    """`protobuf 4.24.4, expected 3.20.3` for every package that is not as locked."""
    have = {normal(package): version for package, version in found.items()}
    for package, version in expected.items():
        got = have.get(normal(package))
        if got is None:
            yield f"{package} is missing, expected {version}"
        elif got.partition("+")[0] != version.partition("+")[0]:
            yield f"{package} {got}, expected {version}"


def normal(package: str) -> str:
    """A package's name as indexes compare it."""
    return package.lower().replace("_", "-").replace(".", "-")


def gpus(evidence: Evidence, name: str) -> Finding:
    own = evidence.facts[name].gpus
    if own is None:
        return Finding(WARNING, "GPUs could not be listed", "nvidia-smi")
    shown = described(own)
    kinds = [described(facts.gpus) for facts in evidence.facts.values() if facts.gpus is not None]
    usual = max(kinds, key=kinds.count)
    slots = evidence.cluster.node(name).slots
    if own and slots is not None and slots > len(own):
        return Finding(
            FAILED,
            f"{slots} slots on {len(own)} GPUs: each rank needs one of its own",
            f"fab provision --slots {len(own)}",
        )
    if shown != usual and kinds.count(usual) > kinds.count(shown):
        return Finding(WARNING, f"{shown}, while most hosts have {usual}", "nvidia-smi")
    return Finding(INFO if not own else OK, shown if own else "none: ranks run on the CPU")


def described(found: Sequence[Gpu]) -> str:
    """`4 x Tesla V100`, or `no GPU`."""
    names = [each.name or "GPU" for each in found]
    kinds = {name: names.count(name) for name in names}
    return ", ".join(f"{count} x {name}" for name, count in kinds.items()) or "no GPU"


def ssh_mesh(evidence: Evidence, name: str) -> Finding:
    answer = evidence.answers.get(name)
    assert evidence.launcher is not None
    if answer is None:
        return Finding(
            FAILED, evidence.unasked.get(name, "was not asked").removeprefix(f"{name}: "), PROVISION
        )
    if answer.status == 0:
        return Finding(OK, "reached over mpirun's own path")
    last = " | ".join(answer.text.splitlines()[-2:])
    if answer.status == 124:
        return Finding(
            FAILED,
            f"no answer within {NODE_TIMEOUT_S:g} s {last}".rstrip(),
            f"ssh {evidence.launcher.name} ping -c 3 {evidence.cluster.node(name).address or name}",
        )
    return Finding(FAILED, f"status {answer.status}: {last}", PROVISION)
