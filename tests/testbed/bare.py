"""The root file system of `bare` hosts: a minimal Debian, made once with debootstrap and cached."""

from __future__ import annotations

import fcntl
import hashlib
import os
import platform
import re
import shutil
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from provision.errors import PreconditionError
from provision.paths import cache_dir
from tests.testbed.spec import TestbedError

PACKAGES = ("openssh-server", "python3", "iproute2", "rsync")
VARIANT = "minbase"
RECIPE = 1  # raise it when what `build` does changes
BUILD_TIMEOUT_S = 900


@dataclass(frozen=True)
class Source:
    uri: str
    suite: str
    components: tuple[str, ...]
    signed_by: str | None


def parse_one_line(text: str) -> Iterator[Source]:
    """sources.list(5), one-line style; lines that are no binary source are passed over."""
    for raw in text.splitlines():
        line = raw.split("#")[0].strip()
        match = re.fullmatch(r"deb\s+(?:\[(?P<options>[^\]]*)\]\s+)?(?P<uri>\S+)\s+(?P<rest>.+)", line)
        if not match:
            continue
        options = dict(part.split("=", 1) for part in (match["options"] or "").split() if "=" in part)
        suite, *components = match["rest"].split()
        yield Source(match["uri"], suite, tuple(components), options.get("signed-by"))


def parse_deb822(text: str) -> Iterator[Source]:
    """sources.list(5), deb822 style: one source per URI and suite of every enabled stanza."""
    for stanza in re.split(r"\n\s*\n", text):
        fields: dict[str, str] = {}
        last = ""
        for line in stanza.splitlines():
            if line.startswith("#"):
                continue
            if line[:1].isspace():
                fields[last] = f"{fields.get(last, '')} {line.strip()}"
            elif ":" in line:
                last, value = line.split(":", 1)
                last = last.strip().lower()
                fields[last] = value.strip()
        if "deb" not in fields.get("types", "").split() or fields.get("enabled", "yes").lower() == "no":
            continue
        key = fields.get("signed-by", "")
        for uri in fields.get("uris", "").split():
            for suite in fields.get("suites", "").split():
                components = tuple(fields.get("components", "").split())
                yield Source(uri, suite, components, key if key.startswith("/") else None)


def read_sources(apt: Path = Path("/etc/apt")) -> list[Source]:
    """Every package source that this machine's apt uses."""
    found: list[Source] = []
    for path in [apt / "sources.list", *sorted((apt / "sources.list.d").glob("*"))]:
        if path.suffix == ".sources":
            found += parse_deb822(path.read_text())
        elif path.is_file() and path.suffix == ".list":
            found += parse_one_line(path.read_text())
    return found


def choose_source(sources: list[Source], codename: str) -> Source:
    """The distribution's own archive: the first source of the release itself with component main."""
    for source in sources:
        if source.suite == codename and "main" in source.components:
            return source if not source.uri.startswith("mirror+file:") else _first_mirror(source)
    raise PreconditionError(
        f"this machine's apt configuration has no source of {codename} with component main, "
        "which a bare host is made from",
        remedy="add one under /etc/apt/sources.list.d",
    )


def _first_mirror(source: Source) -> Source:
    listed = Path(source.uri[len("mirror+file:") :]).read_text().split()
    if not listed:
        raise PreconditionError(f"{source.uri} lists no mirror", remedy="put one on its first line")
    return Source(listed[0], source.suite, source.components, source.signed_by)


def os_release(text: str) -> dict[str, str]:
    pairs = (line.split("=", 1) for line in text.splitlines() if "=" in line)
    return {key: value.strip().strip('"') for key, value in pairs}


def root_dir() -> Path:
    """Where the root of this machine's release lies once it is made; its name holds what went into it."""
    release = os_release(Path("/etc/os-release").read_text())
    codename = release.get("VERSION_CODENAME", "")
    if not codename or not shutil.which("dpkg"):
        raise PreconditionError(
            f"bare hosts need a Debian or Ubuntu machine, found {release.get('ID', 'unknown')}",
            remedy="use kind clone",
        )
    recipe = hashlib.sha256(repr((RECIPE, VARIANT, PACKAGES)).encode()).hexdigest()[:8]
    return cache_dir() / "testbed" / f"bare-{codename}-{platform.machine()}-{recipe}"


def ensure_root() -> Path:
    """The cached root; made now (about a minute) where there is none.

    Killed at any moment, the next call starts afresh: the root appears by rename, whole.
    """
    root = root_dir()
    if root.is_dir():
        return root
    root.parent.mkdir(parents=True, exist_ok=True)
    # The lock lies on the directory, so that no lock file stays.
    descriptor = os.open(root.parent, os.O_RDONLY | os.O_DIRECTORY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        if not root.is_dir():
            _build(root, descriptor)
    finally:
        os.close(descriptor)
    return root


def _build(root: Path, lock: int) -> None:
    release = os_release(Path("/etc/os-release").read_text())
    source = choose_source(read_sources(), release["VERSION_CODENAME"])
    unfinished = root.with_name(root.name + ".unfinished")
    log = root.with_name(root.name + ".log")
    subprocess.run(["rm", "-rf", "--one-file-system", "--", str(unfinished)], check=True)
    # In namespaces of its own: what debootstrap mounts goes with it. It dies with its caller, and holds the lock
    # until then, so that the next caller never builds into a directory that is still written to.
    argv = ["setpriv", "--pdeathsig", "KILL", "--", "unshare", "--mount", "--pid", "--fork", "--kill-child"]
    argv += ["--mount-proc", "--", "debootstrap"]
    argv += [f"--variant={VARIANT}", f"--include={','.join(PACKAGES)}"]
    argv += [f"--keyring={source.signed_by}"] if source.signed_by else []
    argv += [source.suite, str(unfinished), source.uri]
    with open(log, "wb") as output:
        try:
            status = subprocess.run(
                argv,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                timeout=BUILD_TIMEOUT_S,
                pass_fds=[lock],
            ).returncode
        except subprocess.TimeoutExpired:
            status = -1
    if status != 0:
        tail = "\n".join(log.read_text(errors="replace").splitlines()[-8:])
        raise TestbedError(f"debootstrap exited {status}, expected 0\n{tail}", remedy=f"the whole log: {log}")
    for pattern in ("var/cache/apt/archives/*.deb", "var/lib/apt/lists/*_*", "etc/ssh/ssh_host_*"):
        for path in unfinished.glob(pattern):
            path.unlink()
    unfinished.rename(root)
    log.unlink()
