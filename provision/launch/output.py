"""Shows a running job: whole lines with their rank, one log per rank, and what each rank ended with."""

from __future__ import annotations

import re
import shutil
import sys
import threading
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol, TextIO

from provision.launch.demux import Demux, Event, Lines, MpirunText, RankData, RankEnd
from provision.launch.runs import Run

# Said by mpirun 3.1 to 4.1 when the connection to a node's daemon is gone: cut off, switched off, or the daemon died.
_LOST_DAEMON = re.compile(r"^\s*Remote daemon: +\[.*\] on node (\S+)$")
ERROR_LINES = 12  # of a failing rank's standard error, shown with its name
# The child was quicker than its parent; mpirun goes on as if nothing had been.
_HARMLESS = re.compile(r"plm:rsh: Warning: setpgid\(.*\) failed in parent")


class Screen(Protocol):
    """Where lines go; the stream is "out" or "err"."""

    def line(self, rank: int | None, stream: str, text: str) -> None: ...

    def progress(self, rank: int, text: str) -> bool:
        """Show a rank's unfinished line; says whether it was shown."""
        ...


@dataclass
class TerminalScreen:
    """`[rank] line` on standard output or standard error; rank 0's progress line is redrawn on a terminal."""

    out: TextIO = field(default_factory=lambda: sys.stdout)
    err: TextIO = field(default_factory=lambda: sys.stderr)
    _drawn: bool = False

    def line(self, rank: int | None, stream: str, text: str) -> None:
        self._clear()
        target = self.out if stream == "out" else self.err
        target.write(text + "\n" if rank is None else f"[{rank}] {text}\n")
        target.flush()

    def progress(self, rank: int, text: str) -> bool:
        if not self.err.isatty():
            return False
        self._clear()
        width = shutil.get_terminal_size().columns - 1
        self.err.write(f"[{rank}] {text}"[:width])
        self.err.flush()
        self._drawn = True
        return True

    def _clear(self) -> None:
        if self._drawn:
            self.err.write("\r\x1b[K")
            self.err.flush()
            self._drawn = False


class JobOutput:
    """Takes mpirun's output as it comes, from any thread: logs it, shows it, keeps how ranks ended."""

    def __init__(self, run: Run, screen: Screen, np: int) -> None:
        self._run = run
        self._screen = screen
        self._lock = threading.Lock()
        self._demux = Demux()
        self._lines = {(rank, stream): Lines() for rank in range(np) for stream in ("out", "err")}
        self._bytes = dict.fromkeys(self._lines, 0)
        self._progress_drawn = False
        self._last_errors: dict[int, list[str]] = {}
        self.mpirun_lines: list[str] = []
        self.lost_hosts: list[str] = []  # as mpirun calls them; only those lost before any rank failed
        self.ends: list[RankEnd] = []  # in order of arrival

    def on_line(self, stream: str, line: str) -> None:
        """A line of mpirun's "stdout" or "stderr", without its line end."""
        with self._lock:
            if stream == "stderr":
                self._take([MpirunText(line)])
            else:
                self._take(self._demux.feed(line + "\n"))

    def close(self) -> None:
        with self._lock:
            self._take(self._demux.close())
            for (rank, stream), lines in self._lines.items():
                # A progress bar that was drawn and taken back is not the program's last word.
                if not (rank == 0 and self._progress_drawn and lines.is_taken_back):
                    self._show(rank, stream, lines.close())

    @property
    def first_failure(self) -> RankEnd | None:
        return next((end for end in self.ends if end.status), None)

    def error_lines(self, rank: int) -> Sequence[str]:
        """The last lines the rank wrote on standard error."""
        return tuple(self._last_errors.get(rank, ()))

    def log_words(self, rank: int) -> str:
        """Where to read what the rank wrote; of what it did not write there is no file."""
        if self._bytes[rank, "err"]:
            return f"its log: {self._run.folder}/rank-{rank}.err"
        if self._bytes[rank, "out"]:
            return f"nothing on its standard error; its output: {self._run.folder}/rank-{rank}.out"
        return "it wrote nothing: its log is empty"

    def lost_bytes(self, rank: int) -> int:
        """How much of the rank's output never arrived, of what it says it wrote; 0 when it did not say."""
        end = next((end for end in self.ends if end.rank == rank), None)
        if end is None:
            return 0
        return end.out_bytes + end.err_bytes - self._bytes[rank, "out"] - self._bytes[rank, "err"]

    def _take(self, events: Sequence[Event]) -> None:
        for event in events:
            if isinstance(event, RankData):
                self._data(event)
            elif isinstance(event, RankEnd):
                self.ends.append(event)
            else:
                self._mpirun(event.text)

    def _data(self, event: RankData) -> None:
        key = (event.rank, event.stream)
        if key not in self._lines:
            self._mpirun(f"output of unknown rank {event.rank}: {event.data!r}")
            return
        self._bytes[key] += len(event.data)
        self._run.append(f"rank-{event.rank}.{event.stream}", event.data)
        lines = self._lines[key]
        self._show(event.rank, event.stream, lines.feed(event.data))
        if event.rank == 0 and lines.progress:
            self._progress_drawn = bool(self._screen.progress(0, lines.progress)) or self._progress_drawn

    def _show(self, rank: int, stream: str, lines: Sequence[str]) -> None:
        for line in lines:
            self._screen.line(rank, stream, line)
        if stream == "err" and lines:
            kept = self._last_errors.setdefault(rank, [])
            kept += [line for line in lines if line.strip()]
            del kept[:-ERROR_LINES]

    def _mpirun(self, text: str) -> None:
        self._run.append("mpirun.log", text.encode("utf-8", "replace") + b"\n")
        self.mpirun_lines.append(text)
        lost = _LOST_DAEMON.match(text)
        if lost and self.first_failure is None and lost[1] not in self.lost_hosts:
            self.lost_hosts.append(lost[1])
        # After a rank's own end has been told, mpirun's account of it only hides the reason.
        if self.first_failure is None and not _HARMLESS.search(text):
            self._screen.line(None, "err", text)
