"""The wheel: what a `pip install` of this project brings, away from the checkout."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
# The development environment has the checkout on its path; a user's has not.
WITHOUT_CHECKOUT = f"import sys; sys.path.remove({str(ROOT)!r}); from provision.cli import main; main()"


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("wheel")
    words = ["wheel", "--quiet", "--no-deps", "--no-build-isolation", "--wheel-dir", str(out), str(ROOT)]
    subprocess.run([sys.executable, "-m", "pip", *words], check=True, timeout=120, capture_output=True)
    (built,) = out.glob("ringmaster-*.whl")
    return built


def run(site: Path, *words: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    """The installed program, in a directory that has nothing to do with the checkout."""
    return subprocess.run(
        [sys.executable, "-c", WITHOUT_CHECKOUT, *words],
        env=dict(os.environ, PYTHONPATH=str(site), PYTHONSAFEPATH="1", NO_COLOR="1"),
        cwd=cwd,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


@pytest.fixture(scope="module")
def site(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("site")
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(folder)
    return folder


def test_one_wheel_for_controller_and_nodes(wheel: Path) -> None:
    assert wheel.name.endswith("-py3-none-any.whl")
    names = set(zipfile.ZipFile(wheel).namelist())
    for script in (ROOT / "scripts").glob("*.sh"):
        assert f"provision/_data/scripts/{script.name}" in names
    assert {"trainer/__init__.py", "provision/transport/supervisor.bash", "provision/_data/tasks.py"} <= names
    assert not [name for name in names if name.startswith(("tests/", "examples/"))]


def test_the_installed_program_has_the_tasks(site: Path, tmp_path: Path) -> None:
    done = run(site, "hosts", "--json", "-H", "h1,h2", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert [row["name"] for row in json.loads(done.stdout)] == ["h1", "h2"]


def test_the_installed_program_reads_this_machine_with_its_own_scripts(site: Path, tmp_path: Path) -> None:
    done = run(site, "plan", "--local", "--mpi", "wheel", "--prefix", str(tmp_path / "local"), cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "Open MPI 4.1.8" in done.stdout
    assert "localhost: " in done.stdout


def test_the_testbed_says_that_it_needs_the_checkout(site: Path, tmp_path: Path) -> None:
    done = run(site, "testbed", cwd=tmp_path)
    assert done.returncode == 2
    assert "checkout" in done.stderr
    assert "Traceback" not in done.stderr
