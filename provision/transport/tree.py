"""Compares a local directory tree with one on a node: what to send, what to remove. Pure but for `scan`."""

from __future__ import annotations

import fnmatch
import hashlib
import os
import stat
import tarfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from provision.errors import UsageError

DEFAULT_EXCLUDE = (
    ".git",
    ".hg",
    ".svn",
    ".venv",
    "venv",
    "__pycache__",
    "*.py[co]",
    ".mypy_cache",
    ".pytest_cache",
    ".ruff_cache",
    ".ipynb_checkpoints",
    ".ringmaster",
)

# After the prelude that sets `path`. $2: named | all. NUL-ended relative paths on standard input. Prints
# `kind\0path\0value\0` for what is there (d directory, f file, x executable file, l link, o other), then,
# with `all`, every path as kind `p`, then an empty kind and sha256sum's lines for the named regular files.
LIST = r"""
set -Eeuo pipefail
if ! cd -- "$path" 2>/dev/null; then
  [[ ! -e $path ]] || { echo "$path cannot be entered or is no directory" >&2; exit 73; }
  printf '\0'
  exit 0
fi
files=()
while IFS= read -r -d '' name; do
  if [[ -L $name ]]; then
    printf 'l\0%s\0%s\0' "$name" "$(readlink -- "$name")"
  elif [[ -d $name ]]; then
    printf 'd\0%s\0\0' "$name"
  elif [[ -f $name ]]; then
    kind=f
    if [[ -x $name ]]; then kind=x; fi
    printf '%s\0%s\0\0' "$kind" "$name"
    files+=("$name")
  elif [[ -e $name ]]; then
    printf 'o\0%s\0\0' "$name"
  fi
done
if [[ $2 == all ]]; then find . -mindepth 1 -printf 'p\0%P\0\0'; fi
printf '\0'
if ((${#files[@]})); then printf './%s\0' "${files[@]}" | xargs -0 sha256sum; fi
"""

# After the prelude that sets `path`. Standard input: NUL-ended paths to remove, an empty one, a tar archive.
APPLY = r"""
set -Eeuo pipefail
mkdir -p -- "$path"
cd -- "$path"
while IFS= read -r -d '' name && [[ -n $name ]]; do rm -rf -- "./$name"; done
tar -xpf - --no-same-owner
"""


@dataclass(frozen=True)
class Entry:
    """One path of a tree. `kind` as in LIST; `value`: a file's sha256, a link's target, else empty."""

    path: str
    kind: str
    value: str


@dataclass(frozen=True)
class Listing:
    entries: Mapping[str, Entry]
    every_path: tuple[str, ...]  # only where it was asked for


@dataclass(frozen=True)
class Change:
    sent: tuple[str, ...]
    removed: tuple[str, ...]  # before sending: what is deleted, and what is of another kind
    deleted: tuple[str, ...]
    unchanged: int


def is_excluded(path: str, exclude: Sequence[str]) -> bool:
    """True if a pattern matches the relative path, one of its parents, or the name of either."""
    parts = path.split("/")
    for end in range(1, len(parts) + 1):
        whole = "/".join(parts[:end])
        if any(fnmatch.fnmatch(parts[end - 1], each) or fnmatch.fnmatch(whole, each) for each in exclude):
            return True
    return False


def scan(source: Path, exclude: Sequence[str]) -> dict[str, Entry]:
    """Every entry of `source` by relative path, parents first; UsageError for what cannot be sent."""
    if not source.is_dir():
        raise UsageError(f"{source} is no directory")
    found: dict[str, Entry] = {}

    def visit(folder: str) -> None:
        for item in sorted(os.scandir(source / folder), key=lambda each: each.name):
            path = f"{folder}/{item.name}" if folder else item.name
            if is_excluded(path, exclude):
                continue
            entry = _entry(source, path, item)
            found[path] = entry
            if entry.kind == "d":
                visit(path)

    try:
        visit("")
    except OSError as error:
        raise UsageError(f"{error.filename} cannot be read: {error.strerror}") from error
    return found


