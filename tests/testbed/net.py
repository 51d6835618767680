"""The testbed's network: a free range, this machine's interface, a switch, the hosts' cards, faults on them.

The switch (a bridge per network) lives in a network namespace of its own, so this machine sees one interface
per testbed, its firewall never judges traffic between hosts, and all of it goes with the switch's process.
"""

from __future__ import annotations

import hashlib
import ipaddress
import json
import subprocess
from collections.abc import Sequence
from pathlib import Path

from tests.testbed.spec import Interface, TestbedError

FIRST_HOST = 11  # .1 is this machine, .11 the first host
MAX_INDEX = 254 - FIRST_HOST + 1
SWITCH_PORT = "machine"
MAIN_BRIDGE = "main"
CUT_TABLE = "ringmaster_cut"


def run(argv: Sequence[str], *, stdin: str = "", check: bool = True, keep_open: Sequence[int] = ()) -> str:
    """Standard output of a command on this machine. Raises: TestbedError with its standard error."""
    done = subprocess.run(
        list(argv), input=stdin, capture_output=True, text=True, timeout=60, pass_fds=tuple(keep_open)
    )
    if check and done.returncode != 0:
        given = f"\ngiven: {stdin.strip()}" if stdin else ""
        raise TestbedError(f"`{' '.join(argv)}` exited {done.returncode}: {done.stderr.strip()}{given}")
    return done.stdout


def in_net(pid: int, argv: Sequence[str], *, stdin: str = "", check: bool = True) -> str:
    """Runs one of this machine's tools in the network namespace of `pid`."""
    return run(["nsenter", "--target", str(pid), "--net", "--", *argv], stdin=stdin, check=check)


def batch(lines: Sequence[str], *, pid: int) -> None:
    """ip(8) commands in the network namespace of `pid`."""
    in_net(pid, ["ip", "-batch", "-"], stdin="".join(f"{line}\n" for line in lines))


def used_ranges() -> list[ipaddress.IPv4Network]:
    """Every IPv4 range this machine has an address in or a route to, the default route left out."""
    used = []
    for link in json.loads(run(["ip", "-4", "-j", "addr"])):
        for address in link.get("addr_info", []):
            used.append(ipaddress.IPv4Interface(f"{address['local']}/{address['prefixlen']}").network)
    for route in json.loads(run(["ip", "-4", "-j", "route", "show", "table", "all"])):
        if route["dst"] != "default":
            used.append(ipaddress.IPv4Network(route["dst"], strict=False))
    return used


def free_range(seed: str, used: Sequence[ipaddress.IPv4Network]) -> ipaddress.IPv4Network:
    """A 10.x.y.0/24 that overlaps none of `used`; `seed` decides where the search begins.

    Call it and put the address on an interface under one lock: nothing else reserves the range.
    """
    start = int(hashlib.sha256(seed.encode()).hexdigest(), 16)
    for step in range(1 << 14):
        number = (start + step) % (1 << 14)
        candidate = ipaddress.IPv4Network(f"10.{64 + (number >> 8)}.{number & 255}.0/24")
        if not any(candidate.overlaps(network) for network in used):
            return candidate
    raise TestbedError("no free 10.x.y.0/24 between 10.64 and 10.127", remedy="remove routes to 10.0.0.0/8")


def make_link(link: str, cidr: str, *, lock: int) -> None:
    """This machine's end of the cable to the switch; the other end waits here until the switch runs.

    The `ip` process holds the lock too: if its caller is killed, nobody clears up before it has ended.
    """
    lines = [
        f"link add {link} type veth peer name {link}p",
        f"addr add {cidr} brd + dev {link}",
        f"link set {link} up",
    ]
    run(["ip", "-batch", "-"], stdin="".join(f"{line}\n" for line in lines), keep_open=[lock])


def delete_link(link: str) -> bool:
    """Whether there was one."""
    found = link_exists(link)
    if found:
        run(["ip", "link", "delete", link], check=False)  # it may just be going with its namespace
        if link_exists(link):
            raise TestbedError(f"interface {link} could not be removed", remedy=f"ip link delete {link}")
    return found


def link_exists(link: str) -> bool:
    return bool(run(["ip", "-o", "link", "show", "dev", link], check=False).strip())


