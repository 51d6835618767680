"""Reads mpirun hostfiles as people write them: CRLF, BOM, comments, brackets, `slots = 1`, duplicates."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from provision.hosttext import (
    MAX_HOSTS,
    HostSpec,
    Place,
    merge_mentions,
    parse_host,
    split_items,
    split_words,
)

_LINE = "a line is `HOST [slots=N] [max_slots=M] [user=NAME] [port=P]`"


def parse_hostfile(text: str, *, source: str) -> tuple[HostSpec, ...]:
    """The hosts of a hostfile, in order; HostTextError gives file, line, and what is allowed there.

    As in mpirun, a host without `slots=` may be listed once for each slot; `slots=` may be given once only.
    """
    specs: list[HostSpec] = []
    for number, line in enumerate(text.lstrip("\ufeff").split("\n"), start=1):
        content = _without_comment(line).strip(" \t\r")
        if content:
            specs += _parse_line(content, Place(source, number))
            if len(specs) > MAX_HOSTS:
                raise Place(source, number).error(f"more than {MAX_HOSTS} hosts")
    if not specs:
        raise Place(source).error("lists no host", remedy=_LINE)
    groups: dict[tuple[str, int, str | None], list[HostSpec]] = {}
    for spec in specs:
        groups.setdefault(spec.key, []).append(spec)
    return tuple(_one_host(mentions) for mentions in groups.values())


def _without_comment(line: str) -> str:
    starts = [line.find(mark) for mark in ("#", "//") if mark in line]
    return line[: min(starts)] if starts else line


def _parse_line(content: str, place: Place) -> list[HostSpec]:
    if content[0] in "^+":
        raise place.error(
            f"{content!r}: excluded (^) and relative (+) hosts are not read", part=content, remedy=_LINE
        )
    if len(split_items(content, place)) > 1 or content.endswith(","):
        raise place.error(
            f"{content!r}: one host or range a line, without commas", part=content, remedy=_LINE
        )
    word, *rest = split_words(content)
    for other in rest:
        if "=" not in other:
            raise place.error(f"got {other!r} after {word!r}, expected key=value", part=other, remedy=_LINE)
    return parse_host(word, rest, place)


def _one_host(mentions: Sequence[HostSpec]) -> HostSpec:
    counted = [spec for spec in mentions if spec.slots is not None]
    if len(mentions) > 1 and counted:
        late = mentions[1]
        raise late.place.error(
            f"{late.host} was already on line {mentions[0].place.line}, and slots= is given for it",
            part=late.host,
            remedy="give its slots on one line, or list it once for each slot without slots=",
        )
    host = merge_mentions(mentions)[0]
    return host if len(mentions) == 1 else _with_slots(host, len(mentions))


def _with_slots(host: HostSpec, slots: int) -> HostSpec:
    if host.max_slots is not None and host.max_slots < slots:
        raise host.place.error(
            f"{host.host} is listed {slots} times, more than its max_slots={host.max_slots}", part=host.host
        )
    return dataclasses.replace(host, slots=slots)
