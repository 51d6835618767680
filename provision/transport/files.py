"""put, get and put_tree: over `run` and standard streams alone, so that chatty login files do no harm."""

from __future__ import annotations

import hashlib
import os
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import BinaryIO

from provision.errors import CommandFailed, NodeError, UsageError
from provision.transport import tree
from provision.transport.base import Result, TreeChange
from provision.transport.commands import CommandTransport
from provision.transport.session import Input

_HOME = r"""
case $1 in
  '$HOME' | '~') path=$HOME ;;
  '$HOME/'*) path=$HOME/${1#'$HOME/'} ;;
  '~/'*) path=$HOME/${1#'~/'} ;;
  *) path=$1 ;;
esac
"""

# $1 path, $2 mode, $3 sha256; the file on standard input
_PUT = (
    "set -Eeuo pipefail\n"
    + _HOME
    + r"""
[[ ! -d $path ]] || { echo "$path is a directory" >&2; exit 73; }
folder=$(dirname -- "$path")
mkdir -p -- "$folder"
umask 077
# bash reports a killed child: where nobody listens any more, that must not keep it from tidying up.
trap '' PIPE
temporary=$(mktemp -- "$folder/.ringmaster.XXXXXXXX")
trap 'rm -f -- "$temporary"' EXIT
trap 'exit 143' TERM
cat >"$temporary"
got=$(sha256sum <"$temporary")
[[ ${got%% *} == "$3" ]] || { echo "arrived with sha256 ${got%% *}, expected $3" >&2; exit 65; }
chmod -- "$2" "$temporary"
mv -fT -- "$temporary" "$path"
"""
)

# $1 path; the file on standard output, its digest as the last line of standard error. Its size is taken once:
# a log that grows meanwhile is copied up to there.
_GET = (
    "set -Eeuo pipefail\n"
    + _HOME
    + r"""
[[ -f $path ]] || { echo "$path: no such file" >&2; exit 66; }
size=$(stat -L -c %s -- "$path")
head -c "$size" -- "$path"
head -c "$size" -- "$path" | sha256sum >&2
"""
)


class FileTransport(CommandTransport):
    """Adds the file operations of `Transport` to `run`."""

    def put(self, source: Path, dest: str, *, mode: int = 0o644, timeout_s: float) -> None:
        """See `Transport.put`."""
        begun = time.monotonic()
        with _opened(source) as stream:
            digest = _sha256(stream)
            size = stream.tell()
            stream.seek(0)
            given = Input(stream, size)
            left_s = timeout_s - (time.monotonic() - begun)
            self._script(_PUT, [dest, f"{mode:04o}", digest], given, ("put", str(source), dest), left_s)

    def get(self, source: str, dest: Path, *, timeout_s: float) -> None:
        """See `Transport.get`."""
        try:
            dest.parent.mkdir(parents=True, exist_ok=True)
            descriptor, temporary = tempfile.mkstemp(prefix=f".{dest.name}.", dir=dest.parent)
        except OSError as error:
            raise UsageError(f"{dest} cannot be written: {error.strerror}") from error
        try:
            with os.fdopen(descriptor, "wb") as stream:
                digest = hashlib.sha256()

                def keep(data: bytes) -> None:
                    digest.update(data)
                    try:
                        stream.write(data)
                        stream.flush()  # a full disk shows here, not when the file is closed
                    except OSError as error:
                        raise UsageError(f"{dest} cannot be written: {error.strerror}") from error

                names = ("get", source, str(dest))
                result = self._script(_GET, [source], None, names, timeout_s, sink=keep)
            expected = result.stderr.split()[-2:-1]
            if [digest.hexdigest()] != expected:
                text = f"{source} arrived with sha256 {digest.hexdigest()}, expected {''.join(expected)}"
                raise NodeError(self.node.name, text, remedy="it may have been changed meanwhile: try again")
            os.chmod(temporary, 0o666 & ~_umask())
            os.replace(temporary, dest)
        finally:
            Path(temporary).unlink(missing_ok=True)

    def put_tree(
        self,
        source: Path,
        dest: str,
        *,
        exclude: Sequence[str] = (),
        delete: bool = False,
        timeout_s: float,
    ) -> TreeChange:
        """See `Transport.put_tree`."""
        deadline = time.monotonic() + timeout_s
        if delete and dest.rstrip("/") in ("", "~", "$HOME", "."):
            raise UsageError(f"{dest!r} holds more than this tree: its other files are not deleted")
        wanted = tree.scan(source, exclude)
        names = ("put_tree", str(source), dest)

        def ask(paths: Sequence[str], *, everything: bool) -> tree.Listing:
            given = Input.of(b"".join(os.fsencode(path) + b"\0" for path in paths))
            output = bytearray()
            arguments = [dest, "all" if everything else "named"]
            left_s = deadline - time.monotonic()
            self._script(_HOME + tree.LIST, arguments, given, names, left_s, sink=output.extend)
            return tree.parse_listing(bytes(output))

        change = tree.compare(wanted, ask(list(wanted), everything=delete), exclude, delete=delete)
        if not change.sent and not change.removed:
            return TreeChange((), (), change.unchanged)
        with tempfile.TemporaryFile() as archive:
            removals = b"".join(os.fsencode(path) + b"\0" for path in change.removed) + b"\0"
            archive.write(removals)
            tree.write_tar(source, [wanted[path] for path in change.sent], archive)
            size = archive.tell()
            archive.seek(0)
            left_s = deadline - time.monotonic()
            self._script(_HOME + tree.APPLY, [dest], Input(archive, size), names, left_s)
        if change.sent:
            arrived = ask(list(change.sent), everything=False)
            wrong = tree.compare({path: wanted[path] for path in change.sent}, arrived, (), delete=False).sent
            if wrong:
                text = f"{dest}: {len(wrong)} files differ from what was sent, first {wrong[0]!r}"
                raise NodeError(self.node.name, text, remedy="is something else writing there? try again")
        return TreeChange(change.sent, change.deleted, change.unchanged)

    def _script(
        self,
        script: str,
        arguments: Sequence[str],
        given: Input | None,
        names: tuple[str, ...],
        timeout_s: float,
        *,
        sink: Callable[[bytes], None] | None = None,
    ) -> Result:
        """Runs bash text on the node; in errors it goes by `names`."""
        argv = ["bash", "--norc", "-c", script, names[0], *arguments]
        result = self._execute(argv, given=given, timeout_s=timeout_s, sink=sink, names=names)
        if result.status != 0:
            # tar says it in its own way: "Wrote only 4608 of 10240 bytes".
            full = any(part in result.stderr for part in ("No space left", "quota exceeded", "Wrote only"))
            remedy = "free some space there and run the task again" if full else None
            raise CommandFailed(
                self.node.name, names, result.status, result.stdout, result.stderr, remedy=remedy
            )
        return result


def _opened(source: Path) -> BinaryIO:
    try:
        return source.open("rb")
    except OSError as error:
        raise UsageError(f"{source} cannot be read: {error.strerror}") from error


def _sha256(stream: BinaryIO) -> str:
    digest = hashlib.sha256()
    while chunk := stream.read(1 << 20):
        digest.update(chunk)
    return digest.hexdigest()


def _umask() -> int:
    # os.umask can only be read by setting it, which other threads would see.
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("Umask:"):
            return int(line.split()[1], 8)
    return 0o022