def start_switch(link: str, switch: int) -> None:
    run(["ip", "link", "set", f"{link}p", "netns", str(switch), "name", SWITCH_PORT])
    batch(
        [
            f"link add {MAIN_BRIDGE} type bridge stp_state 0 forward_delay 0",
            f"link set {MAIN_BRIDGE} up",
            f"link set {SWITCH_PORT} master {MAIN_BRIDGE} up",
        ],
        pid=switch,
    )


def port_name(index: int) -> str:
    return f"port{index}"


def hardware_address(seed: str) -> str:
    """The same for a host's card in every life of it: the others' ARP tables stay right over a restart."""
    return "02:" + hashlib.sha256(seed.encode()).digest()[:5].hex(":")


def plug_in(switch: int, cards: Sequence[tuple[int, int]], *, tag: str) -> None:
    """Gives each (index, pid) its eth0, with the other end in the switch."""
    lines = []
    for index, pid in cards:
        port = port_name(index)
        lines += [
            f"link add {port} type veth peer name eth0 address {hardware_address(f'{tag}/{index}')} netns {pid}",
            f"link set {port} master {MAIN_BRIDGE} up",
        ]
    batch(lines, pid=switch)
    for _, pid in cards:
        _settle_congestion_control(pid)


def _settle_congestion_control(pid: int) -> None:
    """Gives a host the kernel's default, cubic, or reno where this machine does not allow that.

    BBR, which some machines have, paces what it sends: between these hosts that costs time that no cable would.
    """
    allowed = Path("/proc/sys/net/ipv4/tcp_allowed_congestion_control").read_text().split()
    chosen = "cubic" if "cubic" in allowed else "reno"
    in_net(pid, ["sh", "-c", f"echo {chosen} > /proc/sys/net/ipv4/tcp_congestion_control"])


def unplug(switch: int, index: int) -> None:
    """The switch's end of a dead host's card: it goes by itself, but later than a restart may come."""
    in_net(switch, ["ip", "link", "delete", port_name(index)], check=False)


def add_interface(switch: int, index: int, pid: int, interface: Interface) -> None:
    name = interface.name
    address = [f"addr add {interface.cidr} dev {name}"] if interface.cidr else []
    if interface.kind == "bridge":
        batch([f"link add {name} type bridge", *address, f"link set {name} up"], pid=pid)
        return
    digest = hashlib.sha256(f"{index}/{name}".encode()).hexdigest()[:8]
    port = f"x{digest}"
    in_net(switch, ["ip", "link", "delete", port], check=False)  # left by the host's former life
    card = f"link add {port} type veth peer name {name} address {hardware_address(port)} netns {pid}"
    batch([card, f"link set {port} up"], pid=switch)
    if interface.network is not None:
        bridge = "net" + hashlib.sha256(interface.network.encode()).hexdigest()[:8]
        if not in_net(switch, ["ip", "-o", "link", "show", "dev", bridge], check=False).strip():
            batch(
                [f"link add {bridge} type bridge stp_state 0 forward_delay 0", f"link set {bridge} up"],
                pid=switch,
            )
        batch([f"link set {port} master {bridge}"], pid=switch)
    batch([*address, f"link set {name} up"], pid=pid)


def cut_rules(port: int | None, peers: Sequence[str]) -> str:
    """An nftables table that silently drops: everything, or TCP `port` inwards, or traffic with `peers`."""
    if port is not None:
        senders = f"ip saddr {{ {', '.join(peers)} }} " if peers else ""
        inwards, outwards = f"{senders}tcp dport {port} drop", ""
    elif peers:
        inwards = f"ip saddr {{ {', '.join(peers)} }} drop"
        outwards = f"ip daddr {{ {', '.join(peers)} }} drop"
    else:
        inwards = outwards = "drop"
    chains = [
        f"chain {hook} {{ type filter hook {hook} priority -300; {side}name lo accept; {rule}; }}"
        for hook, side, rule in (("input", "iif", inwards), ("output", "oif", outwards))
        if rule
    ]
    return f"table inet {CUT_TABLE} {{\n" + "\n".join(chains) + "\n}\n"


def cut(pid: int, port: int | None, peers: Sequence[str]) -> None:
    clear = f"table inet {CUT_TABLE} {{ }}\ndelete table inet {CUT_TABLE}\n"
    in_net(pid, ["nft", "-f", "-"], stdin=clear + cut_rules(port, peers))


def uncut(pid: int) -> None:
    in_net(pid, ["nft", "-f", "-"], stdin=f"table inet {CUT_TABLE} {{ }}\ndelete table inet {CUT_TABLE}\n")
