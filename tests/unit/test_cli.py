"""The command line as users type it: real `fab` processes."""

from __future__ import annotations

import fcntl
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
FAB = Path(sys.executable).with_name("fab")


def fab(*words: str, cwd: Path = ROOT, state: Path | None = None) -> subprocess.CompletedProcess[str]:
    environment = dict(os.environ, NO_COLOR="1")
    if state is not None:
        environment["RINGMASTER_STATE_DIR"] = str(state)
    return subprocess.run(
        [str(FAB), *words],
        cwd=cwd,
        env=environment,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


@pytest.mark.parametrize(
    "words",
    [
        ["hosts", "--json", "--hosts", "h1,h2"],
        ["--hosts", "h1,h2", "hosts", "--json"],
        ["-H", "h1,h2", "hosts", "--json"],
        ["hosts", "--json", "-H", "h1,h2"],
        ["hosts", "--json", "--hosts=h1,h2,"],
        ["hosts", "--json", "--hosts", "h1, h2"],
        ["hosts", "--json", "--hosts", "h1,h2,h1"],
    ],
    ids=" ".join,
)
def test_every_spelling_of_hosts_means_one_run_over_both(words: list[str], tmp_path: Path) -> None:
    done = fab(*words, state=tmp_path)
    assert done.returncode == 0, done.stderr
    assert [row["name"] for row in json.loads(done.stdout)] == ["h1", "h2"]


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["hosts", "--hosts", ""], "host"),
        (["hosts", "--hosts", "h1:x"], "h1:x"),
        (["hosts", "--hosts", "gpu[1-"], "gpu[1-"),
        (["hosts", "--hosts", "-oProxyCommand=x"], "-oProxyCommand"),
        (["hosts", "--hosts-from", "/no/such/file"], "/no/such/file"),
        (["-H", "h1", "hosts", "--hosts", "h2"], "twice"),
        (["provision", "--hosts", "h1", "--mpi", "whel"], "whel"),
        (["provision", "--hosts", "h1", "--openmpi-source", "/no/such.tar"], "/no/such.tar"),
        (["provision", "--hosts", "h1", "--mpi", "wheel", "--openmpi-version", "3.1.0"], "--mpi wheel"),
        (["train", "--np", "2"], "no script"),
        (["hosts", "--", "x"], "after --"),
        (["train", "--script", "a.py", "--np", "x"], "--np is 'x'"),
        (["train", "--script", "a.py", "--np", "0"], "--np is '0'"),
        (["hosts", "--hosts", "h1", "--slots", "-3"], "--slots"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else None,
)
def test_bad_usage_is_one_message_and_status_2(words: list[str], said: str, tmp_path: Path) -> None:
    done = fab(*words, state=tmp_path)
    assert done.returncode == 2, done.stdout + done.stderr
    assert said in done.stderr
    assert "Traceback" not in done.stderr
    assert not list(tmp_path.iterdir()), "a usage error leaves no trace"


def test_ringmaster_has_the_same_tasks_from_any_directory(tmp_path: Path) -> None:
    listed = fab("--list").stdout
    names = {line.split()[0] for line in listed.splitlines() if line.startswith("  ") and line.strip()}
    assert {"hosts", "plan", "provision", "healthcheck", "train", "testbed"} <= names
    program = FAB.with_name("ringmaster")
    done = subprocess.run(
        [str(program), "hosts", "--json", "-H", "h1,h2"],
        cwd=tmp_path,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert [row["name"] for row in json.loads(done.stdout)] == ["h1", "h2"]


def test_a_second_provision_at_the_same_time_is_told_to_wait(tmp_path: Path) -> None:
    state = tmp_path / "state"
    state.mkdir()
    with (state / "provision.lock").open("w") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        held.write("4242\n")
        held.flush()
        words = ["provision", "--local", "--mpi", "wheel", "--prefix", str(tmp_path / "local")]
        done = fab(*words, "--hostfile", str(tmp_path / "hostfile"), state=state)
    assert done.returncode == 75
    assert "process 4242" in done.stderr
    assert sorted(path.name for path in tmp_path.iterdir()) == ["state"]


def test_training_before_provisioning_says_so(tmp_path: Path) -> None:
    script = tmp_path / "a.py"
    script.write_text("")
    done = fab("train", "--script", str(script), "--np", "2", state=tmp_path / "state")
    assert done.returncode == 5
    assert "localhost: not provisioned from here" in done.stderr
    assert "fab provision" in done.stderr


def test_a_folder_that_cannot_be_written_is_named_without_a_traceback(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    done = fab("provision", "--local", "--mpi", "wheel", state=tmp_path / "file" / "state")
    assert done.returncode == 1
    assert str(tmp_path / "file") in done.stderr.replace("\n", "")
    assert "Traceback" not in done.stderr
