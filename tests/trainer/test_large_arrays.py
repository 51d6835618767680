"""Large arrays are neither in the graph on disk nor in the event file, and memory holds few copies of them."""

import pytest

from tests.trainer.forks import run_worker

MB = 1 << 20


@pytest.mark.parametrize(
    ("way", "size", "copies"),
    [
        # The peak while TensorFlow makes the constant comes before the Trainer, which adds two copies at most.
        ("slices", 1, 2.5),
        ("arrays", 1, 2.5),
        # Another iterator of the user's needs the constant, which stays: in memory, but not on disk.
        ("shared", 1, 7),
        # Beyond what a graph can hold.
        ("over_2_gb", 1, 2.5),
        ("over_2_gb", 2, 2.5),
        ("over_2_gb", 3, 2.5),
    ],
)
def test_copies_of_an_array(way, size, copies, tmp_path):
    reports = run_worker(
        "large.py", size, way, tmp_path / "run", report_dir=tmp_path, is_fresh=True, timeout_s=200
    ).reports
    for rank, report in enumerate(reports):
        assert report["size"] >= (2200 if way == "over_2_gb" else 200) * MB
        assert report["multiple"] < copies
        first = 0 if way == "over_2_gb" else 7
        assert report["values"] == [[first, rank], [first, size * 2 + rank]]
        assert report["steps"] == 2
    files = reports[0]["files"]
    assert {"checkpoint", "model.ckpt-2.index", "model.ckpt-2.meta"} <= set(files)
    assert sum(files.values()) < 2 * MB, files
    assert sum("tfevents" in name for name in files) == 1
