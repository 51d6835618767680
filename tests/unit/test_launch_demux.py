"""The ranks' output out of mpirun's: exact for any chunking, any bytes, and text of mpirun in between."""

from __future__ import annotations

import importlib.util
import json
import random
from collections import defaultdict
from collections.abc import Iterable
from pathlib import Path
from types import ModuleType

import pytest

from provision.launch.demux import Demux, Event, Lines, MpirunText, RankData, RankEnd, shown, unescape

RANK_IO = Path(__file__).resolve().parents[2] / "scripts/node/rank_io.py"

# What mpirun 4.1.8 prints with -xml for two ranks under rank_io.py.
RECORDED = """\
<mpirun>
<stdout rank="0">~oaMOpbGxvIDxhJmI+IDAJeAoNcHJvZ3Jlc3MgMQ1wcm9ncmVzcyAyCg==......&#010;</stdout>
<stdout rank="1">~oaMOpbGxvIDxhJmI+IDEJeAoNcHJvZ3Jlc3MgMQ1wcm9ncmVzcyAyCg==......&#010;</stdout>
<stdout rank="0">~eZXJyIDAgG1sxbWJvbGQbWzBtIAAgbnVsCiBwYXJ0aWFs..................&#010;</stdout>
<stdout rank="0">~xeyJzdGF0dXMiOiAwLCAib3V0IjogNDAsICJlcnIiOiAzMywgInN0b3BwZWRfcyI6IG51bGx9&#010;</stdout>
<stdout rank="1">~eZXJyIDEgG1sxbWJvbGQbWzBtIAAgbnVsCiBwYXJ0aWFs..................&#010;</stdout>
<stdout rank="1">~xeyJzdGF0dXMiOiAwLCAib3V0IjogNDAsICJlcnIiOiAzMywgInN0b3BwZWRfcyI6IG51bGx9&#010;</stdout>
</mpirun>
"""

# What it prints for two ranks that write to it directly, as rank.sh does when it fails.
RECORDED_RAW = """\
<mpirun>
<stdout rank="0">h&#195;&#169;llo &lt;a&amp;b&gt; 0&#009;x&#010;</stdout>
<stdout rank="0">&#013;progress 1&#013;progress 2&#010;</stdout>
<stderr rank="0">err 0 &#027;[1mbold&#027;[0m &#000; nul&#010;</stderr>
<stderr rank="0"> partial</stderr><stdout rank="1">h&#195;&#169;llo &lt;a&amp;b&gt; 1&#009;x&#010;</stdout>
<stdout rank="1">&#013;progress 1&#013;progress 2&#010;</stdout>
<stderr rank="1">err 1 &#027;[1mbold&#027;[0m &#000; nul&#010;</stderr>
<stderr rank="1"> partial</stderr></mpirun>
"""


def rank_io() -> ModuleType:
    spec = importlib.util.spec_from_file_location("rank_io", RANK_IO)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def collect(pieces: Iterable[str]) -> tuple[dict[tuple[int, str], bytes], list[RankEnd], list[str]]:
    demux = Demux()
    events: list[Event] = [event for piece in pieces for event in demux.feed(piece)] + demux.close()
    data: dict[tuple[int, str], bytes] = defaultdict(bytes)
    for event in events:
        if isinstance(event, RankData):
            data[event.rank, event.stream] += event.data
    ends = [event for event in events if isinstance(event, RankEnd)]
    return dict(data), ends, [event.text for event in events if isinstance(event, MpirunText)]


def cut(text: str, seed: int, largest: int) -> list[str]:
    rnd = random.Random(seed)
    pieces = []
    while text:
        size = rnd.randint(1, largest)
        pieces.append(text[:size])
        text = text[size:]
    return pieces


@pytest.mark.parametrize("largest", [1, 3, 50, 100_000])
def test_recorded_output_gives_each_ranks_bytes(largest: int) -> None:
    data, ends, own = collect(cut(RECORDED, 1, largest))
    for rank in (0, 1):
        expected = f"héllo <a&b> {rank}\tx\n\rprogress 1\rprogress 2\n".encode()
        assert data[rank, "out"] == expected
        assert data[rank, "err"] == b"err %d \x1b[1mbold\x1b[0m \x00 nul\n partial" % rank
    assert ends == [RankEnd(0, 0, 40, 33), RankEnd(1, 0, 40, 33)]
    assert own == []


@pytest.mark.parametrize("largest", [1, 7, 100_000])
def test_output_without_frames_is_kept_too(largest: int) -> None:
    data, ends, own = collect(cut(RECORDED_RAW, 2, largest))
    for rank in (0, 1):
        assert data[rank, "out"] == f"héllo <a&b> {rank}\tx\n\rprogress 1\rprogress 2\n".encode()
        assert data[rank, "err"] == b"err %d \x1b[1mbold\x1b[0m \x00 nul\n partial" % rank
    assert ends == []
    assert own == []


