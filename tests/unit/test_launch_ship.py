"""What counts as a project, what is refused, and a real shipping to this machine."""

from __future__ import annotations

import hashlib
import os
import subprocess
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import pytest

from provision.cluster import Node
from provision.errors import LaunchError, NodeError, RingmasterError, UsageError
from provision.launch import ship as shipping
from provision.launch.ship import Project, prefix_of, prefixes_of, read_project, ship, ship_to_all
from provision.transport import Connections, connect


@pytest.fixture
def project(tmp_path: Path) -> Path:
    root = tmp_path / "my project"
    (root / "models").mkdir(parents=True)
    (root / "train.py").write_text("print('train')\n")
    (root / "models" / "net.py").write_text("layers = 3\n")
    for folder in (".git", ".venv/lib", "__pycache__", "models/__pycache__", ".ringmaster/runs"):
        (root / folder).mkdir(parents=True)
        (root / folder / "x").write_text("no")
    return root


def test_the_scripts_own_directory_is_the_project(project: Path) -> None:
    found = read_project(project / "train.py")
    assert (found.root, found.script) == (project, "train.py")
    assert found.id.startswith("my-project-")
    names = [line.split("  ", 1)[1] for line in found.sums.splitlines()]
    assert names == ["models/net.py", "train.py"]
    digest = hashlib.sha256(b"layers = 3\n").hexdigest()
    assert found.sums.splitlines()[0] == f"{digest}  models/net.py"


def test_another_project_directory_can_be_named(project: Path) -> None:
    found = read_project(project / "models" / "net.py", project)
    assert found.script == "models/net.py"
    assert found.id == read_project(project / "train.py").id


def test_two_projects_of_one_name_have_different_ids(tmp_path: Path) -> None:
    ids = set()
    for parent in ("a", "b"):
        (tmp_path / parent / "p").mkdir(parents=True)
        (tmp_path / parent / "p" / "s.py").write_text("")
        ids.add(read_project(tmp_path / parent / "p" / "s.py").id)
    assert len(ids) == 2


