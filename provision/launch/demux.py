"""Takes the ranks' output out of what mpirun prints: `mpirun -xml` around the frames of rank_io.py; pure."""

from __future__ import annotations

import binascii
import json
import re
from dataclasses import dataclass
from typing import Union

_START = re.compile(r'<(stdout|stderr|stddiag)(?: rank="(\d+)")?>')
_START_MAX = 40  # characters of the longest start tag
_NOISE = re.compile(r"</?mpirun>\n?")
_REFERENCE = re.compile(r"&(?:#(\d+)|(lt|gt|amp));")
_NAMED = {"lt": "<", "gt": ">", "amp": "&"}
_FRAME = re.compile(rb"~([oex])([A-Za-z0-9+/]+={0,2})?\.*\Z")
_KINDS = {b"o": "out", b"e": "err"}


@dataclass(frozen=True)
class RankData:
    """Bytes that a rank wrote; `stream` is "out" or "err"."""

    rank: int
    stream: str
    data: bytes


@dataclass(frozen=True)
class RankEnd:
    """A rank's program has ended: its status (128 + N for signal N) and how many bytes it wrote in all."""

    rank: int
    status: int
    out_bytes: int
    err_bytes: int
    stopped_s: int | None = None


@dataclass(frozen=True)
class MpirunText:
    """A line of mpirun itself."""

    text: str


Event = Union[RankData, RankEnd, MpirunText]


class Demux:
    """Feed it text in any pieces; it gives the events that have become complete."""

    def __init__(self) -> None:
        self._pending = ""
        self._plain = ""
        self._frames: dict[int, bytes] = {}

    def feed(self, text: str) -> list[Event]:
        self._pending += text
        events: list[Event] = []
        at = 0
        pending = self._pending
        while at < len(pending):
            mark = pending.find("<", at)
            if mark < 0:
                events += self._own(pending[at:])
                at = len(pending)
                break
            events += self._own(pending[at:mark])
            at = mark
            noise = _NOISE.match(pending, mark)
            if noise:
                at = noise.end()
                continue
            start = _START.match(pending, mark)
            if start is None:
                if len(pending) - mark < _START_MAX and ">" not in pending[mark:]:
                    break
                events += self._own("<")
                at = mark + 1
                continue
            end_tag = f"</{start[1]}>"
            end = pending.find(end_tag, start.end())
            if end < 0:
                break
            events += self._element(start[1], start[2], unescape(pending[start.end() : end]))
            at = end + len(end_tag)
            # mpirun ends a line after an element; that line end is not part of anything.
            if pending.startswith("\n", at):
                at += 1
        self._pending = pending[at:]
        return events

    def close(self) -> list[Event]:
        """What is left when mpirun has ended, whole or not."""
        events = self._own(self._pending)
        self._pending = ""
        if self._plain:
            events += self._own("\n")
        for rank, left in self._frames.items():
            if left:
                events.append(RankData(rank, "out", left))
        self._frames.clear()
        return events

    def _own(self, text: str) -> list[Event]:
        if not text:
            return []
        *lines, self._plain = (self._plain + text).split("\n")
        return [MpirunText(line) for line in lines if line]

    def _element(self, stream: str, rank: str | None, text: str) -> list[Event]:
        if rank is None:
            return self._own(text)
        data = text.encode("latin-1", "replace")
        if stream != "stdout":
            # Only what fails before rank_io.py runs writes here.
            return [RankData(int(rank), "err", data)]
        return self._framed(int(rank), data)

    def _framed(self, rank: int, data: bytes) -> list[Event]:
        *lines, self._frames[rank] = (self._frames.get(rank, b"") + data).split(b"\n")
        return [event for line in lines for event in _frame_event(rank, line)]


def _frame_event(rank: int, line: bytes) -> list[Event]:
    match = _FRAME.match(line)
    if match is None:
        return [RankData(rank, "out", line + b"\n")]
    try:
        data = binascii.a2b_base64(match[2] or b"")
    except binascii.Error:
        return [RankData(rank, "out", line + b"\n")]
    if match[1] != b"x":
        return [RankData(rank, _KINDS[match[1]], data)]
    end = json.loads(data)
    return [RankEnd(rank, end["status"], end["out"], end["err"], end["stopped_s"])]


def unescape(text: str) -> str:
    """mpirun's XML text as the characters it stands for, one per byte."""
    return _REFERENCE.sub(lambda m: chr(int(m[1])) if m[1] else _NAMED[m[2]], text)


class Lines:
    """Joins one stream's bytes into lines, as a terminal would finally show them.

    A carriage return goes back to the start of the line: of what was overwritten only the last state counts.
    """

    MAX_BYTES = 1 << 20  # a line without end is shown in pieces of this size

    def __init__(self) -> None:
        self._left = b""

    def feed(self, data: bytes) -> list[str]:
        *lines, self._left = (self._left + data).split(b"\n")
        if len(self._left) > self.MAX_BYTES:
            lines.append(self._left)
            self._left = b""
        return [shown(line) for line in lines]

    @property
    def progress(self) -> str:
        """The current state of an unfinished line that is being overwritten; empty when there is none."""
        return shown(self._left) if b"\r" in self._left else ""

    @property
    def is_taken_back(self) -> bool:
        """Whether the writer went back to the start of an unfinished line and wrote nothing more."""
        return self._left.endswith(b"\r")

    def close(self) -> list[str]:
        left, self._left = self._left, b""
        return [shown(left)] if left else []


def shown(line: bytes) -> str:
    """The last state of a line with carriage returns, as text; bytes that are no UTF-8 become U+FFFD."""
    parts = [part for part in line.split(b"\r") if part]
    return parts[-1].decode("utf-8", "replace") if parts else ""
