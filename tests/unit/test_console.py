"""What the tasks decide from options and a saved cluster."""

from __future__ import annotations

import hashlib
from dataclasses import replace
from pathlib import Path

import pytest

from provision.cluster import Cluster, Node
from provision.console import provision_options
from provision.errors import ArtifactError, UsageError
from provision.plan import MpiChoice

CLUSTER = Cluster((Node("h1", "h1"),))


def choice(cluster: Cluster, source: Path | None = None, sha256: str | None = None) -> MpiChoice:
    version = "4.1.4" if source else None
    return provision_options(
        cluster, None, version, str(source) if source else None, sha256, None, "auto", None
    ).mpi


@pytest.mark.parametrize("is_gone", [False, True], ids=["file is there", "file is gone"])
def test_a_repair_means_the_open_mpi_that_was_built_from_a_users_file(tmp_path: Path, is_gone: bool) -> None:
    source = tmp_path / "openmpi.tar"
    source.write_bytes(b"an archive")
    first = choice(CLUSTER, source)
    assert first.sha256 == hashlib.sha256(b"an archive").hexdigest()
    saved = tmp_path / "cluster.json"
    replace(CLUSTER, mpi=first.as_saved()).save(saved)
    if is_gone:
        source.unlink()
    again = choice(Cluster.load(saved))
    assert again == replace(first, file=None if is_gone else first.file)


def test_a_file_with_another_checksum_is_refused(tmp_path: Path) -> None:
    source = tmp_path / "openmpi.tar"
    source.write_bytes(b"an archive")
    with pytest.raises(ArtifactError, match="expected " + "0" * 64):
        choice(CLUSTER, source, "0" * 64)


@pytest.mark.parametrize(
    ("saved", "given", "expected"),
    [
        (None, None, ("tf1", "3.7", True)),
        (None, "tf2", ("tf2", "3.11", False)),
        ("tf2", None, ("tf2", "3.11", False)),
        ("tf2", "tf1", ("tf1", "3.7", True)),
    ],
    ids=["default", "asked for", "as it was", "another one"],
)
def test_a_cluster_keeps_its_stack_until_another_is_named(
    saved: str | None, given: str | None, expected: tuple[str, str, bool]
) -> None:
    cluster = replace(CLUSTER, stack=saved)
    options = provision_options(cluster, "wheel", None, None, None, None, "auto", None, given)
    assert (options.stack, options.python, options.uses_gpus) == expected


@pytest.mark.parametrize(
    ("stack", "gpu", "words"),
    [
        ("tf3", "auto", r"--stack is 'tf3', expected tf1 or tf2"),
        ("tf2", "nccl", r"the stack tf2 is for CPUs \(tensorflow-cpu\)"),
    ],
    ids=["unknown", "no GPUs"],
)
def test_a_stack_that_will_not_do_is_refused(stack: str, gpu: str, words: str) -> None:
    with pytest.raises(UsageError, match=words):
        provision_options(CLUSTER, "wheel", None, None, None, None, gpu, None, stack)


def test_a_file_given_for_a_pinned_version_must_be_the_pinned_one(tmp_path: Path) -> None:
    source = tmp_path / "openmpi-3.1.0.tar.bz2"
    source.write_bytes(b"something else")
    with pytest.raises(ArtifactError, match="expected b25c0441"):
        provision_options(CLUSTER, None, "3.1.0", str(source), None, None, "auto", None)
