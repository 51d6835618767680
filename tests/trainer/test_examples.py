"""The examples with a loop of the user's own: early stopping, and stopping and going on."""

import re

import pytest

from tests.trainer.launch import ROOT, run

EXAMPLES = ROOT / "examples"


def test_early_stopping_ends_all_ranks_alike():
    job = run(EXAMPLES / "early_stopping.py", 2, "--patience", 1, "--validate-steps", 5, "--epochs", 2)
    assert job.status == 0, job.output
    end = re.search(r"ended at step (\d+) \((.*)\); best at step (\d+): test accuracy (\d\.\d+)", job.output)
    assert end, job.output
    assert end.group(2) == "no progress in 1 validations"
    assert int(end.group(1)) == int(end.group(3)) + 5
    assert float(end.group(4)) >= 0.7


def test_resume_goes_on_in_step_and_in_data(tmp_path):
    arguments = ["--checkpoint-dir", tmp_path / "run", "--epochs", 1, "--batch-size", 64, "--log-steps", 1]
    stopped = run(EXAMPLES / "resume.py", 2, *arguments, "--stop-after", 5)
    assert stopped.status == 0, stopped.output
    assert "started at step 0" in stopped.output
    assert "step 5: stopped; start it again to go on" in stopped.output
    job = run(EXAMPLES / "resume.py", 2, *arguments)
    assert job.status == 0, job.output
    assert "went on from step 5" in job.output
    # 8,000 images in steps of 128.
    assert "step 63: finished" in job.output
    places = {
        int(step): int(place)
        for output in (stopped.output, job.output)
        for step, place in re.findall(r"step (\d+)/63, .*first image (\d+)", output)
    }
    assert places == {step: (step - 1) * 128 for step in range(1, 64)}


@pytest.mark.parametrize(
    ("script", "words", "text"),
    [
        ("early_stopping.py", ["--data-dir", "{place}"], "early_stopping.py: {place}"),
        (
            "resume.py",
            ["--checkpoint-dir", "{place}"],
            "trainer: checkpoint_dir: got {place} (Not a directory)",
        ),
    ],
)
def test_what_cannot_be_used_is_one_line_for_all_ranks(script, words, text, tmp_path):
    (tmp_path / "file").write_text("")
    place = str(tmp_path / "file" / "below")
    job = run(EXAMPLES / script, 2, *(word.format(place=place) for word in words))
    assert job.status != 0
    lines = [line for line in job.output.splitlines() if place in line]
    assert len(lines) == 1, job.output
    assert text.format(place=place) in lines[0]
    assert "Traceback" not in job.output
