"""Tables, folding, step lines, verdicts and JSON."""

from __future__ import annotations

import io
import json

import pytest
from rich.console import Console

from provision.report import fold_rows, json_text, make_console, print_json, step_line, table, verdict


def printed(function, *args, **options) -> str:
    stream = io.StringIO()
    function(*args, console=make_console(stream), **options)
    return stream.getvalue()


def test_table_in_a_pipe_is_plain_and_whole():
    long = "x" * 500
    text = printed(table, "Hosts", ["node", "what"], [("n[1-3]", "changed"), ("n4", long), ("n5", None)])
    assert text.splitlines() == ["Hosts", "node    what", "n[1-3]  changed", f"n4      {long}", "n5      -"]


def test_table_in_a_narrow_console_that_is_no_terminal_is_whole():
    stream = io.StringIO()
    table("", ["node", "what"], [("n4", "y" * 300)], console=Console(file=stream, width=40))
    assert "y" * 300 in stream.getvalue()


def test_table_row_of_wrong_length():
    with pytest.raises(ValueError, match="row of 1 cells, expected 2"):
        printed(table, "t", ["a", "b"], [("x",)])


def test_terminal_has_colour_and_what_a_node_says_cannot_steer_it():
    stream = io.StringIO()
    console = Console(file=stream, force_terminal=True, color_system="standard", width=60, no_color=False)
    table("", ["a", "b"], [("changed", "\x1b[2J[bold]")], console=console)
    text = stream.getvalue()
    assert "\x1b[33mchanged" in text
    assert "\\x1b[2J[bold]" in text
    assert "\x1b[2J" not in text


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.mark.parametrize(("no_color", "coloured"), [("", True), ("1", False)], ids=["colour", "no-color"])
def test_no_color_is_honoured(no_color, coloured, monkeypatch):
    monkeypatch.setenv("NO_COLOR", no_color)
    monkeypatch.setenv("TERM", "xterm")
    stream = Terminal()
    step_line(["h1"], "openmpi", "changed", make_console(stream))
    assert ("\x1b[" in stream.getvalue()) == coloured
    assert "h1: openmpi" in stream.getvalue()


@pytest.mark.parametrize(
    ("rows", "key", "expected"),
    [
        pytest.param([(f"n{i:02}", "ok") for i in range(1, 17)], None, [("n[01-16]", "ok")], id="all-equal"),
        pytest.param(
            [("n1", "ok"), ("n2", "bad"), ("n3", "ok")],
            None,
            [("n[1,3]", "ok"), ("n2", "bad")],
            id="first-seen-order",
        ),
        pytest.param(
            [("a", {"s": 1}), ("b", {"s": 1}), ("c", {"s": 2})],
            lambda row: row["s"],
            [("a,b", {"s": 1}), ("c", {"s": 2})],
            id="key",
        ),
        pytest.param([], None, [], id="none"),
    ],
)
def test_fold_rows(rows, key, expected):
    assert fold_rows(rows, key) == expected


def test_step_line():
    assert printed(step_line, ["n1", "n2"], "openmpi", "unchanged") == "n[1-2]: openmpi unchanged\n"


def test_verdict_names_each_remedy_once():
    text = printed(verdict, False, "1 of 3 nodes", remedies=["do [this]", "do that", "do [this]"])
    assert text == "failed: 1 of 3 nodes\n  -> do [this]\n  -> do that\n"
    assert printed(verdict, True, "3 nodes") == "ok: 3 nodes\n"


def test_json_keeps_key_order_and_is_not_wrapped(tmp_path):
    value = {"z": 1, "a": {"path": tmp_path, "set": {"b", "a"}, "text": "é" * 500}}
    stream = io.StringIO()
    print_json(value, stream)
    assert stream.getvalue() == json_text(value)
    assert list(json.loads(stream.getvalue())) == ["z", "a"]
    assert json.loads(stream.getvalue())["a"] == {"path": str(tmp_path), "set": ["a", "b"], "text": "é" * 500}


def test_json_refuses_what_has_no_form():
    with pytest.raises(TypeError, match="object has no JSON form"):
        json_text({"a": object()})
