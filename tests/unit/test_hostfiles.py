"""Host text and hostfiles: what is read, what is refused and how, and that nothing else can happen."""

from __future__ import annotations

import os
import random
from pathlib import Path

import pytest

from provision.errors import HostTextError
from provision.hostfile import parse_hostfile
from provision.hosttext import HostSpec, parse_hosts


def short(specs: tuple[HostSpec, ...]) -> list[str]:
    """`user@host|port slots/max_slots`, what is open left out."""
    shown = []
    for s in specs:
        text = (f"{s.user}@" if s.user else "") + s.host + (f"|{s.port}" if s.port else "")
        text += "" if s.slots is None else f" {s.slots}"
        shown.append(text + (f"/{s.max_slots}" if s.max_slots else ""))
    return shown


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        pytest.param("h1,h2", ["h1", "h2"], id="list"),
        pytest.param("h1,h2,", ["h1", "h2"], id="last-comma"),
        pytest.param("h1, h2", ["h1", "h2"], id="comma-space"),
        pytest.param(" h1\th2\r\nh3 ", ["h1", "h2", "h3"], id="blanks"),
        pytest.param("h1,h1", ["h1"], id="twice"),
        pytest.param("h1,H1", ["h1"], id="twice-by-case"),
        pytest.param("h2,h1", ["h2", "h1"], id="order-kept"),
        pytest.param("gpu[01-03]", ["gpu01", "gpu02", "gpu03"], id="range"),
        pytest.param("n[1-3,7]", ["n1", "n2", "n3", "n7"], id="range-list"),
        pytest.param("n[0-4/2]", ["n0", "n2", "n4"], id="range-step"),
        pytest.param("r[1-2]n[1-2]", ["r1n1", "r1n2", "r2n1", "r2n2"], id="two-ranges"),
        pytest.param("10.0.0.[1-2]", ["10.0.0.1", "10.0.0.2"], id="range-of-addresses"),
        pytest.param("alice@h2:2222,bob@h3", ["alice@h2|2222", "bob@h3"], id="user-port"),
        pytest.param("h1:22", ["h1|22"], id="port-22"),
        pytest.param("h1 port=4", ["h1|4"], id="low-port-said-so"),
        pytest.param("h1,alice@h1:22", ["alice@h1|22"], id="twice-completed"),
        pytest.param("[fe80::1]:22", ["fe80::1|22"], id="ipv6-port"),
        pytest.param("root@[fe80::1%eth0]", ["root@fe80::1%eth0"], id="ipv6-scope"),
        pytest.param("fe80::1", ["fe80::1"], id="ipv6-bare"),
        pytest.param("[h2]:22", ["h2|22"], id="bracketed-name"),
        pytest.param("h1 slots=2, h2 slots = 3 max_slots=4", ["h1 2", "h2 3/4"], id="slots"),
        pytest.param("g[1-2]:2222 slots=4", ["g1|2222 4", "g2|2222 4"], id="slots-of-range"),
        pytest.param("h1 h2 slots=2", ["h1", "h2 2"], id="slots-of-the-last-word"),
        pytest.param("h1 slots=0", ["h1 0"], id="no-ranks"),
        pytest.param("h1,h1 slots=2", ["h1 2"], id="twice-slots-once"),
        pytest.param("127.0.0.1:2222,127.0.0.1:2200", ["127.0.0.1|2222", "127.0.0.1|2200"], id="two-ports"),
        pytest.param("a_b.example.org", ["a_b.example.org"], id="fqdn"),
    ],
)
def test_host_text(text, expected):
    assert short(parse_hosts(text)) == expected


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        pytest.param("", "names no host; expected hosts like", id="empty"),
        pytest.param(" ,\n, ", "names no host", id="only-commas"),
        pytest.param("h1:4", "for slots write `h1 slots=4`, for a port `h1 port=N`", id="port-or-slots"),
        pytest.param("h1,h23:2", "for slots write `h23 slots=2`", id="port-or-slots-2"),
        pytest.param("h1:0", "0 is no usual SSH port", id="zero"),
        pytest.param("h1:x", "got 'x' after the colon, expected an SSH port from 22 to 65535", id="word"),
        pytest.param("h1:", "got '' after the colon", id="no-port"),
        pytest.param("h1:65536", "expected an SSH port", id="port-too-high"),
        pytest.param("h1:22:33", "neither host:port nor an IPv6 address", id="two-colons"),
        pytest.param("-oProxyCommand=id", "cannot start with a dash", id="option"),
        pytest.param("a@-h", "cannot start with a dash", id="option-after-user"),
        pytest.param("-l@h", "a host cannot start with a dash", id="option-user"),
        pytest.param("h1;id", "is no host name", id="semicolon"),
        pytest.param("$(id)", "is no host name", id="dollar"),
        pytest.param("h1|h2", "is no host name", id="bar"),
        pytest.param("h[1-2]`id`", "no host name or range", id="backtick"),
        pytest.param("h1\x00", "is no host name", id="nul"),
        pytest.param("h1\x1b[31m", "a bracket is not closed", id="escape"),
        pytest.param("h\u00e9", "is no host name", id="accent"),
        pytest.param("h\u0661", "is no host name", id="other-digits"),
        pytest.param("h1\u00a0h2", "is no host name", id="hard-blank"),
        pytest.param("@all", "is no user name", id="group"),
        pytest.param("a;b@h1", "is no user name", id="user-semicolon"),
        pytest.param("h1!h2", "is no host name", id="nodeset-operator"),
        pytest.param("h[1-2]!h[1]", "no host name or range", id="nodeset-operator-range"),
        pytest.param("h*", "is no host name", id="wildcard"),
        pytest.param("h[1-3", "a bracket is not closed", id="open"),
        pytest.param("h1]", "brackets do not match", id="closed"),
        pytest.param("h[[1]]", "brackets do not match", id="nested"),
        pytest.param("h[]", "'' is no range", id="empty-range"),
        pytest.param("h[a-c]", "'a-c' is no range", id="letters"),
        pytest.param("h[3-1]", "bad range", id="backwards"),
        pytest.param("h[01-3]", "padding length mismatch", id="padding"),
        pytest.param("[1-3]", "a range needs letters before it", id="bare-range"),
        pytest.param("h[01:16]", "ranges are written with a dash", id="ansible-range"),
        pytest.param("h[1-999999999]", "999999999 hosts, expected at most 10000", id="huge"),
        pytest.param("h[1-200]x[1-200]", "40000 hosts, expected at most 10000", id="huge-product"),
        pytest.param("a[1-9000],b[1-9000]", "more than 10000 hosts", id="huge-sum"),
        pytest.param("slots=2", "follows no host", id="slots-alone"),
        pytest.param("h1, slots=2", "follows no host", id="slots-after-comma"),
        pytest.param("h1 slots=two", "slots: got 'two', expected a whole number", id="slots-word"),
        pytest.param("h1 slots=-1", "slots: got '-1'", id="slots-negative"),
        pytest.param("h1 slots=2 max_slots=1", "max_slots=1 is below slots=2", id="max-below"),
        pytest.param("h1 slots=1 slots=2", "slots is given twice", id="slots-twice"),
        pytest.param("h1:22 port=23", "port is given twice", id="port-twice"),
        pytest.param("h1 gpus=2", "unknown setting 'gpus=2'", id="unknown-setting"),
        pytest.param("h1 slots=1,h1 slots=2", "given twice, with slots 1 and 2", id="contradiction"),
        pytest.param("alice@h1,bob@h1", "given twice, with user alice and bob", id="two-users"),
        pytest.param("4", "ends in a number but is no IPv4 address", id="number"),
        pytest.param("10.0.0.256", "ends in a number but is no IPv4 address", id="no-address"),
        pytest.param("a..b", "is no host name", id="empty-label"),
        pytest.param("a" * 64, "is no host name", id="long-label"),
    ],
)
def test_host_text_refused(text, expected):
    with pytest.raises(HostTextError) as caught:
        parse_hosts(text)
    message = str(caught.value)
    assert expected in message
    assert message.startswith("--hosts: ")
    assert "\x1b" not in message
    assert "\x00" not in message
    assert caught.value.exit_status == 2


