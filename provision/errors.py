"""Every error the controller raises on purpose, each with the exit status its task ends with.

RingmasterError             1  base
+-- UsageError              2  the command line or an input file is wrong; nothing was contacted
|   +-- HostTextError       2  host text, hostfile or inventory: file, line, the faulty part
+-- NodeError               3  something about one node
|   +-- NodeUnreachable     3  no SSH session (refused, timed out, unresolvable, authentication)
|   +-- HostKeyChanged      3  the host key differs from the pinned one
|   +-- CommandFailed       3  a command ended with an unexpected status
|   +-- DeadlineExceeded    3  a command or transfer did not end in time
|   +-- StepFailed          3  an installer step failed
+-- ArtifactError           4  a source archive or wheel: missing, unreachable, wrong checksum
+-- PreconditionError      69  something must be installed or changed first; the message says what
+-- LaunchError             5  the job was refused before it started
+-- Busy                   75  another run is at work here; try again later
+-- NodesFailed             3  several nodes; holds one error per node
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence


class RingmasterError(Exception):
    """Base of all expected errors. `str(error)` is one message: subject, got, expected, what to do.

    `remedy` is the "what to do" part, kept apart so that reports can show it in a column of its own.
    """

    exit_status = 1

    def __init__(self, message: str, *, remedy: str | None = None) -> None:
        message = message.rstrip()
        # After several lines a remedy needs one of its own to be seen.
        between = "\n-> " if "\n" in message else "; "
        super().__init__(message if remedy is None else f"{message}{between}{remedy}")
        self.message = message
        self.remedy = remedy


class UsageError(RingmasterError):
    exit_status = 2


class HostTextError(UsageError):
    """Host text that cannot be understood. `part` is the faulty piece, `source` names file or option."""

    def __init__(
        self,
        message: str,
        *,
        part: str = "",
        source: str | None = None,
        line: int | None = None,
        remedy: str | None = None,
    ) -> None:
        where = "" if source is None else source if line is None else f"{source}:{line}"
        super().__init__(f"{where}: {message}" if where else message, remedy=remedy)
        self.part = part
        self.source = source
        self.line = line


class NodeError(RingmasterError):
    """Something about one node; the message starts with the node's name."""

    exit_status = 3

    def __init__(self, node: str, message: str, *, remedy: str | None = None) -> None:
        super().__init__(f"{node}: {message}", remedy=remedy)
        self.node = node


class NodeUnreachable(NodeError):
    pass


class HostKeyChanged(NodeError):
    pass


class CommandFailed(NodeError):
    """A remote command ended with an unexpected status; keeps the argv, status and both streams' tails."""

    def __init__(
        self,
        node: str,
        argv: Sequence[str],
        status: int,
        stdout: str = "",
        stderr: str = "",
        *,
        remedy: str | None = None,
    ) -> None:
        tail = "\n".join((stderr or stdout).rstrip().splitlines()[-10:])
        shown = " ".join(" ".join(argv[:6]).split())
        if len(argv) > 6 or len(shown) > 160:
            shown = f"{shown[:160]} …"
        text = f"`{shown}` exited {status}, expected 0"
        super().__init__(node, f"{text}\n{tail}" if tail else text, remedy=remedy)
        self.argv = tuple(argv)
        self.status = status
        self.stdout = stdout
        self.stderr = stderr


class DeadlineExceeded(NodeError):
    pass


class StepFailed(NodeError):
    def __init__(self, node: str, step: str, message: str, *, status: int, remedy: str | None = None) -> None:
        super().__init__(node, f"step {step} {message}", remedy=remedy)
        self.step = step
        self.status = status


class ArtifactError(RingmasterError):
    exit_status = 4


class PreconditionError(RingmasterError):
    exit_status = 69


class LaunchError(RingmasterError):
    exit_status = 5


class Busy(RingmasterError):
    exit_status = 75


class NodesFailed(RingmasterError):
    """One or more nodes failed; `errors` maps node name to its error, in cluster order."""

    exit_status = 3

    def __init__(self, what: str, errors: Mapping[str, RingmasterError], total: int) -> None:
        lines = [f"{what}: {len(errors)} of {total} nodes failed"]
        lines += [f"  {error}" for error in errors.values()]
        super().__init__("\n".join(lines))
        self.errors = dict(errors)
