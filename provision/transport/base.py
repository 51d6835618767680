"""What every transport offers, and the values it returns."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from provision.cluster import Node

OnLine = Callable[[str, str], None]  # ("stdout" | "stderr", a whole line without its newline)


@dataclass(frozen=True)
class Result:
    """How a command ended. `status` is 128+n for signal n.

    Text is UTF-8 with undecodable bytes replaced; of a stream of more than 8 MiB only the first and last
    4 MiB are kept, with a line between them that says so.
    """

    node: str
    argv: tuple[str, ...]
    status: int
    stdout: str
    stderr: str
    duration_s: float
    noise: str = ""  # what the host's login files printed before the command began


@dataclass(frozen=True)
class TreeChange:
    """What `put_tree` did; paths relative to the tree, sorted."""

    sent: tuple[str, ...]
    deleted: tuple[str, ...]
    unchanged: int

    @property
    def changed(self) -> bool:
        return bool(self.sent or self.deleted)


class Transport(Protocol):
    """Runs commands on one node and moves files to and from it; safe to use from several threads.

    A remote path or `cwd` may begin with `$HOME/` or `~/` (the node's own home); a relative one is taken from
    there. Errors: NodeUnreachable, HostKeyChanged, DeadlineExceeded, and CommandFailed.
    """

    @property
    def node(self) -> Node: ...

    def run(
        self,
        argv: Sequence[str],
        *,
        env: Mapping[str, str] | None = None,
        cwd: str | None = None,
        stdin: bytes | None = None,
        timeout_s: float,
        check: bool = True,
        on_line: OnLine | None = None,
    ) -> Result:
        """Runs `argv` in the node's home, or in `cwd`, with the node's login environment and `env`.

        Without `stdin` it reads /dev/null. Either way it ends with the controller: at the deadline, or when the
        controller dies or is silent for 120 s, its process group gets TERM, and KILL 5 s later. `on_line` is
        called in this thread, with lines of both streams as they come (a line over 1 MiB in pieces).
        With `check` a status other than 0 raises CommandFailed.
        """
        ...

    def put(self, source: Path, dest: str, *, mode: int = 0o644, timeout_s: float) -> None:
        """Copies a file; `dest` is the old file or the whole new one, never more open than `mode`.

        Written under a temporary name in the same directory (made if missing), its SHA-256 compared, renamed.
        """
        ...

    def get(self, source: str, dest: Path, *, timeout_s: float) -> None:
        """Copies a file here, up to the size it had when the copy began; verified and renamed like `put`."""
        ...

    def put_tree(
        self,
        source: Path,
        dest: str,
        *,
        exclude: Sequence[str] = (),
        delete: bool = False,
        timeout_s: float,
    ) -> TreeChange:
        """Makes `dest` hold the files, directories and symbolic links of `source`; sends what differs.

        `exclude`: fnmatch patterns for a name or a relative path. With `delete`, other files in `dest` go,
        except excluded ones. A link that leads out of `source` is a UsageError.
        """
        ...

    def close(self) -> None:
        """Ends what still runs and the connection; never raises, never waits for the network."""
        ...
