"""One installer on one node: its argv, its one word of output, its exit status as an error."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from provision.cluster import Node
from provision.errors import StepFailed
from provision.staging import scripts_path
from provision.transport import Connections

CHANGED, UNCHANGED, WOULD_CHANGE = "changed", "unchanged", "would-change"
WORDS = (CHANGED, UNCHANGED, WOULD_CHANGE)
# A source build of Open MPI takes 5 minutes on 2 cores; an hour covers a slow single core.
STEP_TIMEOUT_S = 3600.0
CHECK_TIMEOUT_S = 120.0
SCRIPTS = {
    "ssh_mesh": "setup_ssh_mesh.sh",
    "python": "install_python.sh",
    "openmpi": "install_openmpi.sh",
    "runtime": "install_runtime.sh",
}
MEANINGS = {
    64: "wrong usage",
    65: "a checksum or file is wrong",
    69: "something is missing on this host",
    75: "another run holds the lock",
    126: "the installer cannot be run",
    127: "the installer is not there",
}
REMEDIES = {
    75: "wait for the other run to end, then run the same command again",
    69: "install what is named above and run the same command again",
}


@dataclass
class Installer:
    """Runs installers on nodes and keeps what they say on standard error in one log file per node."""

    connections: Connections
    prefixes: dict[str, str]
    log_dir: Path
    on_progress: Callable[[str, str, str], None] = lambda node, step, line: None
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def run(self, node: Node, step: str, args: Sequence[str], *, check: bool = False) -> str:
        """Run the step's script and return its word; with `check` it only looks."""
        argv = ["bash", f"{scripts_path(node, self.prefixes[node.name])}/{SCRIPTS[step]}"]
        argv += [f"--prefix={self.prefixes[node.name]}", *args, *(["--check"] if check else [])]
        log = self.log_dir / f"{node.name}.log"

        def keep(stream: str, line: str) -> None:
            if stream == "stderr":
                with self._lock, log.open("a", encoding="utf-8") as out:
                    out.write(f"[{step}] {line}\n")
                if not check:
                    self.on_progress(node.name, step, line)

        result = self.connections.to(node).run(
            argv, timeout_s=CHECK_TIMEOUT_S if check else STEP_TIMEOUT_S, check=False, on_line=keep
        )
        word = result.stdout.strip()
        if result.status == 0 and word in WORDS:
            return word
        tail = "\n".join(f"    {line}" for line in result.stderr.rstrip().splitlines()[-10:])
        if result.status == 0:
            message = f"printed {word!r}, expected one of {', '.join(WORDS)}\n{tail}"
        else:
            meaning = MEANINGS.get(result.status)
            message = f"exited {result.status}{f' ({meaning})' if meaning else ''}, expected 0\n{tail}\n  log: {log}"
        raise StepFailed(node.name, step, message, status=result.status, remedy=REMEDIES.get(result.status))
