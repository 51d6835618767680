"""The MNIST files and the example that trains on them."""

import gzip
import http.server
import os
import re
import shutil
import threading
from pathlib import Path

import numpy as np
import pytest

from tests.trainer.launch import ROOT, run
from trainer import datasets

EXAMPLE = ROOT / "examples" / "mnist.py"
CARRIED = ROOT / "examples" / "data"
_RESULT = r"test accuracy (\d\.\d{4}) on (\d+) held-out images \((\d+) training images, (\d+) ranks\)"


def _result(job):
    assert job.status == 0, job.output
    results = [re.search(_RESULT, line) for line in job.output.splitlines()]
    found = [match for match in results if match]
    assert len(found) == 1, job.output
    return float(found[0].group(1)), tuple(int(number) for number in found[0].groups()[1:])


def test_example_reaches_its_accuracy_again_and_again():
    first, counts = _result(run(EXAMPLE, 2, "--epochs", "5"))
    second, _ = _result(run(EXAMPLE, 2, "--epochs", "5"))
    assert counts == (2000, 8000, 2)
    assert first >= 0.95
    assert abs(first - second) <= 0.003


@pytest.mark.parametrize("drive", ["validate", "loop"])
def test_other_ways_to_drive(drive):
    job = run(EXAMPLE, 1, "--drive", drive, "--max-steps", 110)
    assert _result(job)[0] >= 0.8
    assert ("validation: " in job.output) == (drive == "validate")


def test_full_set():
    folder = os.environ.get("RINGMASTER_TEST_DATA")
    if not folder:
        pytest.skip("RINGMASTER_TEST_DATA names no folder with data/mnist")
    job = run(EXAMPLE, 3, "--data-dir", Path(folder) / "data" / "mnist", "--max-steps", 100)
    accuracy, counts = _result(job)
    assert counts == (10000, 60000, 3)
    assert accuracy >= 0.9


def test_carried_files():
    digits = datasets.load_test(str(CARRIED))
    assert (digits.images.shape, digits.labels.dtype) == ((10000, 28, 28), np.int64)
    training, held_out = datasets.split(digits)
    assert (len(training), len(held_out)) == (8000, 2000)
    assert np.bincount(held_out.labels, minlength=10).min() > 150


def _cut(path):
    path.write_bytes(path.read_bytes()[:1000])


def _garble(path):
    path.write_bytes(b"no gzip file at all")


def _shorten(path):
    path.write_bytes(gzip.compress(gzip.decompress(path.read_bytes())[:-5]))


def _other(path):
    path.write_bytes(gzip.compress(b"some other content"))


@pytest.mark.parametrize(
    ("damage", "text"),
    [
        (lambda path: path.unlink(), "no such file"),
        (_cut, "no complete gzip file"),
        (_garble, "no complete gzip file"),
        (_shorten, "holds 9995 bytes after its header, which promises 10000"),
        (_other, "does not begin with the IDX number"),
    ],
)
def test_damaged_file_is_named(damage, text, tmp_path):
    for file in (datasets.TEST_IMAGES, datasets.TEST_LABELS):
        shutil.copy(str(CARRIED / file.name), str(tmp_path / file.name))
    path = tmp_path / datasets.TEST_LABELS.name
    damage(path)
    with pytest.raises(datasets.DatasetError) as caught:
        datasets.load_test(str(tmp_path))
    for part in (str(path), text, datasets.TEST_LABELS.sha256, "--download"):
        assert part in str(caught.value)


@pytest.fixture
def mirror(tmp_path):
    """A web server on loopback over a folder: (folder, its URL)."""
    folder = tmp_path / "mirror"
    folder.mkdir()

    class Handler(http.server.SimpleHTTPRequestHandler):
        def translate_path(self, path):
            return str(folder / path.lstrip("/"))

        def log_message(self, *arguments):
            pass

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield folder, f"http://127.0.0.1:{server.server_port}/"
    server.shutdown()
    thread.join()
    server.server_close()


def test_download_takes_the_first_mirror_with_the_right_content(mirror, tmp_path):
    folder, url = mirror
    file, target = datasets.TEST_LABELS, tmp_path / "data"
    (folder / "bad").mkdir()
    (folder / "bad" / file.name).write_bytes(gzip.compress(b"forged"))
    shutil.copy(str(CARRIED / file.name), str(folder / file.name))
    datasets.download(str(target), [url + "bad/", url], [file])
    assert (target / file.name).read_bytes() == (CARRIED / file.name).read_bytes()
    # It is there now: no mirror is asked again.
    datasets.download(str(target), [], [file])


def test_failed_download_says_what_and_leaves_nothing(mirror, tmp_path):
    folder, url = mirror
    file, target = datasets.TEST_LABELS, tmp_path / "data"
    (folder / file.name).write_bytes(gzip.compress(b"forged"))
    with pytest.raises(datasets.DatasetError) as caught:
        datasets.download(str(target), [url, url + "nowhere/", "http://127.0.0.1:9/"], [file])
    for part in (url + file.name, file.sha256, "404", "127.0.0.1:9"):
        assert part in str(caught.value)
    assert list(target.iterdir()) == []


def test_example_names_a_missing_file(tmp_path):
    job = run(EXAMPLE, 1, "--data-dir", tmp_path)
    assert job.status != 0
    assert str(tmp_path / "train-images-idx3-ubyte.gz") in job.output
    assert "Traceback" not in job.output
