"""CIFAR-10's files, the drawn pictures, and the example that trains on either."""

import io
import re
import sys
import tarfile

import numpy as np
import pytest
import tensorflow.compat.v1 as tf

from examples import cifar10 as example
from tests.trainer.launch import ROOT, run
from trainer.datasets import DatasetError, cifar10, synthetic

EXAMPLE = ROOT / "examples" / "cifar10.py"
PER_FILE = 10


def _content(first_label):
    """Records as published: a label, then the red, green and blue planes."""
    records = np.zeros((PER_FILE, 3073), np.uint8)
    records[:, 0] = (np.arange(PER_FILE) + first_label) % 10
    records[:, 1:1025], records[:, 1025:2049], records[:, 2049:] = 10, 20, 30
    records[:, 2] = 99  # first row, second column, red
    return records.tobytes()


def _archive(path, contents):
    with tarfile.open(str(path), "w:gz") as archive:
        for name, content in contents.items():
            member = tarfile.TarInfo("cifar-10-batches-bin/" + name)
            member.size = len(content)
            archive.addfile(member, io.BytesIO(content))


@pytest.fixture
def contents():
    return {file.name: _content(number) for number, file in enumerate(cifar10.FILES)}


def test_archive_and_folder_are_read_alike(contents, tmp_path):
    archive = tmp_path / cifar10.ARCHIVE.name
    _archive(archive, contents)
    folder = tmp_path / "unpacked" / "cifar-10-batches-bin"
    folder.mkdir(parents=True)
    for name, content in contents.items():
        (folder / name).write_bytes(content)
    for path in (archive, tmp_path, tmp_path / "unpacked", folder):
        training, held_out = cifar10.load(path, is_verified=False)
        assert (training.images.shape, held_out.images.shape) == ((50, 32, 32, 3), (10, 32, 32, 3))
        assert training.images.dtype == np.uint8
        assert training.labels[:11].tolist() == [*range(10), 1]
        assert training.images[0, 0, 0].tolist() == [10, 20, 30]
        assert training.images[0, 0, 1].tolist() == [99, 20, 30]


def _one_line(error, *parts):
    text = str(error.value)
    assert "\n" not in text
    for part in parts:
        assert part in text


def test_other_content_is_refused(contents, tmp_path):
    _archive(tmp_path / cifar10.ARCHIVE.name, contents)
    with pytest.raises(DatasetError) as caught:
        cifar10.load(tmp_path)
    _one_line(caught, "data_batch_1.bin", "not as published", cifar10.FILES[0].sha256, "--download")


@pytest.mark.parametrize(
    ("damage", "text"),
    [
        (lambda content: content[:-1], "which are no images"),
        (lambda content: b"", "which are no images"),
        (lambda content: b"\x0b" + content[1:], "it has the label 11"),
    ],
)
def test_damaged_file_is_named(damage, text, contents, tmp_path):
    contents["test_batch.bin"] = damage(contents["test_batch.bin"])
    _archive(tmp_path / cifar10.ARCHIVE.name, contents)
    with pytest.raises(DatasetError) as caught:
        cifar10.load(tmp_path, is_verified=False)
    _one_line(caught, "test_batch.bin", text)


def test_wrong_folders_and_cut_archives(contents, tmp_path):
    for path, text in ((tmp_path, "holds no CIFAR-10"), (tmp_path / "nowhere", "no such file or folder")):
        with pytest.raises(DatasetError) as caught:
            cifar10.load(path)
        _one_line(caught, str(path), text, "--data-dir")
    (tmp_path / "cifar-10-python.tar.gz").write_bytes(b"")
    with pytest.raises(DatasetError) as caught:
        cifar10.load(tmp_path)
    _one_line(caught, "another version")
    archive = tmp_path / cifar10.ARCHIVE.name
    _archive(archive, contents)
    archive.write_bytes(archive.read_bytes()[:-40])
    with pytest.raises(DatasetError) as caught:
        cifar10.load(tmp_path, is_verified=False)
    _one_line(caught, str(archive), "no complete tar.gz archive")
    del contents["data_batch_3.bin"]
    _archive(archive, contents)
    with pytest.raises(DatasetError) as caught:
        cifar10.load(tmp_path, is_verified=False)
    _one_line(caught, "it holds no data_batch_3.bin")


@pytest.mark.parametrize(
    ("damage", "text"),
    [
        (lambda archive: archive.write_bytes(archive.read_bytes()[:-40]), "no complete tar.gz archive"),
        (lambda archive: None, "not as published"),
        (lambda archive: archive.unlink(), "holds no CIFAR-10"),
        (lambda archive: archive.parent.rename(archive.parent.parent / "other"), "no such file or folder"),
    ],
)
def test_example_gives_up_with_one_line(damage, text, contents, tmp_path, monkeypatch):
    archive = tmp_path / "data" / cifar10.ARCHIVE.name
    archive.parent.mkdir()
    _archive(archive, contents)
    damage(archive)
    monkeypatch.setattr(sys, "argv", ["cifar10.py", "--data-dir", str(archive.parent)])
    with pytest.raises(SystemExit) as caught:
        example.main()
    assert isinstance(caught.value.code, str), "a message: the exit status is 1"
    assert caught.value.code.startswith("cifar10.py: ")
    assert text in caught.value.code
    assert "\n" not in caught.value.code


def test_unwritable_folder_is_one_line(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(DatasetError) as caught:
        cifar10.download(str(tmp_path / "file" / "folder"), [])
    _one_line(caught, "cannot be written", "--data-dir")


def test_drawn_pictures():
    first, second = synthetic.pictures(40, 3), synthetic.pictures(40, 3)
    assert np.array_equal(first.images, second.images)
    assert not np.array_equal(first.images, synthetic.pictures(40, 4).images)
    assert first.labels.tolist() == list(range(10)) * 4


def test_augmentation():
    with tf.Graph().as_default(), tf.Session() as session:
        picture = synthetic.pictures(1, 1).images[0]
        place = tf.placeholder(tf.int64, [])
        made = example.augment(place, tf.constant(picture), 5)
        several = [session.run(made, {place: number}) for number in (0, 0, 1, 2)]
        middle = session.run(example.plain(tf.constant(picture)))
    for image in [*several, middle]:
        assert image.shape == (24, 24, 3)
        assert image.mean() == pytest.approx(0, abs=1e-3)
        assert image.std() == pytest.approx(1, abs=1e-2)
    assert np.array_equal(several[0], several[1])
    assert not np.array_equal(several[0], several[2])
    assert not np.array_equal(several[2], several[3])


def test_example_learns_and_says_that_its_pictures_are_synthetic():
    job = run(EXAMPLE, 2, "--epochs", 2, "--synthetic-images", 2000, timeout_s=300)
    assert job.status == 0, job.output
    found = re.findall(
        r"test accuracy (\d\.\d{4}) on 500 held-out images, SYNTHETIC pictures, not CIFAR-10", job.output
    )
    assert len(found) == 1, job.output
    assert float(found[0]) >= 0.25  # chance is 0.1
    assert "training on 2000 SYNTHETIC pictures, not CIFAR-10" in job.output
