"""Reads Ansible inventories: the JSON of `ansible-inventory --list`, and plain INI and YAML without Ansible.

The two plain readers know hosts, groups, children, variables and number ranges. What they do not know they
refuse, and say that Ansible itself should be installed to read it.
"""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from provision.hosttext import (
    HostSpec,
    Place,
    check_host,
    check_proxy_jump,
    check_slots,
    check_user,
    expand_range,
    read_number,
)

_INSTALL = "install Ansible on this machine: its `ansible-inventory` is used where it is found"
_RANGE = re.compile(r"\[(\d+):(\d+)(?::(\d+))?\]", re.ASCII)
MAX_GROUP_DEPTH = 50


@dataclass
class Group:
    """One group while it is being read; hosts and children keep the order of the file."""

    hosts: dict[str, dict[str, Any]] = field(default_factory=dict)
    variables: dict[str, Any] = field(default_factory=dict)
    children: list[str] = field(default_factory=list)


def parse_list_json(text: str, *, source: str) -> tuple[HostSpec, ...]:
    """The hosts in the output of `ansible-inventory --list`, in the order of its groups."""
    place = Place(source)
    try:
        value = json.loads(text)
        known = value["_meta"]["hostvars"]
        groups = {name: each for name, each in value.items() if name != "_meta"}
        listed = [host for name in _walk(groups) for host in groups.get(name, {}).get("hosts", [])]
        hosts = {str(host): dict(known.get(host, {})) for host in [*listed, *known]}
    except (ValueError, RecursionError, KeyError, TypeError, AttributeError) as error:
        raise place.error(
            "is no `ansible-inventory --list` output, expected JSON with _meta.hostvars"
        ) from error
    return _specs(hosts, place)


def _walk(groups: Mapping[str, Any]) -> Iterator[str]:
    """Group names from `all` down, then the rest; each once."""
    seen: set[str] = set()
    waiting = ["all", *groups]
    while waiting:
        name = waiting.pop(0)
        if name not in seen:
            seen.add(name)
            waiting[:0] = groups.get(name, {}).get("children", [])
            yield name


def parse_ini(text: str, *, source: str) -> tuple[HostSpec, ...]:
    """A plain INI inventory: [group], [group:children], [group:vars], hosts with variables, `h[01:16]`."""
    groups: dict[str, Group] = {"all": Group()}
    name, kind = "ungrouped", "hosts"
    for number, raw in enumerate(text.lstrip("\ufeff").split("\n"), start=1):
        place, line = Place(source, number), raw.strip()
        if not line or line[0] in "#;":
            continue
        section = re.fullmatch(r"\[([^\[\]:\s]+)(?::(\w+))?\]\s*(?:[#;].*)?", line)
        if section:
            name, kind = section[1], section[2] or "hosts"
            if kind not in ("hosts", "children", "vars"):
                raise place.error(f"section [{name}:{kind}] is not known", part=line, remedy=_INSTALL)
            groups.setdefault(name, Group())
            continue
        group = groups.setdefault(name, Group())
        if kind == "vars":
            key, equals, value = line.partition("=")
            if not equals:
                raise place.error(f"{line!r}: expected key=value", part=line)
            group.variables[key.strip()] = _unquoted(value.strip())
            continue
        words = _ini_words(line, place)
        if kind == "children":
            if len(words) != 1:
                raise place.error(f"{line!r}: expected the name of one group", part=line)
            group.children.append(words[0])
            continue
        variables = {}
        for word in words[1:]:
            key, equals, value = word.partition("=")
            if not equals:
                raise place.error(f"{word!r} after {words[0]!r}: expected key=value", part=word)
            variables[key] = value
        for host, port in _ini_hosts(words[0], place):
            given = {"ansible_port": port, **variables} if port else variables
            group.hosts.setdefault(host, {}).update(given)
    return _specs(_flatten(groups, Place(source)), Place(source))


def _ini_words(line: str, place: Place) -> list[str]:
    try:
        return shlex.split(line, comments=True)
    except ValueError as error:
        raise place.error(f"{line!r}: {error}", part=line) from error


def _unquoted(value: str) -> str:
    return value[1:-1] if len(value) > 1 and value[0] == value[-1] and value[0] in "'\"" else value


def _ini_hosts(word: str, place: Place) -> list[tuple[str, str | None]]:
    pattern, port = word, None
    tail = re.fullmatch(r"([^:]*(?:\[[^\]]*\][^:]*)*):(\d+)", word)
    if tail:
        pattern, port = tail[1], tail[2]
    pattern = _RANGE.sub(lambda m: f"[{m[1]}-{m[2]}" + (f"/{m[3]}]" if m[3] else "]"), pattern)
    if ":" in pattern and "[" in pattern:
        raise place.error(
            f"{word!r}: only number ranges like `h[01:16]` are read", part=word, remedy=_INSTALL
        )
    return [(host, port) for host in expand_range(pattern, place, part=word)]


def parse_yaml(text: str, *, source: str) -> tuple[HostSpec, ...]:
    """A plain YAML inventory: groups with `hosts`, `vars` and `children`, as mappings."""
    place = Place(source)
    try:
        import yaml
    except ImportError as error:
        raise place.error("PyYAML is needed to read a YAML inventory", remedy=_INSTALL) from error
    try:
        value = yaml.safe_load(text)
    except yaml.MarkedYAMLError as error:
        line = error.problem_mark.line + 1 if error.problem_mark else None
        raise Place(source, line).error(f"is no plain YAML: {error.problem}", remedy=_INSTALL) from error
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        raise place.error(f"is no plain YAML: {error}") from error
    groups: dict[str, Group] = {"all": Group()}
    for name, body in _mapping(value, "the file", place).items():
        _add_yaml_group(str(name), body, groups, place, 0)
    return _specs(_flatten(groups, place), place)