# Each file of the shared cases: what is read, or line and message.
HOSTFILE_CASES: dict[str, list[str] | tuple[int | None, str]] = {
    "bom": ["h2 1", "h3 1"],
    "brack": ["h2|22 1"],
    "colon": (1, "for slots write `h2 slots=2`"),
    "comments": ["h2 1", "h3 1"],
    "crlf": ["h2 1", "h3 1"],
    "dup": (2, "h2 was already on line 1"),
    "dupnos": ["h2 2", "h3"],
    "empty": (None, "lists no host; a line is `HOST [slots=N]"),
    "maxlt": (1, "max_slots=1 is below slots=2"),
    "nonl": ["h2 1", "h3 1"],
    "nos": ["h2", "h3"],
    "p2222": ["h2|2222 1", "h3 1"],
    "plain": ["h2 1", "h3 1"],
    "uname": ["nobodyhere@h2 1", "h3 1"],
    "userat": ["root@h2 1", "h3 1"],
    "word": (1, "slots: got 'two', expected a whole number from 0 to 65535"),
    "zero": ["h2 0", "h3 2"],
}


@pytest.mark.skipif("RINGMASTER_TEST_DATA" not in os.environ, reason="needs RINGMASTER_TEST_DATA")
def test_hostfile_cases_are_all_decided():
    folder = Path(os.environ["RINGMASTER_TEST_DATA"]) / "cases" / "hostfiles"
    assert sorted(path.name for path in folder.iterdir()) == sorted(HOSTFILE_CASES)


