"""Downloads against a real web server on loopback; checksums, mirrors, the cache."""

from __future__ import annotations

import functools
import hashlib
import http.server
import json
import tarfile
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import zstandard

from provision import artifacts, paths
from provision.artifacts import Artifact, Lock
from provision.errors import ArtifactError, UsageError

CONTENT = b"an archive" * 1000
DIGEST = hashlib.sha256(CONTENT).hexdigest()


class Quiet(http.server.SimpleHTTPRequestHandler):
    requests: list[str]

    def do_GET(self) -> None:
        type(self).requests.append(self.path)
        super().do_GET()

    def log_message(self, format: str, *args: object) -> None:
        """Nothing on standard error."""


@pytest.fixture
def site(tmp_path: Path) -> Iterator[tuple[str, Path, list[str]]]:
    """(URL, folder it serves, paths asked for)."""
    folder = tmp_path / "site"
    folder.mkdir()
    handler = type("Handler", (Quiet,), {"requests": []})
    server = http.server.ThreadingHTTPServer(
        ("127.0.0.1", 0), functools.partial(handler, directory=str(folder))
    )
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}", folder, handler.requests
    server.shutdown()
    server.server_close()


@pytest.fixture(autouse=True)
def _own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


def test_a_verified_file_is_fetched_once(site: tuple[str, Path, list[str]]) -> None:
    url, folder, requests = site
    (folder / "a.tar").write_bytes(CONTENT)
    wanted = Artifact("a", "1", "a.tar", DIGEST, (f"{url}/a.tar",))
    first = artifacts.fetch(wanted)
    second = artifacts.fetch(wanted)
    assert first == second == paths.cache_dir() / "downloads" / "a.tar"
    assert first.read_bytes() == CONTENT
    assert requests == ["/a.tar"]


def test_four_fetches_at_once_download_once(site: tuple[str, Path, list[str]]) -> None:
    url, folder, requests = site
    (folder / "a.tar").write_bytes(CONTENT)
    wanted = Artifact("a", "1", "a.tar", DIGEST, (f"{url}/a.tar",))
    with ThreadPoolExecutor(4) as pool:
        assert len({pool.submit(artifacts.fetch, wanted).result() for _ in range(4)}) == 1
    assert requests == ["/a.tar"]


def test_a_wrong_checksum_is_never_kept(site: tuple[str, Path, list[str]]) -> None:
    url, folder, _ = site
    (folder / "a.tar").write_bytes(b"something else")
    with pytest.raises(ArtifactError) as caught:
        artifacts.fetch(Artifact("a", "1", "a.tar", DIGEST, (f"{url}/a.tar",)))
    assert hashlib.sha256(b"something else").hexdigest() in str(caught.value)
    assert [p.name for p in (paths.cache_dir() / "downloads").iterdir()] == [".lock"]


def test_a_damaged_cache_is_fetched_again(site: tuple[str, Path, list[str]]) -> None:
    url, folder, requests = site
    (folder / "a.tar").write_bytes(CONTENT)
    wanted = Artifact("a", "1", "a.tar", DIGEST, (f"{url}/a.tar",))
    artifacts.fetch(wanted).write_bytes(b"damaged")
    assert artifacts.fetch(wanted).read_bytes() == CONTENT
    assert len(requests) == 2


def test_a_mirror_comes_first_and_the_public_source_is_the_second_choice(
    site: tuple[str, Path, list[str]],
) -> None:
    url, folder, requests = site
    (folder / "a.tar").write_bytes(CONTENT)
    artifacts.fetch(Artifact("a", "1", "a.tar", DIGEST, (f"{url}/a.tar",)), mirror=f"{url}/mirror/")
    assert requests == ["/mirror/a.tar", "/a.tar"]


def test_an_unreachable_source_names_url_file_checksum_and_ways_out() -> None:
    with pytest.raises(ArtifactError) as caught:
        artifacts.fetch(Artifact("openmpi", "9.9", "o.tar", DIGEST, ("http://127.0.0.1:9/o.tar",)))
    for part in ("http://127.0.0.1:9/o.tar", "o.tar", DIGEST, "--openmpi-source", "--mirror"):
        assert part in str(caught.value)


@pytest.mark.parametrize(
    ("version", "found"), [("3.7", "3.7.9"), ("3.7.9", "3.7.9"), ("3", "3.7.9"), ("3.70", None), ("4", None)]
)
def test_a_version_is_found_up_to_a_dot(version: str, found: str | None) -> None:
    lock = Lock((Artifact("python", "3.7.9", "p.tar", DIGEST),), ())
    artifact = lock.find("python", version)
    assert (artifact.version if artifact else None) == found