@pytest.mark.parametrize(
    ("text", "lines"),
    [
        ("ORTE was unable to start\n", ["ORTE was unable to start"]),
        ("a < b and <b> too\n", ["a < b and <b> too"]),
        ("<mpirun>\nno line end", ["no line end"]),
        ("<stderr>help text&#010;more&#010;</stderr>\n", ["help text", "more"]),
        ('<stdout rank="0">never ended', ['<stdout rank="0">never ended']),
    ],
    ids=["plain", "angle", "unfinished", "unranked", "torn"],
)
@pytest.mark.parametrize("largest", [1, 1000])
def test_mpiruns_own_text(text: str, lines: list[str], largest: int) -> None:
    data, _, own = collect(cut(text, 3, largest))
    assert data == {}
    assert own == lines


@pytest.mark.parametrize("seed", range(5))
def test_frames_of_many_ranks_cut_anywhere_come_back_exact(seed: int) -> None:
    module = rank_io()
    rnd = random.Random(seed)
    written: dict[tuple[int, str], bytes] = defaultdict(bytes)
    streams: dict[int, list[str]] = {rank: [] for rank in range(8)}
    for rank in streams:
        for _ in range(60):
            kind, name = rnd.choice([(b"o", "out"), (b"e", "err")])
            block = bytes(rnd.randrange(256) for _ in range(rnd.randint(1, module.BLOCK_BYTES)))
            written[rank, name] += block
            frame = module.frame(kind, block).decode("ascii")
            assert len(frame) <= 4096
            assert len(frame) > module.FRAME_MIN
            # mpirun cuts what it reads where it likes, also in the middle of a frame.
            at = rnd.randint(0, len(frame))
            for part in (frame[:at], frame[at:]):
                escaped = part.replace("\n", "&#010;")
                streams[rank].append(f'<stdout rank="{rank}">{escaped}</stdout>' + "\n" * part.endswith("\n"))
    text = ""
    while any(streams.values()):
        rank = rnd.choice([rank for rank, left in streams.items() if left])
        text += streams[rank].pop(0)
    data, _, own = collect(cut(text, seed, 5000))
    assert data == dict(written)
    assert own == []


def test_an_end_frame_tells_status_and_amounts() -> None:
    end = {"status": 137, "out": 3, "err": 4, "stopped_s": 60}
    frame = rank_io().frame(b"x", json.dumps(end).encode()).decode()
    text = f'<stdout rank="5">{frame[:-1]}&#010;</stdout>\n'
    assert collect([text])[1] == [RankEnd(5, 137, 3, 4, 60)]


def test_text_that_only_looks_like_a_frame_is_shown_as_it_is() -> None:
    assert collect(['<stdout rank="0">~oA&#010;</stdout>\n'])[0] == {(0, "out"): b"~oA\n"}
    assert collect(['<stdout rank="0">~home&#010;</stdout>\n'])[0] == {(0, "out"): b"~home\n"}


def test_unescape_is_the_inverse_for_every_byte() -> None:
    text = "".join(f"&#{code:03d};" for code in range(256)) + "&lt;&gt;&amp;&amp;lt;"
    assert unescape(text).encode("latin-1") == bytes(range(256)) + b"<>&&lt;"


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        (b"plain", "plain"),
        (b"a\rb", "b"),
        (b"\r10%\r20%\r", "20%"),
        (b"", ""),
        (b"\r", ""),
        ("grüße".encode(), "grüße"),
        (b"\xff\xfe", "\ufffd\ufffd"),
    ],
)
def test_a_line_is_shown_in_its_last_state(line: bytes, expected: str) -> None:
    assert shown(line) == expected


def test_lines_are_joined_over_pieces_and_split_characters() -> None:
    lines = Lines()
    text = "erste\nzweite Zeile mit ä\n\rfortschritt 1".encode()
    got = [line for byte in text for line in lines.feed(bytes([byte]))]
    assert got == ["erste", "zweite Zeile mit ä"]
    assert lines.progress == "fortschritt 1"
    assert lines.feed(b"\rfortschritt 2\nlast") == ["fortschritt 2"]
    assert lines.progress == ""
    assert lines.close() == ["last"]
    assert lines.close() == []


def test_a_line_without_end_is_shown_in_pieces() -> None:
    lines = Lines()
    got = lines.feed(b"x" * (Lines.MAX_BYTES + 5))
    assert [len(line) for line in got] == [Lines.MAX_BYTES + 5]