def _entry(source: Path, path: str, item: os.DirEntry[str]) -> Entry:
    shown = source / path
    try:
        path.encode("utf-8")
    except UnicodeEncodeError:
        raise UsageError(
            f"{os.fsencode(shown)!r}: its name is no UTF-8", remedy="rename or exclude it"
        ) from None
    if "\n" in path or "\\" in path:
        raise UsageError(f"{str(shown)!r}: a newline or backslash in its name", remedy="rename or exclude it")
    if item.is_symlink():
        target = os.readlink(shown)
        meant = os.path.normpath(os.path.join(os.path.dirname(path), target))
        if os.path.isabs(target) or meant == ".." or meant.startswith("../"):
            text = (
                f"{shown} is a link to {target!r}, outside the tree: the other hosts may have nothing there"
            )
            raise UsageError(text, remedy="exclude it, or put the file itself in its place")
        return Entry(path, "l", target)
    if item.is_dir():
        return Entry(path, "d", "")
    mode = item.stat().st_mode
    if not stat.S_ISREG(mode):
        raise UsageError(f"{shown} is no file, directory or link", remedy="exclude it")
    digest = hashlib.sha256()
    with shown.open("rb") as stream:
        while chunk := stream.read(1 << 20):
            digest.update(chunk)
    return Entry(path, "x" if mode & 0o100 else "f", digest.hexdigest())


def parse_listing(output: bytes) -> Listing:
    """Reads what LIST prints."""
    entries: dict[str, Entry] = {}
    every: list[str] = []
    fields = iter(output.split(b"\0"))
    rest = b""
    for kind in fields:
        if not kind:
            rest = b"\0".join(fields)
            break
        path, value = (os.fsdecode(next(fields)) for _ in range(2))
        if kind == b"p":
            every.append(path)
        else:
            entries[path] = Entry(path, kind.decode(), value)
    for line in os.fsdecode(rest).split("\n"):
        digest, _, name = line.partition("  ./")
        if name in entries:
            entries[name] = Entry(name, entries[name].kind, digest)
    return Listing(entries, tuple(every))


def compare(wanted: Mapping[str, Entry], there: Listing, exclude: Sequence[str], *, delete: bool) -> Change:
    """What makes the node's tree like `wanted`."""
    sent = [path for path, entry in wanted.items() if there.entries.get(path) != entry]
    files = ("f", "x")
    clash = [
        path
        for path in sent
        if path in there.entries
        and there.entries[path].kind != wanted[path].kind
        and not (there.entries[path].kind in files and wanted[path].kind in files)
    ]
    extra = [path for path in there.every_path if path not in wanted and not is_excluded(path, exclude)]
    deleted = sorted(extra) if delete else []
    # rm -rf of a directory takes what is in it along; excluded files below it must stay.
    kept = {path for path in there.every_path if is_excluded(path, exclude)}
    deleted = [path for path in deleted if not any(each.startswith(path + "/") for each in kept)]
    removed = tuple(sorted({*clash, *deleted}))
    return Change(tuple(sorted(sent)), removed, tuple(deleted), len(wanted) - len(sent))


def write_tar(source: Path, entries: Sequence[Entry], archive: BinaryIO) -> None:
    """Appends the entries as a tar stream; owners are left out, modes reduced to 644 and 755."""
    with tarfile.open(fileobj=archive, mode="w|", format=tarfile.GNU_FORMAT) as tar:
        for entry in entries:
            info = tar.gettarinfo(str(source / entry.path), arcname=f"./{entry.path}")
            info.uid = info.gid = 0
            info.uname = info.gname = ""
            info.mode = 0o755 if entry.kind in "dx" else 0o644
            if info.islnk():  # a second name of one inode: the first may not be part of this archive
                info.type = tarfile.REGTYPE
                info.size = (source / entry.path).stat().st_size
            if info.isreg():
                with (source / entry.path).open("rb") as stream:
                    tar.addfile(info, stream)
            else:
                tar.addfile(info)
