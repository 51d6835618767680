"""Which SSH servers lie on the way to a node; contacts none of them."""

from __future__ import annotations

import getpass
from dataclasses import dataclass, field

from provision.cluster import Node
from provision.errors import NodeUnreachable
from provision.hosttext import parse_hosts
from provision.sshconfig import HostKeyRules, SSHSettings, apply_ssh_config, host_key_rules
from provision.transport.hostkeys import known_name

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
    rules: HostKeyRules = field(default_factory=HostKeyRules)

    @property
    def key_name(self) -> str:
        """What known_hosts files call it."""
        return self.rules.alias or known_name(self.host, self.port)


def endpoint_of(node: Node, settings: SSHSettings) -> Endpoint:
    user, port = node.user or getpass.getuser(), node.port or 22
    # The node's name is what was typed, but for the underscores (inventories.node_names).
    names = (node.name, *(name for name in settings.names() if name.replace("_", "-") == node.name))
    rules = host_key_rules(settings, names, node.host, user=user, port=port)
    return Endpoint(node.name, node.host, user, port, node.identity_files, node.identities_only, rules)


def hops_of(node: Node, config: SSHSettings) -> tuple[Endpoint, ...]:
    """The jump hosts on the way to `node`, first one first; their own settings come from `config`.

    As in OpenSSH, the first hop's own ProxyJump is followed. A hop without keys of its own gets the node's.
    """
    if not node.proxy_jump:
        return ()
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
            port = spec.port or 22
            names = (spec.alias,) if spec.alias else ()
            rules = host_key_rules(config, names, spec.host, user=user, port=port)
            before.append(Endpoint(text.strip(), spec.host, user, port, files, only, rules))
        hops = before + hops
        if len(hops) > _MAX_HOPS:
            raise NodeUnreachable(
                node.name, f"more than {_MAX_HOPS} jump hosts: does ProxyJump go in a circle?"
            )
        jump = first.proxy_jump if first is not None else None
    return tuple(hops)
