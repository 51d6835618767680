"""The layers of docs/architecture.md: a module imports only from layers below its own."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]

# Lower layers first; modules of one layer may not import each other unless they are one package.
LAYERS = [
    {"errors", "paths"},
    {"cluster"},
    {"hosttext"},
    {"sshconfig", "hostfile", "ansible_inventory"},
    {"inventories", "transport", "artifacts"},
    {"fanout", "facts", "network", "report"},
    {"plan", "staging"},
    {"launch"},
    {"healthcheck", "steps"},
    {"apply"},
    {"console"},
    {"cli", "ansible_support"},
]
RANK = {name: rank for rank, names in enumerate(LAYERS) for name in names}
THE_ONLY_IMPORTERS = {
    "fabric": {"transport", "cli"},
    "paramiko": {"transport", "sshconfig"},
    "invoke": {"cli"},
}


def modules() -> list[Path]:
    return [p for p in sorted((ROOT / "provision").rglob("*.py")) if "_data" not in p.parts]


def part_of(path: Path) -> str:
    relative = path.relative_to(ROOT / "provision").with_suffix("")
    return relative.parts[0]


def imports(path: Path) -> set[str]:
    found: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text("utf-8"))):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module and node.level == 0:
            if node.module == "provision":
                found |= {f"provision.{alias.name}" for alias in node.names}
            else:
                found.add(node.module)
    return found


@pytest.mark.parametrize("path", modules(), ids=lambda p: str(p.relative_to(ROOT)))
def test_a_module_imports_only_lower_layers(path: Path) -> None:
    own = part_of(path)
    if own == "__init__":
        return
    assert own in RANK, f"{path} belongs to no layer; add it to docs/architecture.md and to LAYERS"
    for name in imports(path):
        parts = name.split(".")
        if parts[0] == "provision" and len(parts) > 1 and parts[1] != own:
            assert RANK[parts[1]] < RANK[own], f"{own} imports {name}, which is not below it"
        for library, allowed in THE_ONLY_IMPORTERS.items():
            if parts[0] == library:
                assert own in allowed, f"{own} imports {library}; only {sorted(allowed)} may"


def test_provision_and_trainer_never_import_each_other() -> None:
    for folder, forbidden in (("provision", "trainer"), ("trainer", "provision")):
        for path in (ROOT / folder).rglob("*.py"):
            assert forbidden not in {name.split(".")[0] for name in imports(path)}, path


def test_only_compat_imports_tensorflow_and_horovod() -> None:
    users = {
        path.name
        for path in (ROOT / "trainer").rglob("*.py")
        if {name.split(".")[0] for name in imports(path)} & {"tensorflow", "horovod"}
    }
    assert users == {"compat.py"}
