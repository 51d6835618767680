"""What every node says about itself over mpirun's own path, and whether a job may start."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from provision.cluster import Cluster, Node
from provision.errors import LaunchError
from provision.launch.ship import prefix_of
from provision.transport import Transport

NODE_TIMEOUT_S = 20.0
_FACTS = (
    "hostname",
    "uid",
    "prefix",
    "openmpi",
    "python",
    "stack",
    "built_with",
    "gpus",
    "ptrace_scope",
    "project",
)
_PROVISION = "run `fab provision`"
_EXIT_MISSING = 69  # of scripts/node: something that provisioning brings is not there
_OWN_REMEDY = re.compile(r"; run `?fab provision`?$")
_AGAIN = "run the same `fab train` again, or give one version of the project a folder of another name"


@dataclass(frozen=True)
class Answer:
    """One node's answer: `facts` are node_check.sh's key=value lines, `text` all else it or SSH said."""

    node: str
    status: int
    facts: Mapping[str, str]
    text: str = ""

    @property
    def gpus(self) -> int | None:
        value = self.facts.get("gpus", "")
        return int(value) if value.isdigit() else None

    @property
    def single_copy(self) -> bool:
        """Whether one rank may read another's memory (the kernel's ptrace rules)."""
        return self.facts.get("ptrace_scope", "0") == "0"


def ask(cluster: Cluster, head: Transport, nodes: Sequence[Node], project: str = "-") -> dict[str, Answer]:
    """Asks all `nodes` at once from the head, over rsh_agent.sh; the answers by node name, in order."""
    prefix = prefix_of(cluster.head)
    names = {("localhost" if node.name == cluster.head.name else node.name): node.name for node in nodes}
    argv = [f"{prefix}/libexec/preflight.sh", f"{NODE_TIMEOUT_S:g}", project, *names]
    rounds = 1 + len(nodes) // 32
    result = head.run(
        argv, env={"RINGMASTER_STACK": cluster.stack or "tf1"}, timeout_s=(NODE_TIMEOUT_S + 10) * rounds
    )
    return parse(result.stdout, names)


def parse(text: str, names: Mapping[str, str]) -> dict[str, Answer]:
    """preflight.sh's output; `names` maps the host as asked to the node's name."""
    statuses: dict[str, int] = {}
    facts: dict[str, dict[str, str]] = {}
    other: dict[str, list[str]] = {}
    for line in text.split("\n"):
        host, tab, rest = line.partition("\t")
        status, tab, said = rest.partition("\t")
        if not tab or host not in names:
            continue
        statuses[host] = int(status)
        key, equals, value = said.partition("=")
        if equals and key in _FACTS:
            facts.setdefault(host, {})[key] = value
        elif said:
            other.setdefault(host, []).append(said)
    return {
        node: Answer(node, statuses.get(host, 125), facts.get(host, {}), "\n".join(other.get(host, ())))
        for host, node in names.items()
    }


def problems(
    cluster: Cluster, answers: Mapping[str, Answer], *, project_digest: str | None = None
) -> list[tuple[str, str, str]]:
    """What forbids a launch, as (node, what, remedy), in node order; empty when all is well."""
    found = []
    head = answers.get(cluster.head.name)
    version = (cluster.mpi or {}).get("version") or (head.facts.get("openmpi", "") if head else "")
    stack = head.facts.get("stack", "") if head else ""
    of_stack = f"run `fab provision --stack {cluster.stack}`"
    for name, answer in answers.items():
        if answer.status != 0:
            found.append((name, *_no_answer(cluster, answer)))
            continue
        got = answer.facts.get("openmpi", "")
        if got != version:
            what = f"Open MPI {got or 'of unknown version'}, expected {version}"
            if got.startswith("broken: "):
                what = f"its Open MPI is {got}"
            found.append((name, what, _PROVISION))
        python = answer.facts.get("python", "")
        if python == "missing":
            found.append((name, f"the stack {cluster.stack} is not installed", of_stack))
        elif not python.startswith(("2.", "3.")):
            found.append((name, f"the {cluster.stack} stack's python does not run", of_stack))
        elif answer.facts.get("stack", "") != stack:
            shown = answer.facts.get("stack", "")[:12] or "none"
            found.append((name, f"stack {shown}, expected {stack[:12] or 'none'} as on the head", of_stack))
        elif got == version and answer.facts.get("built_with") == "other":
            found.append(
                (name, f"the stack {cluster.stack} was built with another Open MPI than {got}", of_stack)
            )
        if project_digest is not None and answer.facts.get("project") != f"ok {project_digest}":
            found.append((name, _project_words(answer.facts.get("project", "unknown")), _AGAIN))
    return found


def _project_words(state: str) -> str:
    """node_check.sh's word for a project that is not as it was sent, in full."""
    what, _, detail = state.partition(" ")
    if what == "ok":
        return "holds another version of the project, sent at the same time"
    if what == "differs":
        return f"a file of the project is no longer as it was sent: {detail}"
    return f"the shipped project: {state}"


def _no_answer(cluster: Cluster, answer: Answer) -> tuple[str, str]:
    last = " | ".join(answer.text.splitlines()[-3:])
    if answer.status == 124:
        return f"did not answer the head within {NODE_TIMEOUT_S:g} s ({last or 'no output'})", (
            f"look at the network between {cluster.head.name} and {answer.node}"
        )
    if answer.status == 255:
        return f"cannot be reached from {cluster.head.name} over SSH: {last}", (
            "run `fab provision`, which sets up SSH between the nodes"
        )
    if answer.status == _EXIT_MISSING:
        # The helper names its host and what to do, as all who answer so; here both are said once for every node.
        said = _OWN_REMEDY.sub("", last.removeprefix(f"{answer.node}: ")) or "something is missing"
        return said, _PROVISION
    return f"answered the head with status {answer.status}: {last}", _PROVISION


def refuse(cluster: Cluster, found: Sequence[tuple[str, str, str]], total: int) -> None:
    """LaunchError that names every problem; returns when there is none."""
    if not found:
        return
    bad = len({name for name, _, _ in found})
    lines = "\n".join(f"  {name}: {what}; {remedy}" for name, what, remedy in found)
    raise LaunchError(f"{bad} of {total} nodes cannot take part in the job\n{lines}")
