"""Which SSH servers lie on the way to a node; contacts none of them."""

from __future__ import annotations

import getpass
from collections.abc import Callable
from dataclasses import dataclass

from provision.cluster import Node
from provision.errors import NodeUnreachable
from provision.hosttext import parse_hosts
from provision.sshconfig import SSHSettings, apply_ssh_config

_MAX_HOPS = 8


@dataclass(frozen=True)
class Endpoint:
    """An sshd: the node's own or a jump host's."""

    name: str  # for messages
    host: str
    user: str
    port: int
    identity_files: tuple[str, ...] = ()
    identities_only: bool = False


def endpoint_of(node: Node) -> Endpoint:
    return Endpoint(
        node.name,
        node.host,
        node.user or getpass.getuser(),
        node.port or 22,
        node.identity_files,
        node.identities_only,
    )


def hops_of(node: Node, settings: Callable[[], SSHSettings]) -> tuple[Endpoint, ...]:
    """The jump hosts on the way to `node`, first one first; their own settings come from `settings()`.

    As in OpenSSH, the first hop's own ProxyJump is followed. A hop without keys of its own gets the node's.
    """
    if not node.proxy_jump:
        return ()
    config = settings()
    hops: list[Endpoint] = []
    jump: str | None = node.proxy_jump
    while jump:
        before: list[Endpoint] = []
        first = None
        for text in jump.split(","):
            spec = apply_ssh_config(parse_hosts(text, source="ProxyJump")[0], config)
            first = spec if first is None else first
            files = spec.identity_files or node.identity_files
            only = spec.identities_only or (node.identities_only and not spec.identity_files)
            user = spec.user or getpass.getuser()
            before.append(Endpoint(text.strip(), spec.host, user, spec.port or 22, files, only))
        hops = before + hops
        if len(hops) > _MAX_HOPS:
            raise NodeUnreachable(
                node.name, f"more than {_MAX_HOPS} jump hosts: does ProxyJump go in a circle?"
            )
        jump = first.proxy_jump if first is not None else None
    return tuple(hops)
