"""The README's first command on a clean clone with an empty home and cache."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def clone(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The committed tree in a folder of its own."""
    where = tmp_path_factory.mktemp("clone") / "ringmaster"
    subprocess.run(["git", "clone", "--quiet", str(ROOT), str(where)], check=True, timeout=120)
    return where


@pytest.fixture
def home() -> Iterator[Path]:
    """An empty home; scripts/test names the place, so that the later stages can use what was installed there."""
    given = os.environ.get("RINGMASTER_TEST_HOME")
    where = Path(given) if given else Path(tempfile.mkdtemp(prefix="ringmaster-home-"))
    shutil.rmtree(where, ignore_errors=True)
    where.mkdir(parents=True)
    yield where
    if not given:
        shutil.rmtree(where, ignore_errors=True)


def environment(home: Path, **changes: str) -> dict[str, str]:
    """This environment with another home and nothing that this project's own tools have set."""
    own_bin = str(ROOT / ".venv" / "bin")
    path = os.pathsep.join(p for p in os.environ["PATH"].split(os.pathsep) if p != own_bin)
    kept = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith(("XDG_", "RINGMASTER_", "VIRTUAL_ENV", "PYTEST_"))
    }
    return {**kept, "HOME": str(home), "PATH": path, **changes}


@pytest.mark.slow
@pytest.mark.timeout(1500)
def test_a_clean_clone_ends_with_a_trained_model(clone: Path, home: Path) -> None:
    done = subprocess.run(
        ["./scripts/quickstart"],
        cwd=clone,
        env=environment(home),
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=1400,
        check=False,
    )
    output = done.stdout + done.stderr
    assert done.returncode == 0, output[-5000:]
    found = re.search(
        r"test accuracy ([01]\.\d+) on (\d+) held-out images \((\d+) training images, 2 ranks\)", output
    )
    assert found, output[-5000:]
    assert float(found[1]) >= 0.94
    assert int(found[2]) + int(found[3]) == 10_000
    assert "prebuilt wheel" in output
    assert "What to type next" in output
    assert "healthy" in output
    # Programs that run meanwhile may keep caches there (Keras does); a shell's and SSH's files may not appear.
    users_own = {".bashrc", ".bash_profile", ".profile", ".zshrc", ".ssh", ".gitconfig", ".config"}
    assert not users_own & {path.name for path in home.iterdir()}
    status = subprocess.run(
        ["git", "status", "--porcelain"], cwd=clone, capture_output=True, text=True, check=True, timeout=60
    )
    assert status.stdout == "", "a run leaves the checkout as it was"


@pytest.mark.parametrize(
    ("hidden", "said"),
    [
        (("c++", "g++"), "g++"),
        (("make",), "make"),
        (("c++", "g++", "make"), "g++ make"),
    ],
    ids=["no compiler", "no make", "both"],
)
def test_what_is_missing_is_named_before_anything_starts(
    clone: Path, tmp_path: Path, hidden: tuple[str, ...], said: str
) -> None:
    """A PATH with every program of this machine but the hidden ones."""
    programs = tmp_path / "bin"
    programs.mkdir()
    for folder in reversed(os.environ["PATH"].split(os.pathsep)):
        for program in Path(folder).iterdir() if Path(folder).is_dir() else ():
            if program.name not in hidden:
                (programs / program.name).unlink(missing_ok=True)
                (programs / program.name).symlink_to(program)
    empty = tmp_path / "home"
    empty.mkdir()
    done = subprocess.run(
        ["./scripts/quickstart"],
        cwd=clone,
        env=environment(empty, PATH=str(programs)),
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 69, done.stdout + done.stderr
    assert f"install -y {said}" in done.stderr
    assert "--install-deps" in done.stderr
    assert list(empty.iterdir()) == []


@pytest.mark.parametrize("words", [["--npp", "2"], ["--np", "0"], ["--np", "two"]], ids=" ".join)
def test_bad_words_are_refused(clone: Path, words: list[str], tmp_path: Path) -> None:
    done = subprocess.run(
        ["./scripts/quickstart", *words],
        cwd=clone,
        env=environment(tmp_path),
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 64
    assert words[0] in done.stderr
    assert list(tmp_path.iterdir()) == []
