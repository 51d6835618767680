"""Carries a plan out: every step on every node, built once per platform, resumable at any point."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from provision import network, paths, staging
from provision.apply.mesh import cluster_id, step_ssh_mesh
from provision.apply.openmpi import step_openmpi
from provision.apply.run import Given, Run, StepRow
from provision.apply.stack import step_python, step_runtime
from provision.cluster import Cluster, Node
from provision.errors import NodeError, RingmasterError
from provision.facts import NodeFacts, gather
from provision.fanout import Outcome, fan_out
from provision.plan import CONTROLLER, STEPS, Options, Plan, make_plan
from provision.steps import UNCHANGED, Installer
from provision.transport import Connections

FACTS_TIMEOUT_S = 60.0


@dataclass(frozen=True)
class Provisioned:
    """`cluster` holds the nodes that are ready (and the others as left out), or None when none is; `errors` by name."""

    cluster: Cluster | None
    rows: tuple[StepRow, ...]
    errors: Mapping[str, RingmasterError]
    plan: Plan


def gather_facts(
    cluster: Cluster, connections: Connections
) -> tuple[dict[str, NodeFacts], dict[str, RingmasterError]]:
    """Ask every node for its facts; the unreachable ones come back as errors."""
    outcomes: dict[str, Outcome[NodeFacts]] = fan_out(
        cluster.nodes,
        lambda node: gather(connections.to(node), paths.scripts_dir(), cluster.prefix),
        deadline_s=FACTS_TIMEOUT_S,
        what="asking for facts",
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


def ready_cluster(
    cluster: Cluster, facts: Mapping[str, NodeFacts], options: Options, id_text: str | None
) -> Cluster:
    """What cluster.json will hold once the nodes in `facts` are ready."""
    return dataclasses.replace(
        resolve_nodes(cluster, facts),
        id=id_text,
        stack=options.stack,
        mpi=options.mpi.as_saved(),
    )


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
    controller = controller_facts(connections)
    plan = make_plan(cluster, facts, options, controller=controller)
    on_plan(plan)
    errors.update(plan.errors)
    usable = {name: facts[name] for name in plan.node_names}
    if not usable:
        return Provisioned(None, (), errors, plan)
    logs = state_dir / "logs" / time.strftime("provision-%Y%m%d-%H%M%S")
    logs.mkdir(parents=True, exist_ok=True)
    ready = ready_cluster(cluster, usable, options, cluster_id(state_dir))
    prefixes = {name: own.prefix for name, own in usable.items()}
    run = Run(
        cluster=ready,
        options=options,
        given=given or Given(),
        connections=connections,
        installer=Installer(connections, prefixes, logs, on_progress),
        facts=usable,
        plan=plan,
        controller=controller,
        on_row=on_row,
        errors=dict(errors),
    )
    pushed = fan_out(
        run.active(plan.node_names),
        lambda node: staging.push_scripts(connections, node, prefixes[node.name]),
        deadline_s=staging.SCRIPT_TIMEOUT_S * 2,
        what="copying the installers",
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
        lambda node: staging.drop_staging(connections, node, run.places()[node.name]),
        deadline_s=staging.SCRIPT_TIMEOUT_S * 2,
        what="tidying up",
    )
    share_results(run)
    good = tuple(node for node in ready.nodes if node.name not in run.errors)
    left_out = tuple(node for node in cluster.nodes if node.name in run.errors)
    result = dataclasses.replace(ready, nodes=good, left_out=left_out) if good else None
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
