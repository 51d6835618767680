"""The command line that every command starts with, and the words sent to it; pure.

The command line is constant but for a random marker, one line, and has neither quotes, `!` nor backslash pairs
inside its quotes, so that bash, zsh, dash, ksh, fish and csh all read it alike. The user's command travels on
standard input as NUL-ended words and meets no shell's quoting at all.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path

SILENCE_S = 120  # a node that hears nothing from the controller for this long ends the command
HEARTBEAT_S = 10.0
GRACE_S = 5  # between TERM and KILL

# --norc: bash started by sshd reads ~/.bashrc even for `bash -c`. BASH_ENV would print after the marker.
_START = (
    'unset BASH_ENV ENV; printf "%s %s\\n" "$1" "$$"; printf "%s\\n" "$1" >&2; '
    'IFS= read -r -d "" script || exit 125; exec bash --noprofile --norc -c "$script" ringmaster'
)
_ENV_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")


def start_argv(marker: str) -> list[str]:
    """The process that prints `marker` and its own process id on stdout, `marker` on stderr, then waits."""
    return ["bash", "--noprofile", "--norc", "-c", _START, "ringmaster", marker]


def start_command(marker: str) -> str:
    """`start_argv` as one line for the login shell of the user on the node."""
    return "exec " + shlex.join(start_argv(marker))


def header(
    argv: Sequence[str],
    *,
    env: Mapping[str, str] | None,
    cwd: str | None,
    input_bytes: int | None,
    silence_s: int = SILENCE_S,
    grace_s: int = GRACE_S,
) -> bytes:
    """What is sent once the marker was seen: the supervisor itself and its words.

    ValueError for what no process can be given: an empty argv, a NUL, an odd variable name.
    """
    if not argv:
        raise ValueError("argv is empty, expected at least the program's name")
    for name in env or {}:
        if not _ENV_NAME.fullmatch(name):
            raise ValueError(f"environment variable {name!r}, expected letters, digits and underscores")
    pairs = [f"{name}={value}" for name, value in (env or {}).items()]
    words = [_supervisor_text(), str(silence_s), str(grace_s), cwd or ""]
    words += [str(-1 if input_bytes is None else input_bytes)]
    words += [str(len(pairs)), *pairs, str(len(argv)), *argv]
    encoded = [word.encode("utf-8", "surrogateescape") for word in words]
    for word in encoded:
        if b"\0" in word:
            raise ValueError(f"{word!r} holds a NUL byte, which no argument or variable can")
    return b"\0".join(encoded) + b"\0"


def _supervisor_text() -> str:
    text = Path(__file__).with_name("supervisor.bash").read_text(encoding="utf-8")
    # Comments are for readers; bash reads its input a byte at a time.
    lines = [line for line in text.splitlines() if not line.lstrip().startswith("#")]
    return "\n".join(line for line in lines if line) + "\n"