def _add_yaml_group(name: str, body: Any, groups: dict[str, Group], place: Place, depth: int) -> None:
    if depth > MAX_GROUP_DEPTH:
        raise place.error(f"groups are nested deeper than {MAX_GROUP_DEPTH}", part=name)
    group = groups.setdefault(name, Group())
    for key, value in _mapping(body, name, place).items():
        held = _mapping(value, f"{name}.{key}", place)
        if key == "hosts":
            for word, variables in held.items():
                for host, port in _ini_hosts(str(word), place):
                    given = _mapping(variables, f"{name}.hosts.{word}", place)
                    group.hosts.setdefault(host, {}).update(
                        {"ansible_port": port, **given} if port else given
                    )
        elif key == "vars":
            group.variables.update(held)
        elif key == "children":
            for child, inner in held.items():
                group.children.append(str(child))
                _add_yaml_group(str(child), inner, groups, place, depth + 1)
        else:
            raise place.error(
                f"{name}.{key}: expected hosts, vars or children", part=str(key), remedy=_INSTALL
            )


def _mapping(value: Any, what: str, place: Place) -> dict[Any, Any]:
    if value is None:
        return {}
    if not isinstance(value, dict):
        raise place.error(f"{what}: got {value!r:.80}, expected a mapping", part=what, remedy=_INSTALL)
    return value


def _flatten(groups: Mapping[str, Group], place: Place) -> dict[str, dict[str, Any]]:
    """Each host's variables: `all`, then its groups from the outermost in, by name, then its own."""
    depth = {name: 0 if name == "all" else 1 for name in groups}
    for _ in range(MAX_GROUP_DEPTH):
        before = dict(depth)
        for name, group in groups.items():
            for child in group.children:
                if child not in groups:
                    raise place.error(f"group {name!r} has a child {child!r} that is not there", part=child)
                depth[child] = max(depth[child], depth[name] + 1)
        if depth == before:
            break
    else:
        raise place.error("groups are children of each other in a circle")
    order = sorted(groups, key=lambda name: (depth[name], name))
    hosts: dict[str, dict[str, Any]] = {}
    members = {name: _members(name, groups) for name in order}
    for group in groups.values():
        for host in group.hosts:
            hosts.setdefault(host, {})
    for host, variables in hosts.items():
        holding = [name for name in order if name == "all" or host in members[name]]
        for name in holding:
            variables.update(groups[name].variables)
        for name in holding:
            variables.update(groups[name].hosts.get(host, {}))
    return hosts


def _members(name: str, groups: Mapping[str, Group]) -> set[str]:
    found, waiting = set(groups[name].hosts), list(groups[name].children)
    while waiting:
        child = waiting.pop()
        found |= set(groups[child].hosts)
        waiting += groups[child].children
    return found


_KEY_WORDS = ("ansible_ssh_private_key_file", "ansible_private_key_file")


def _specs(hosts: Mapping[str, Mapping[str, Any]], place: Place) -> tuple[HostSpec, ...]:
    if not hosts:
        raise place.error("names no host")
    return tuple(_spec(name, variables, place) for name, variables in hosts.items())


def _spec(name: str, variables: Mapping[str, Any], place: Place) -> HostSpec:
    def text(*keys: str) -> str | None:
        for key in keys:
            if key in variables and variables[key] is not None:
                value = variables[key]
                if not isinstance(value, (str, int)) or isinstance(value, bool):
                    raise place.error(f"{name}: {key}: got {value!r:.80}, expected plain text", part=key)
                if "{{" in str(value) or not str(value).isprintable():
                    raise place.error(f"{name}: {key}: templates are not read: {value!r}", part=key)
                return str(value)
        return None

    def number(field_name: str, *keys: str) -> int | None:
        value = text(*keys)
        return None if value is None else read_number(value, field_name, f"{name}: {keys[0]}", place)

    connection = text("ansible_connection") or "ssh"
    if connection not in ("ssh", "smart", "paramiko", "paramiko_ssh", "local", "ansible.builtin.ssh"):
        raise place.error(
            f"{name}: ansible_connection={connection} is not read, expected ssh or local", part=name
        )
    if connection == "local":
        return HostSpec(host="localhost", place=place, slots=number("slots", "ringmaster_slots", "slots"))
    user, key_file = text("ansible_user", "ansible_ssh_user"), text(*_KEY_WORDS)
    slots, max_slots = number("slots", "ringmaster_slots", "slots"), number("max_slots", "max_slots")
    check_slots(slots, max_slots, place, part=name)
    return HostSpec(
        host=check_host(text("ansible_host", "ansible_ssh_host") or name, place, part=name),
        place=place,
        alias=check_host(name, place, part=name),
        user=None if user is None else check_user(user, place, part=name),
        port=number("port", "ansible_port", "ansible_ssh_port"),
        slots=slots,
        max_slots=max_slots,
        identity_files=() if key_file is None else (key_file,),
        proxy_jump=_proxy_jump(text("ansible_ssh_common_args") or "", name, place),
    )


def _proxy_jump(arguments: str, name: str, place: Place) -> str | None:
    """The jump host in `ansible_ssh_common_args`, the one SSH option among them that decides reachability."""
    if "proxycommand" in arguments.lower():
        raise place.error(f"{name}: ProxyCommand is not supported", part=arguments, remedy="use ProxyJump")
    jump = re.search(r"(?:-J\s*|-o\s*['\"]?ProxyJump[= ])([^\s'\"]+)", arguments, re.IGNORECASE)
    return check_proxy_jump(jump[1], place) if jump else None