def test_the_shipped_lock_pins_what_the_product_fetches() -> None:
    lock = artifacts.read_lock()
    openmpi = lock.find("openmpi", "3.1.0")
    assert openmpi is not None
    assert openmpi.sha256 == "b25c044124cc859c0b4e6e825574f9439a51683af1950f6acda1951f5ccdf06c"
    assert all(len(artifact.sha256) == 64 for artifact in lock.artifacts)
    assert all(url.startswith("https://") for artifact in lock.artifacts for url in artifact.urls)


@pytest.mark.parametrize(
    ("name", "python", "tensorflow"),
    [("tf1", "3.7", "tensorflow==1.15.0"), ("tf2", "3.11", "tensorflow-cpu==2.15.1")],
)
def test_each_stack_has_a_lock_of_wheels_and_sources(name: str, python: str, tensorflow: str) -> None:
    stack = artifacts.read_lock().stack(name)
    assert (stack.python, tensorflow.partition("==")[0]) == (python, stack.tensorflow)
    texts = [(paths.scripts_dir() / f"requirements-{name}{part}.lock").read_text() for part in ("", "-build")]
    wheels, sources = artifacts.split_lock("\n".join(texts), stack.sources)
    assert {line.partition("==")[0] for line in sources.splitlines() if "==" in line} == set(stack.sources)
    assert {"horovod", "mpi4py"} <= set(stack.sources)
    assert tensorflow in wheels
    assert all("--hash=sha256:" in part for part in (wheels, sources))


def test_an_unknown_stack_is_a_usage_error_that_names_the_others() -> None:
    with pytest.raises(UsageError, match="--stack is 'tf3', expected tf1 or tf2"):
        artifacts.read_lock().stack("tf3")


def test_a_python_that_is_nowhere_says_how_to_bring_one() -> None:
    """No download of 3.11 is pinned: a checksum that nobody could verify would be worse than none."""
    with pytest.raises(ArtifactError) as caught:
        artifacts.python_archive("3.11", artifacts.read_lock(), own=None, mirror=None, file=None)
    assert "scripts/pack_python.sh --version=3.11 PYTHON OUT.tar.gz" in str(caught.value)
    assert "--python-archive OUT.tar.gz" in str(caught.value)


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"artifacts": [{}]}', "not json"])
def test_a_damaged_lock_is_one_clear_error(text: str, tmp_path: Path) -> None:
    path = tmp_path / "artifacts.lock.json"
    path.write_text(text)
    with pytest.raises(ArtifactError, match=r"artifacts\.lock\.json"):
        artifacts.read_lock(path)


def test_a_given_wheelhouse_must_hold_the_same_lock(tmp_path: Path) -> None:
    lock = artifacts.read_lock()
    (tmp_path / "requirements-tf1.lock").write_text(json.dumps("another"))
    with pytest.raises(ArtifactError, match=r"requirements-tf1\.lock"):
        artifacts.wheelhouse("tf1", lock, given=tmp_path)


def test_a_zstd_archive_reaches_the_nodes_as_gzip(tmp_path: Path) -> None:
    plain = tmp_path / "cpython.tar"
    with tarfile.open(plain, "w") as archive:
        archive.add(__file__, "python/install/bin/python3.7")
    packed = tmp_path / "cpython.tar.zst"
    packed.write_bytes(zstandard.ZstdCompressor().compress(plain.read_bytes()))
    made, digest = artifacts.python_archive("3.7", artifacts.read_lock(), own=None, mirror=None, file=packed)
    assert digest == artifacts.sha256_of(made)
    with tarfile.open(made, "r:gz") as archive:
        assert archive.getnames() == ["python/install/bin/python3.7"]
    packed.write_bytes(b"not zstd at all")
    with pytest.raises(ArtifactError, match="damaged"):
        artifacts.python_archive("3.7", artifacts.read_lock(), own=None, mirror=None, file=packed)


def test_a_file_with_the_pinned_name_must_be_the_pinned_file(tmp_path: Path) -> None:
    lock = artifacts.read_lock()
    pinned = lock.find("python", "3.7")
    assert pinned is not None
    (tmp_path / pinned.file).write_bytes(b"another")
    with pytest.raises(ArtifactError, match=pinned.sha256):
        artifacts.python_archive("3.7", lock, own=None, mirror=None, file=tmp_path / pinned.file)
