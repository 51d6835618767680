"""What rank 0 shows."""

import os
import pty
import select

import pytest

from trainer.progress import ProgressBar, bar_line, log_line


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ((5, 20, {"loss": 0.25, "name": "x"}, 123.4), "step 5/20, loss 0.25, name x, 123 samples/s"),
        ((5, None, {}, None), "step 5"),
    ],
)
def test_log_line(arguments, expected):
    assert log_line(*arguments) == expected


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ((5, 20, 123.4, 8), "[##......]  25%  step 5/20  123 samples/s"),
        ((20, 20, None, 8), "[########] 100%  step 20/20"),
        ((7, None, 10.0, 8), "step 7  10 samples/s"),
    ],
)
def test_bar_line(arguments, expected):
    assert bar_line(*arguments) == expected


def test_bar_is_drawn_on_a_terminal_only(tmp_path):
    with open(tmp_path / "log", "w+") as file:
        ProgressBar(file).draw(2, 2, None)
        file.seek(0)
        assert file.read() == ""
    controller, terminal = pty.openpty()
    with os.fdopen(terminal, "w") as stream:
        bar = ProgressBar(stream)
        bar.draw(2, 2, None)
        bar.clear()
        # A terminal hands over what it has so far, which may be the first of the two writes only.
        written = ""
        while not written.endswith(" \r") and select.select([controller], [], [], 10)[0]:
            written += os.read(controller, 1000).decode()
    os.close(controller)
    assert written.startswith("\r[" + "#" * 30 + "] 100%  step 2/2")
    assert written.endswith(" \r")
