"""A job's output on the screen and in its folder."""

from __future__ import annotations

import base64
import io
import json
import threading
from pathlib import Path

import pytest

from provision.errors import NodeError
from provision.fanout import Outcome
from provision.launch.output import JobOutput, TerminalScreen
from provision.launch.run import interrupted_text, lost_text
from provision.launch.runs import Run, new_run, read_meta, runs_of


class Kept:
    """A screen that keeps what it is given."""

    def __init__(self) -> None:
        self.lines: list[tuple[int | None, str, str]] = []
        self.states: list[str] = []

    def line(self, rank: int | None, stream: str, text: str) -> None:
        self.lines.append((rank, stream, text))

    def progress(self, rank: int, text: str) -> bool:
        self.states.append(text)
        return True


def element(rank: int, kind: str, data: bytes) -> str:
    return f'<stdout rank="{rank}">~{kind}{base64.b64encode(data).decode()}&#010;</stdout>'


def end(rank: int, status: int, out: int, err: int) -> str:
    value = {"status": status, "out": out, "err": err, "stopped_s": None}
    return element(rank, "x", json.dumps(value).encode())


@pytest.fixture
def run(tmp_path: Path) -> Run:
    return new_run(tmp_path)


def test_lines_come_whole_with_their_rank_and_the_log_holds_every_byte(run: Run) -> None:
    screen = Kept()
    output = JobOutput(run, screen, 2)
    for line in (
        "<mpirun>",
        element(0, "o", b"epoch 1 "),
        element(1, "o", b"other\n"),
        element(0, "o", b"done\n\xe2\x82"),
        element(0, "o", b"\xac last"),
        element(1, "e", b"careful\n"),
        "</mpirun>",
    ):
        output.on_line("stdout", line)
    output.close()
    assert screen.lines == [
        (1, "out", "other"),
        (0, "out", "epoch 1 done"),
        (1, "err", "careful"),
        (0, "out", "€ last"),
    ]
    assert (run.folder / "rank-0.out").read_text() == "epoch 1 done\n€ last"
    assert (run.folder / "rank-1.err").read_bytes() == b"careful\n"


def test_the_first_failure_counts_and_hides_what_mpirun_says_of_it(run: Run) -> None:
    screen = Kept()
    output = JobOutput(run, screen, 3)
    output.on_line("stderr", "a warning of mpirun")
    output.on_line("stderr", "[h1:4514] plm:rsh: Warning: setpgid(4523,4523) failed in parent with errno=13")
    output.on_line("stdout", element(2, "e", b"Traceback\nValueError: no\n"))
    output.on_line("stdout", end(0, 0, 0, 0))
    output.on_line("stdout", end(2, 3, 0, 24))
    output.on_line("stdout", end(1, 143, 0, 0))
    output.on_line("stderr", "mpirun noticed that process rank 2 exited on signal 9 (Killed).")
    output.close()
    assert output.first_failure is not None
    assert (output.first_failure.rank, output.first_failure.status) == (2, 3)
    assert output.error_lines(2) == ("Traceback", "ValueError: no")
    assert [line for line in screen.lines if line[0] is None] == [(None, "err", "a warning of mpirun")]
    assert "exited on signal 9" in (run.folder / "mpirun.log").read_text()


def test_output_that_never_arrived_is_counted(run: Run) -> None:
    output = JobOutput(run, Kept(), 1)
    output.on_line("stdout", element(0, "o", b"12345"))
    output.on_line("stdout", end(0, 0, 12, 3))
    assert output.lost_bytes(0) == 10