def test_what_is_refused(project: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    other = tmp_path / "other"
    other.mkdir()
    home = tmp_path / "home"
    home.mkdir()
    (home / "s.py").write_text("")
    monkeypatch.setenv("HOME", str(home))
    cases: list[tuple[Path, Path | None, type[RingmasterError], str]] = [
        (project / "gone.py", None, UsageError, "no such file"),
        (project, None, UsageError, r"is a folder; give the path of a Python script"),
        (project / "train.py", other, UsageError, "lies outside the project"),
        (project / "train.py", tmp_path / "nowhere", UsageError, "no such directory"),
        (home / "s.py", None, LaunchError, "would be sent to every node"),
        (project / "train.py", Path("/"), LaunchError, "would be sent to every node"),
    ]
    for script, root, kind, words in cases:
        with pytest.raises(kind, match=words):
            read_project(script, root)


def test_more_than_a_gigabyte_is_refused_before_it_is_read(project: Path) -> None:
    with open(project / "data.bin", "wb") as stream:
        stream.truncate(shipping.LIMIT_BYTES + 1)
    with pytest.raises(LaunchError, match="more than 1 GB"):
        read_project(project / "train.py")


def test_a_link_out_of_the_project_is_refused(project: Path) -> None:
    os.symlink("/etc/hostname", project / "link")
    with pytest.raises(UsageError, match="outside the tree"):
        read_project(project / "train.py")


def test_a_node_that_was_never_provisioned_is_named() -> None:
    with pytest.raises(LaunchError, match=r"h1 was never provisioned; run `fab provision`"):
        prefix_of(Node("h1", "h1"))


def test_all_nodes_that_were_never_provisioned_are_named_at_once() -> None:
    nodes = [Node("h1", "h1"), Node("h2", "h2", prefix_path="/p"), Node("h3", "h3"), Node("h4", "h4")]
    with pytest.raises(LaunchError, match=r"^h\[1,3-4\] were never provisioned; run `fab provision` first$"):
        prefixes_of(nodes)
    assert prefixes_of(nodes[1:2]) == {"h2": "/p"}


def test_shipping_keeps_the_node_equal_to_the_project(project: Path, tmp_path: Path) -> None:
    prefix = tmp_path / "prefix"
    transport = connect(Node("here", "localhost", local=True), known_hosts=tmp_path / "known_hosts")
    first = read_project(project / "train.py")
    there = prefix / "projects" / first.id
    ship(transport, str(prefix), first)
    assert (there / "models" / "net.py").read_text() == "layers = 3\n"
    assert not (there / ".git").exists()
    assert os.access(prefix / "libexec" / "rank.sh", os.X_OK)
    assert (prefix / "lib" / "trainer").is_dir()
    checked = subprocess.run(["sha256sum", "-c", "--quiet", f"../{first.id}.sha256"], cwd=there, check=False)
    assert checked.returncode == 0

    # An older copy on the node, a file that is gone here, and what a job wrote there.
    (there / "train.py").write_text("print('older')\n")
    (there / "model.ckpt").write_text("weights")
    (project / "models" / "net.py").unlink()
    (project / "models" / "new.py").write_text("layers = 4\n")
    ship(transport, str(prefix), read_project(project / "train.py"))
    assert (there / "train.py").read_text() == "print('train')\n"
    assert (there / "models" / "new.py").read_text() == "layers = 4\n"
    assert not (there / "models" / "net.py").exists()
    assert (there / "model.ckpt").read_text() == "weights"
    before = (there / "train.py").stat().st_ino
    ship(transport, str(prefix), read_project(project / "train.py"))
    assert (there / "train.py").stat().st_ino == before


def at_once(shipments: list[Callable[[], None]]) -> list[RingmasterError | None]:
    """What each came to, all started together."""

    def one(shipment: Callable[[], None]) -> RingmasterError | None:
        try:
            shipment()
        except RingmasterError as error:
            return error
        return None

    with ThreadPoolExecutor(len(shipments)) as pool:
        return list(pool.map(one, shipments))


def shipment(project: Project, prefix: Path, tmp_path: Path) -> Callable[[], None]:
    """One that knows nothing of the others, as from another controller."""
    transport = connect(Node("here", "localhost", local=True), known_hosts=tmp_path / "known_hosts")
    return lambda: ship(transport, str(prefix), project)


def left_over(projects: Path) -> list[str]:
    return sorted(path.name for path in projects.iterdir() if not path.name.endswith(".lock"))


def test_one_project_shipped_by_two_controllers_at_once_arrives(project: Path, tmp_path: Path) -> None:
    (project / "data.bin").write_bytes(os.urandom(4_000_000))
    wanted = read_project(project / "train.py")
    prefix = tmp_path / "prefix"
    errors = at_once([shipment(wanted, prefix, tmp_path) for _ in range(2)])
    assert errors == [None, None]
    assert left_over(prefix / "projects") == [wanted.id, f"{wanted.id}.sha256"]
    assert (prefix / "projects" / f"{wanted.id}.sha256").read_text() == wanted.sums


def test_trains_of_one_user_ship_one_after_the_other(
    project: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(shipping, "ATTEMPTS", 1)  # nothing may fail even once
    wanted = read_project(project / "train.py")
    node = Node("here", "localhost", local=True, prefix_path=str(tmp_path / "prefix"))

    said: list[str] = []

    def train() -> None:
        with Connections(tmp_path / "known_hosts") as connections:
            ship_to_all(connections, [node], wanted, said.append)

    monkeypatch.setattr(shipping, "_SILENT_S", 0.2)
    assert at_once([train] * 3) == [None] * 3
    assert set(said) == {"note: another `fab train` is sending the same project; waiting for it"}


def test_two_versions_under_one_id_are_never_mixed(
    project: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whichever list of digests stands, the files are those of it, or the shipment says what to do."""
    first = read_project(project / "train.py")
    (tmp_path / "twin").mkdir()
    (tmp_path / "twin" / "train.py").write_text("print('the other')\n")
    second = replace(read_project(tmp_path / "twin" / "train.py"), id=first.id)
    prefix = tmp_path / "prefix"
    errors = at_once([shipment(each, prefix, tmp_path) for each in (first, second)])
    assert None in errors
    assert all("again" in str(error) for error in errors if error)
    projects = prefix / "projects"
    assert left_over(projects) == [first.id, f"{first.id}.sha256"]
    assert (projects / f"{first.id}.sha256").read_text() in (first.sums, second.sums)


def test_a_project_changed_while_it_is_sent_is_one_clear_error(
    project: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shipping, "ATTEMPTS", 2)
    stale = read_project(project / "train.py")
    (project / "train.py").write_text("print('edited meanwhile')\n")
    with pytest.raises(
        NodeError, match=r"was changed, or another version of it sent, at the same time"
    ) as caught:
        shipment(stale, tmp_path / "prefix", tmp_path)()
    assert "run the same `fab train` again" in (caught.value.remedy or "")
    assert left_over(tmp_path / "prefix" / "projects") == [stale.id]
