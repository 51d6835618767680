"""install_python.sh and pack_python.sh: finding a usable Python 3.7, or bringing one along."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import tarfile
from pathlib import Path

import pytest

from tests.scripts.conftest import Site, own_python37, path_without, sha256


def runs(python: Path) -> str:
    code = "import ctypes, json, ssl, sqlite3, sys, zlib; print(sys.prefix)"
    done = subprocess.run(
        [str(python), "-c", code], capture_output=True, text=True, timeout=20, check=False, env={}
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def test_one_that_is_there_is_used(site: Site, tmp_path: Path) -> None:
    python = own_python37()
    assert python is not None
    folder = tmp_path / "bin"
    folder.mkdir()
    (folder / "python3.7").symlink_to(python)
    with_one = Site(site.home, site.prefix, f"{folder}:/usr/bin:/bin")
    with_one.run("install_python.sh")
    done = with_one.run("install_python.sh")
    assert done.stdout == "unchanged\n"
    assert str(folder / "python3.7") in done.stderr
    assert not (site.prefix / "python").exists()


def test_without_one_and_without_archive_is_69(bare: Site) -> None:
    done = bare.run("install_python.sh")
    assert (done.returncode, done.stdout) == (69, "")
    assert "--archive" in done.stderr
    assert "expected 3.7" in done.stderr
    assert not (bare.prefix / "python").exists()


def test_it_is_brought_along_and_moves(bare: Site, packed: Path, tmp_path: Path) -> None:
    words = [f"--archive={packed}", f"--sha256={sha256(packed)}"]
    assert bare.word("install_python.sh", *words) == "changed"
    assert bare.word("install_python.sh", *words) == "unchanged"
    assert bare.word("install_python.sh") == "unchanged"
    assert runs(bare.prefix / "python/bin/python3.7") == str(bare.prefix / "python")
    manifest = json.loads((bare.prefix / "manifest.json").read_text())
    assert manifest["components"]["python"]["version"].startswith("3.7.")
    moved = tmp_path / "moved"
    bare.prefix.rename(moved)
    assert runs(moved / "python/bin/python3.7") == str(moved / "python")


def test_it_uses_no_library_of_this_machine_but_the_c_library(bare: Site, packed: Path) -> None:
    bare.word("install_python.sh", f"--archive={packed}")
    done = subprocess.run(
        [
            str(bare.prefix / "python/bin/python3.7"),
            "-c",
            "import bz2, ctypes, hashlib, lzma, sqlite3, ssl, uuid, zlib",
        ],
        env={"LD_DEBUG": "libs"},
        capture_output=True,
        text=True,
        timeout=20,
        check=False,
    )
    loaded = set(re.findall(r"calling init: (\S+)", done.stderr))
    assert any("libssl" in path for path in loaded)
    outside = {Path(path).name for path in loaded if not path.startswith(f"{bare.prefix}/python/")}
    assert {name.split(".so")[0].split("-")[0] for name in outside} <= {
        "ld", "libc", "libm", "libdl", "libpthread", "libutil", "librt", "libgcc_s", "libstdc++",
    }  # fmt: skip


def test_a_damaged_one_is_replaced(bare: Site, packed: Path) -> None:
    words = [f"--archive={packed}"]
    bare.word("install_python.sh", *words)
    shutil.rmtree(bare.prefix / "python/lib/python3.7/ctypes")
    assert bare.word("install_python.sh", *words, "--check") == "would-change"
    assert bare.word("install_python.sh", *words) == "changed"
    runs(bare.prefix / "python/bin/python3.7")


@pytest.mark.parametrize("top", ["python/install", "."])
def test_other_layouts_of_archives(bare: Site, packed: Path, tmp_path: Path, top: str) -> None:
    with tarfile.open(packed) as archive:
        archive.extractall(tmp_path / "open", filter="data")
    other = tmp_path / "other.tar.xz"
    with tarfile.open(other, "w:xz", preset=0) as archive:
        archive.add(tmp_path / "open/python", top)
    assert bare.word("install_python.sh", f"--archive={other}") == "changed"
    runs(bare.prefix / "python/bin/python3.7")


def test_wrong_archives_are_65(bare: Site, packed: Path, tmp_path: Path) -> None:
    done = bare.run("install_python.sh", f"--archive={packed}", f"--sha256={'c' * 64}")
    assert (done.returncode, done.stdout) == (65, "")
    text = tmp_path / "text"
    text.write_text("no archive")
    assert bare.run("install_python.sh", f"--archive={text}").returncode == 65
    empty = tmp_path / "empty.tar.gz"
    with tarfile.open(empty, "w:gz") as archive:
        archive.add(text, "readme")
    done = bare.run("install_python.sh", f"--archive={empty}")
    assert (done.returncode, done.stdout) == (65, "")
    broken = tmp_path / "broken.tar.gz"
    (tmp_path / "fake/bin").mkdir(parents=True)
    (tmp_path / "fake/bin/python3.7").write_text("#!/bin/sh\nexit 1\n")
    (tmp_path / "fake/bin/python3.7").chmod(0o755)
    with tarfile.open(broken, "w:gz") as archive:
        archive.add(tmp_path / "fake", "python")
    done = bare.run("install_python.sh", f"--archive={broken}")
    assert (done.returncode, done.stdout) == (65, "")
    assert "will not do here" in done.stderr
    assert not (bare.prefix / "python").exists()


def test_another_architecture_is_named_before_anything_starts(site: Site, tmp_path: Path) -> None:
    folder = Path(path_without(tmp_path / "bin", "uname"))
    (folder / "uname").write_text('#!/bin/sh\n[ "$1" = -m ] && echo aarch64 || exec /bin/uname "$@"\n')
    (folder / "uname").chmod(0o755)
    arm = Site(site.home, site.prefix, str(folder))
    for script in ("install_python.sh", "install_runtime.sh"):
        done = arm.run(script)
        assert (done.returncode, done.stdout) == (69, "")
        assert "aarch64" in done.stderr
        assert "x86_64 only" in done.stderr
    assert not os.listdir(site.home)
