"""`python -m tests.testbed`: hosts on this machine that stay up until they are taken down."""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from provision.errors import RingmasterError, UsageError
from tests.testbed import state
from tests.testbed.bed import Testbed
from tests.testbed.spec import KINDS, Bind


def parser() -> argparse.ArgumentParser:
    top = argparse.ArgumentParser(prog="python -m tests.testbed", description=__doc__)
    commands = top.add_subparsers(dest="command", required=True)

    def command(name: str, text: str, *, node: bool = False) -> argparse.ArgumentParser:
        made = commands.add_parser(name, help=text, description=text)
        made.add_argument("--name", default="default", help="the testbed's name (default: default)")
        made.add_argument("--state-dir", type=Path, default=state.DEFAULT_ROOT, help="where testbeds lie")
        if node:
            made.add_argument("node", help="a host of the testbed")
        return made

    up = command("up", "make hosts and leave them running")
    up.add_argument("--nodes", default="3", help="how many (h1, h2, ...), or names: a,b,c")
    up.add_argument("--kind", choices=KINDS, default="clone")
    up.add_argument("--users", default="", help="further users on every host: alice,bob")
    up.add_argument("--port", type=int, default=22, help="sshd's port")
    up.add_argument("--base", help="a layer written by freeze")
    up.add_argument("--bind", action="append", default=[], metavar="SOURCE:TARGET[:rw]", help="show a path")
    command("down", "remove hosts and everything of them")
    command("status", "which hosts run")
    execute = command("exec", "run a command in a host: exec h1 -- hostname", node=True)
    execute.add_argument("--user", default="root")
    execute.add_argument("--timeout", type=float, default=60.0, help="seconds")
    execute.add_argument("argv", nargs="+", help="the command")
    cut = command("cut", "drop a host's traffic", node=True)
    cut.add_argument("--port", type=int, help="only TCP to this port")
    slow = command("slow", "delay or limit a host's traffic", node=True)
    slow.add_argument("--delay-ms", type=float, default=0.0, help="each way")
    slow.add_argument("--rate-mbit", type=float)
    for name, text in (
        ("restore", "undo cut, slow and pause"),
        ("pause", "stop all processes of a host"),
        ("kill", "end a host as a power cut would"),
        ("restart", "start a host again"),
    ):
        command(name, text, node=True)
    freeze = command("freeze", "make a layer for up --base out of a host", node=True)
    freeze.add_argument("--to", type=Path, required=True, help="where the layer goes, on the same disk")
    return top


def parse_bind(text: str) -> Bind:
    source, _, rest = text.partition(":")
    target, _, mode = rest.partition(":")
    if not target or mode not in ("", "ro", "rw"):
        raise UsageError(f"bind {text!r} cannot be read, expected SOURCE:TARGET or SOURCE:TARGET:rw")
    return Bind(source, target, readonly=mode != "rw")


def up(options: argparse.Namespace) -> None:
    began = time.monotonic()
    nodes = int(options.nodes) if options.nodes.isdigit() else options.nodes.split(",")
    bed = Testbed(
        nodes,
        name=options.name,
        state_root=options.state_dir,
        kind=options.kind,
        users=tuple(user for user in options.users.split(",") if user),
        port=options.port,
        base=options.base,
        binds=tuple(parse_bind(text) for text in options.bind),
    )
    bed.up()
    bed.detach()
    for node in bed.nodes():
        print(f"{node.name}\t{node.address}")
    # Absolute, and with every name spelt out, so that it can be typed as it stands in any directory.
    print(
        f"{len(bed.names)} hosts up in {time.monotonic() - began:.1f} s. What to type next:\n"
        f"  fab provision --hosts {','.join(bed.names)} --ssh-config {bed.ssh_config} --mpi wheel\n"
        f"  ssh -F {bed.ssh_config} {bed.names[0]}\n"
        f"  fab testbed --down --name {bed.name}",
        file=sys.stderr,
    )


def status(bed: Testbed) -> int:
    """Exit status 1 where a host is not running."""
    print(f"testbed {bed.name}, {bed.subnet}, ssh -F {bed.ssh_config}")
    for node in bed.nodes():
        word = "running" if node.is_running() else "down"
        print(f"{node.name}\t{node.spec.kind}\t{node.address}\t{word}\t{len(node.processes())} processes")
    return 0 if all(node.is_running() for node in bed.nodes()) else 1


def act(options: argparse.Namespace) -> int:
    if options.command == "up":
        up(options)
        return 0
    if options.command == "down":
        found = Testbed(1, name=options.name, state_root=options.state_dir).down()
        print("removed" if found else "nothing to remove", file=sys.stderr)
        return 0
    bed = Testbed.attach(options.name, state_root=options.state_dir)
    if options.command == "status":
        return status(bed)
    node = bed.node(options.node)
    if options.command == "exec":
        result = node.exec(options.argv, user=options.user, timeout_s=options.timeout, check=False)
        sys.stdout.write(result.stdout)
        sys.stderr.write(result.stderr)
        return result.status
    if options.command == "cut":
        node.cut(port=options.port)
    elif options.command == "slow":
        node.slow(delay_ms=options.delay_ms, rate_mbit=options.rate_mbit)
    elif options.command == "freeze":
        print(bed.freeze(node.name, to=options.to.absolute()))
    else:
        {"restore": node.restore, "pause": node.pause, "kill": node.kill, "restart": node.restart}[
            options.command
        ]()
    return 0


def main(argv: Sequence[str] | None = None) -> int:
    try:
        return act(parser().parse_args(argv))
    except RingmasterError as error:
        print(error, file=sys.stderr)
        return error.exit_status


if __name__ == "__main__":
    sys.exit(main())