def test_progress_of_rank_0_is_told_while_its_line_is_unfinished(run: Run) -> None:
    screen = Kept()
    output = JobOutput(run, screen, 2)
    for data in (b"\r10%", b"\r20%", b"\r100%\n"):
        output.on_line("stdout", element(0, "o", data))
        output.on_line("stdout", element(1, "o", data))
    assert screen.states == ["10%", "20%"]
    assert screen.lines == [(0, "out", "100%"), (1, "out", "100%")]


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.mark.parametrize(
    ("kind", "expected"), [(io.StringIO, ""), (Terminal, "[0] 10%\r\x1b[K[0] 20%\r\x1b[K")]
)
def test_progress_is_drawn_on_a_terminal_only(kind: type[io.StringIO], expected: str) -> None:
    out, err = io.StringIO(), kind()
    screen = TerminalScreen(out, err)
    screen.progress(0, "10%")
    screen.progress(0, "20%")
    screen.line(0, "out", "done")
    screen.line(None, "err", "note")
    assert err.getvalue() == expected + "note\n"
    assert out.getvalue() == "[0] done\n"


def test_jobs_started_at_once_have_folders_of_their_own(tmp_path: Path) -> None:
    made: list[Run] = []
    threads = [threading.Thread(target=lambda: made.append(new_run(tmp_path))) for _ in range(20)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len({run.job for run in made}) == 20
    for run in made:
        run.write_meta({"state": "done"})
    assert [run.job for run in runs_of(tmp_path)] == sorted(run.job for run in made)
    assert read_meta(made[0])["state"] == "done"


LOST = """\
--------------------------------------------------------------------------
ORTE has lost communication with a remote daemon.

  HNP daemon   : [[33747,0],0] on node h1
  Remote daemon: [[33747,0],2] on node h3

This is usually due to either a failure of the TCP network
connection to the node, or possibly an internal failure of
the daemon itself."""


def test_a_host_that_mpirun_lost_is_no_failure_of_the_ranks_it_ends(run: Run) -> None:
    output = JobOutput(run, Kept(), 3)
    for line in LOST.split("\n"):
        output.on_line("stderr", line)
    output.on_line("stdout", end(0, 143, 0, 0))
    output.close()
    assert output.lost_hosts == ["h3"]
    text = lost_text(output.lost_hosts, ("h1", "h2", "h3", "h3"), "h1")
    assert text.startswith("error: h3 (ranks 2, 3) was lost: it answers h1 no more")
    assert "run `fab healthcheck`" in text


def test_a_daemon_lost_after_a_rank_failed_is_not_the_reason(run: Run) -> None:
    output = JobOutput(run, Kept(), 3)
    output.on_line("stdout", end(1, 3, 0, 0))
    for line in LOST.split("\n"):
        output.on_line("stderr", line)
    assert output.lost_hosts == []


def test_a_rank_that_wrote_nothing_is_not_said_to_have_a_log(run: Run) -> None:
    output = JobOutput(run, Kept(), 3)
    output.on_line("stdout", element(1, "o", b"out"))
    output.on_line("stdout", element(2, "e", b"err"))
    assert output.log_words(0) == "it wrote nothing: its log is empty"
    for rank, stream in ((1, "out"), (2, "err")):
        path = run.folder / f"rank-{rank}.{stream}"
        assert path.exists()
        assert output.log_words(rank).endswith(str(path))


def test_what_ctrl_c_came_to_is_one_line() -> None:
    done: Outcome[str] = Outcome(value="")
    away: Outcome[str] = Outcome(error=NodeError("h3", "no answer"))
    assert interrupted_text({"h1": done, "h2": done}) == "interrupted: the job's ranks on h[1-2] were ended"
    assert interrupted_text({"h1": done, "h3": away}) == (
        "interrupted: the job's ranks on h1 were ended; not known of h3"
    )


@pytest.mark.parametrize(
    ("written", "lines"),
    [(b"\r 50%\r100%\r", []), (b"\r 50%\r100%", ["100%"]), (b"done", ["done"])],
    ids=["taken back", "left standing", "no bar"],
)
def test_a_bar_that_was_taken_back_is_not_the_last_word(run: Run, written: bytes, lines: list[str]) -> None:
    screen = Kept()
    output = JobOutput(run, screen, 1)
    output.on_line("stdout", element(0, "e", written))
    output.on_line("stdout", end(0, 0, 0, len(written)))
    output.close()
    assert [text for _, _, text in screen.lines] == lines