@pytest.mark.skipif("RINGMASTER_TEST_DATA" not in os.environ, reason="needs RINGMASTER_TEST_DATA")
@pytest.mark.parametrize("name", sorted(HOSTFILE_CASES))
def test_hostfile_case(name):
    path = Path(os.environ["RINGMASTER_TEST_DATA"]) / "cases" / "hostfiles" / name
    check_hostfile(path.read_bytes().decode("utf-8"), HOSTFILE_CASES[name])


def check_hostfile(text: str, expected: list[str] | tuple[int | None, str]) -> None:
    if isinstance(expected, list):
        assert short(parse_hostfile(text, source="hosts.txt")) == expected
        return
    with pytest.raises(HostTextError) as caught:
        parse_hostfile(text, source="hosts.txt")
    line, message = expected
    assert caught.value.line == line
    assert message in str(caught.value)
    assert str(caught.value).startswith("hosts.txt:" if line is None else f"hosts.txt:{line}: ")


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        pytest.param("\ufeffh2\r\n\r\nh3 # c\r\n// d\r\n", ["h2", "h3"], id="bom-crlf-comments"),
        pytest.param("g[01-02] slots=4", ["g01 4", "g02 4"], id="range"),
        pytest.param("h1 slots=2 max-slots=4 username=al port=2222", ["al@h1|2222 2/4"], id="mpirun-words"),
        pytest.param("h1\nh1\nh1\n", ["h1 3"], id="three-times"),
        pytest.param("h1:2222\nh1:2200\n", ["h1|2222", "h1|2200"], id="two-ports"),
        pytest.param("h1 slots=2\nh1\n", (2, "already on line 1"), id="slots-then-bare"),
        pytest.param("h1\n\nh1 slots=2\n", (3, "already on line 1"), id="bare-then-slots"),
        pytest.param("h1 max_slots=1\nh1\n", (1, "more than its max_slots=1"), id="more-than-max"),
        pytest.param("h1\nh2,h3\n", (2, "one host or range a line"), id="comma"),
        pytest.param("h1,\n", (1, "one host or range a line"), id="last-comma"),
        pytest.param("h1 h2\n", (1, "got 'h2' after 'h1', expected key=value"), id="two-hosts"),
        pytest.param("h1 slots 2\n", (1, "got 'slots' after 'h1'"), id="no-equals"),
        pytest.param("h1\n^h2\n", (2, "excluded (^) and relative (+)"), id="excluded"),
        pytest.param("h1\n+n0\n", (2, "excluded (^) and relative (+)"), id="relative"),
        pytest.param("h1\n-oX\n", (2, "cannot start with a dash"), id="option"),
        pytest.param("h1\n\nh[1-\n", (3, "bracket is not closed"), id="open-bracket"),
        pytest.param("# only\n// comments\n", (None, "lists no host"), id="only-comments"),
    ],
)
def test_hostfile(text, expected):
    check_hostfile(text, expected)


PIECES = [
    *"hn129.:@,[]-/%=_ \t\n\r#;$`^!&*\x00\u00e9\ufeff",
    "[1-3]",
    "slots=",
    "::",
    "fe80",
    "user",
    " port=22",
    "[01-",
]


@pytest.mark.parametrize("seed", range(20))
def test_any_text_parses_or_is_a_host_text_error(seed):
    random_text = random.Random(seed)
    parsed = 0
    for _ in range(200):
        text = "".join(random_text.choices(PIECES, k=random_text.randrange(1, 14)))
        for read in (parse_hosts, lambda t: parse_hostfile(t, source="f")):
            try:
                specs = read(text)
            except HostTextError:
                continue
            parsed += 1
            for spec in specs:
                assert set(spec.host) <= set("abcdefghijklmnopqrstuvwxyz0123456789.:%_-")
                assert spec.host[0] not in "-"
                assert (spec.user or "x")[0] != "-"
    assert parsed > 0
