"""Shows outcomes: tables in which equal outcomes are one row (`node[01-16]`), step lines, verdicts, JSON.

Every function takes plain data. Colour and fitting to the window happen only on a terminal; a pipe gets plain
text with nothing cut off. NO_COLOR is honoured.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from typing import IO, Any, TypeVar

from rich.console import Console
from rich.table import Table
from rich.text import Text

from provision.cluster import fold

Row = TypeVar("Row")

# A line of a pipe is never wrapped: wide enough for any row there is.
PIPE_WIDTH = 100_000

_STYLES = {
    "ok": "green",
    "unchanged": "green",
    "changed": "yellow",
    "would-change": "yellow",
    "warning": "yellow",
    "failed": "bold red",
    "unreachable": "bold red",
    "unknown": "magenta",
    "skipped": "dim",
}


def make_console(file: IO[str] | None = None, *, stderr: bool = False) -> Console:
    """A console for `file` (standard output if None): coloured on a terminal without NO_COLOR, else plain."""
    plain = bool(os.environ.get("NO_COLOR"))
    console = Console(file=file, stderr=stderr, highlight=False, markup=False, emoji=False)
    if console.is_terminal and not plain:
        return console
    return Console(
        file=file,
        stderr=stderr,
        highlight=False,
        markup=False,
        emoji=False,
        width=console.width if console.is_terminal else PIPE_WIDTH,
        color_system=None,
        no_color=True,
    )


def fold_rows(
    rows: Iterable[tuple[str, Row]], key: Callable[[Row], Hashable] | None = None
) -> list[tuple[str, Row]]:
    """Rows (node name, value) with equal `key(value)` joined: folded names and the first such value.

    Groups keep the order in which they first appear.
    """
    groups: dict[Hashable, tuple[list[str], Row]] = {}
    for name, value in rows:
        same: Hashable = key(value) if key else value
        groups.setdefault(same, ([], value))[0].append(name)
    return [(fold(names), value) for names, value in groups.values()]


def table(
    title: str, columns: Sequence[str], rows: Iterable[Sequence[object]], console: Console | None = None
) -> None:
    """Prints a table; None in a cell is shown as `-`, known words like `changed` and `failed` in colour."""
    console = console or make_console()
    shown = Table(title=title or None, title_justify="left", box=None, pad_edge=False, header_style="bold")
    for column in columns:
        shown.add_column(column, overflow="fold", no_wrap=not console.is_terminal)
    for row in rows:
        if len(row) != len(columns):
            raise ValueError(f"table {title!r}: row of {len(row)} cells, expected {len(columns)}: {row!r}")
        shown.add_row(*(_cell(value) for value in row))
    if console.is_terminal:
        console.print(shown)
    else:
        # rich pads every line to its column's width; a pipe gets no blanks at line ends. It also
        # never prints wider than its console, hence one that is wide enough.
        wide = make_console(console.file)
        with wide.capture() as capture:
            wide.print(shown)
        for line in capture.get().splitlines():
            console.file.write(line.rstrip() + "\n")
        console.file.flush()


def _cell(value: object) -> Text:
    text = printable("-" if value is None else str(value))
    return Text(text, style=_STYLES.get(text, ""))


def printable(text: str) -> str:
    """`text` with control characters (not line ends) as escapes: what a node says cannot steer a terminal."""
    return "".join(
        c if c.isprintable() or c == "\n" else c.encode("unicode_escape").decode("ascii") for c in text
    )


def step_line(node_names: Iterable[str], step: str, word: str, console: Console | None = None) -> None:
    """One progress line: `node[01-16]: openmpi changed`."""
    line = Text(f"{fold(node_names)}: {printable(step)} ")
    line.append(printable(word), style=_STYLES.get(word, ""))
    (console or make_console()).print(line, soft_wrap=True)


def verdict(ok: bool, text: str, *, remedies: Sequence[str] = (), console: Console | None = None) -> None:
    """The last word of a task: `ok: …` or `failed: …`, then one `-> remedy` line for each fault."""
    console = console or make_console()
    word = "ok" if ok else "failed"
    line = Text.assemble((word, _STYLES[word]), f": {printable(text)}")
    console.print(line, soft_wrap=True)
    for remedy in dict.fromkeys(remedies):
        console.print(Text(f"  -> {printable(remedy)}"), soft_wrap=True)


def json_text(value: Mapping[str, Any]) -> str:
    """JSON for programs: one document, keys in the order given (stable from run to run), a last line end."""
    return json.dumps(value, indent=2, ensure_ascii=False, default=_plain) + "\n"


def _plain(value: object) -> object:
    if isinstance(value, os.PathLike):
        return os.fspath(value)
    if isinstance(value, (set, frozenset)):
        return sorted(value)
    raise TypeError(f"{type(value).__name__} has no JSON form")


def print_json(value: Mapping[str, Any], file: IO[str] | None = None) -> None:
    """Writes `json_text` as it is, without colour or wrapping."""
    stream = file or make_console().file
    stream.write(json_text(value))
    stream.flush()
