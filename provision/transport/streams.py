"""What becomes of a command's output: noise taken off, lines cut, a bounded part kept. Pure."""

from __future__ import annotations

import codecs
from collections import deque

KEPT_BYTES = 8 << 20  # of each stream, in a Result
LINE_BYTES = 1 << 20
NOISE_BYTES = 64 << 10


class Marked:
    """Parts a stream at the line that begins with `marker`: noise before it, output after it."""

    def __init__(self, marker: str) -> None:
        self._marker = marker.encode()
        self._pending = b""
        self.noise = b""
        self.found = False
        self.rest_of_line = ""  # what stood after the marker on its line

    def feed(self, data: bytes) -> bytes:
        """The output among `data`; empty until the marker's whole line was seen."""
        if self.found:
            return data
        self._pending += data
        at = self._pending.find(self._marker)
        end = self._pending.find(b"\n", at) if at >= 0 else -1
        if end < 0:
            if at < 0:  # keep what may be the beginning of the marker
                keep = max(0, len(self._pending) - len(self._marker) + 1)
                self._add_noise(self._pending[:keep])
                self._pending = self._pending[keep:]
            return b""
        self._add_noise(self._pending[:at])
        self.rest_of_line = self._pending[at + len(self._marker) : end].decode("ascii", "replace").strip()
        output, self._pending = self._pending[end + 1 :], b""
        self.found = True
        return output

    def all_noise(self) -> str:
        """The noise as text; everything seen, if the marker never came."""
        return (self.noise if self.found else self.noise + self._pending).decode("utf-8", "replace")

    def _add_noise(self, data: bytes) -> None:
        self.noise = (self.noise + data)[:NOISE_BYTES]


class Lines:
    """Cuts a byte stream into lines at newlines only; a carriage return stays inside its line."""

    def __init__(self) -> None:
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._parts: list[str] = []
        self._size = 0

    def feed(self, data: bytes, *, end: bool = False) -> list[str]:
        """The lines that `data` completes, and with `end` the unfinished last one."""
        text = self._decoder.decode(data, end)
        *whole, rest = text.split("\n")
        lines = []
        for piece in whole:
            lines.append("".join(self._parts) + piece)
            self._parts, self._size = [], 0
        if rest:
            self._parts.append(rest)
            self._size += len(rest)
        if self._parts and (end or self._size >= LINE_BYTES):
            lines.append("".join(self._parts))
            self._parts, self._size = [], 0
        return lines


class Kept:
    """The first and the last half of `limit` bytes of a stream."""

    def __init__(self, limit: int = KEPT_BYTES) -> None:
        self._half = limit // 2
        self._head = bytearray()
        self._tail: deque[bytes] = deque()
        self._tail_size = 0
        self._left_out = 0

    def feed(self, data: bytes) -> None:
        room = self._half - len(self._head)
        self._head += data[:room]
        data = data[room:]
        if not data:
            return
        self._tail.append(data)
        self._tail_size += len(data)
        while self._tail_size - len(self._tail[0]) >= self._half:
            gone = self._tail.popleft()
            self._tail_size -= len(gone)
            self._left_out += len(gone)

    def text(self) -> str:
        tail = b"".join(self._tail)
        over = max(0, len(tail) - self._half)
        left_out, tail = self._left_out + over, tail[over:]
        if not left_out:
            return (bytes(self._head) + tail).decode("utf-8", "replace")
        note = f"\n[{left_out} bytes left out here]\n"
        return bytes(self._head).decode("utf-8", "replace") + note + tail.decode("utf-8", "replace")
