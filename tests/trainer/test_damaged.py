"""Damaged checkpoints are passed over with a warning; a full disk leaves the earlier ones as they are."""

import logging
import os
import re
import subprocess

import pytest
import tensorflow.compat.v1 as tf

from tests.trainer.forks import run_forked
from trainer import checkpoints
from trainer.ranks import SharedError

STEPS = (10, 20, 30)


@pytest.fixture
def saved(tmp_path):
    """A directory with three checkpoints, made by TensorFlow alone."""
    with tf.Graph().as_default():
        tf.get_variable("w", [1000], initializer=tf.ones_initializer())
        saver = tf.train.Saver()
        with tf.Session() as session:
            session.run(tf.global_variables_initializer())
            for step in STEPS:
                saver.save(session, str(tmp_path / "model.ckpt"), global_step=step)
    return tmp_path


def _part(directory, step, end):
    (path,) = directory.glob(f"model.ckpt-{step}.{end}*")
    return path


def _cut(path, length):
    with open(path, "r+b") as file:
        file.truncate(length)


def _flip(path):
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(bytes(content))


@pytest.mark.parametrize(
    ("damage", "chosen", "said"),
    [
        (lambda d: None, 30, None),
        (lambda d: _cut(_part(d, 30, "data"), 100), 20, "model.ckpt-30: it cannot be read"),
        (lambda d: _cut(_part(d, 30, "data"), 0), 20, "model.ckpt-30: it cannot be read"),
        (lambda d: _cut(_part(d, 30, "index"), 0), 20, "model.ckpt-30: it cannot be read"),
        (lambda d: _part(d, 30, "index").unlink(), 20, "model.ckpt-30: it cannot be read"),
        (lambda d: _part(d, 30, "data").unlink(), 20, "model.ckpt-30: it cannot be read"),
        (lambda d: _flip(_part(d, 30, "data")), 20, "model.ckpt-30: it cannot be read"),
        (lambda d: [_flip(_part(d, s, "data")) for s in (20, 30)], 10, "model.ckpt-20: it cannot be read"),
        (lambda d: (d / "checkpoint").write_bytes(b""), 30, "it names no checkpoint"),
        (lambda d: (d / "checkpoint").write_bytes(b"\0" * 50), 30, "it names no checkpoint"),
        (lambda d: (d / "checkpoint").write_bytes(b"\xff\xfe all wrong"), 30, "it names no checkpoint"),
        # Without that file there is nothing to go on from, as in TensorFlow.
        (lambda d: (d / "checkpoint").unlink(), None, None),
    ],
)
def test_newest_readable_checkpoint_is_chosen(damage, chosen, said, saved, caplog):
    damage(saved)
    logging.getLogger("trainer").addHandler(caplog.handler)
    checkpoints.choose(str(saved))
    logging.getLogger("trainer").removeHandler(caplog.handler)
    latest = tf.train.latest_checkpoint(str(saved))
    assert latest == (None if chosen is None else str(saved / f"model.ckpt-{chosen}"))
    if said is None:
        assert caplog.text == ""
    else:
        assert said in caplog.text
        assert f"training goes on from model.ckpt-{chosen} instead" in caplog.text
        # The choice stands: the next start has nothing to say.
        caplog.clear()
        checkpoints.choose(str(saved))
        assert caplog.text == ""


def test_no_readable_checkpoint_is_an_error(saved):
    for step in STEPS:
        _cut(_part(saved, step, "data"), 10)
    with pytest.raises(SharedError, match="it has no checkpoint that can be read") as error:
        checkpoints.choose(str(saved))
    assert all(f"model.ckpt-{step}: it cannot be read" in str(error.value) for step in STEPS)


def test_remains_of_killed_saves_are_removed(saved):
    kept = {path.name for path in saved.iterdir()}
    for name in ("model.ckpt-40_temp", "model.ckpt-40_temp_" + "0" * 32):
        (saved / name).mkdir()
        (saved / name / "part-00000-of-00001.index").write_bytes(b"x")
    for name in ("model.ckpt-40.data-00000-of-00001", "model.ckpt-40.meta", "model.ckpt-40.meta.new"):
        (saved / name).write_bytes(b"x")
    (saved / "notes_temp").write_text("the user's own")
    checkpoints.choose(str(saved))
    assert {path.name for path in saved.iterdir()} == kept | {"notes_temp"}


@pytest.mark.skipif(os.geteuid() != 0, reason="mounting a small file system needs root")
def test_full_disk_is_said_and_leaves_the_earlier_checkpoints(tmp_path):
    directory = tmp_path / "checkpoints"
    directory.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=3m", "tmpfs", str(directory)], check=True)
    try:
        arguments = [tmp_path, "full", 60, 20, '{"save_checkpoint_steps": 1}']
        job = run_forked("killed.py", 1, *arguments, report_dir=tmp_path)
        assert job.status != 0
        step = re.search(r"the checkpoint of step (\d) could not be written", job.output)
        assert step, job.output
        latest = tf.train.latest_checkpoint(str(directory))
        assert latest == str(directory / f"model.ckpt-{int(step.group(1)) - 1}")
        reader = tf.train.load_checkpoint(latest)
        for name in reader.get_variable_to_shape_map():
            reader.get_tensor(name)
    finally:
        subprocess.run(["umount", "--lazy", str(directory)], check=True)
