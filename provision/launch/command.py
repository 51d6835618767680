"""The mpirun command line and the environment that goes with it; pure."""

from __future__ import annotations

import fnmatch
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from provision.errors import UsageError

# What a training run is tuned with; anything else is passed on by name with --env.
PASSED_ON = ("HOROVOD_*", "NCCL_*", "TF_*", "OMP_*", "RINGMASTER_STOPPED_LIMIT_S")
MPIRUN_ONLY = ("OMPI_MCA_*",)  # mpirun hands these to every rank itself
# Each node's own env.sh sets these; another node's value would break it.
NODE_OWN = frozenset({"PATH", "LD_LIBRARY_PATH", "OPAL_PREFIX", "HOME", "USER", "PWD", "SHELL"})
# Set by `run_job`; a user's value would break the checks made with them.
RESERVED = ("RINGMASTER_*", "OMPI_COMM_WORLD_*")
# $RINGMASTER_PREFIX is set on each node by its own env.sh, so no node's path is used on another.
# A node that is cut off says nothing more: without these its silence is noticed after 300 + 9 * 20 s, or never. The
# daemons get them too, so a node that lost the head ends its own ranks.
KEEPALIVE = {"time": 15, "intvl": 5, "probes": 4}  # seconds idle, seconds between probes, probes missed
ON_EACH_NODE = ("/bin/sh", "-c", 'exec "$RINGMASTER_PREFIX/libexec/rank.sh" "$@"', "rank")


@dataclass(frozen=True)
class MpirunOptions:
    """How mpirun is called. `prefix` is the head's own absolute prefix, `hostfile` a path on the head."""

    prefix: str
    np: int
    hostfile: str
    alone: bool = False  # all ranks run on the head: no SSH
    networks: tuple[str, ...] = ()  # CIDRs that carry MPI's and mpirun's own traffic
    env_names: tuple[str, ...] = ()  # variables of mpirun's environment that every rank gets
    as_root: bool = False
    framed: bool = True  # output comes as XML, for `demux`
    single_copy: bool = True  # False where the kernel forbids one rank to read another's memory
    yields: bool = False  # True where the ranks compute on the very cores that MPI waits on
    extra: tuple[str, ...] = ()


def mpirun_argv(options: MpirunOptions, program: Sequence[str]) -> list[str]:
    """The argv that runs `program` on `np` ranks, for Open MPI 3.1 to 4.1."""
    openmpi = f"{options.prefix}/openmpi"
    argv = [f"{openmpi}/bin/mpirun", "--prefix", openmpi]
    if options.as_root:
        argv.append("--allow-run-as-root")
    if options.framed:
        argv.append("-xml")
    argv += ["-np", str(options.np), "--hostfile", options.hostfile]
    argv += ["-bind-to", "none", "-map-by", "slot", "-mca", "pml", "ob1", "-mca", "btl", "^openib"]
    # Without it Open MPI 3.x takes w.1.example.net and w.2.example.net for one node (open-mpi/ompi#4732).
    argv += ["-mca", "orte_keep_fqdn_hostnames", "1"]
    if not options.alone:
        # Flat, not a tree: every daemon is started from the head, so only the head's SSH has to work, and a
        # node that is down takes no other with it.
        argv += ["-mca", "plm_rsh_agent", f"{options.prefix}/libexec/rsh_agent.sh"]
        argv += ["-mca", "plm_rsh_no_tree_spawn", "1"]
        for name, value in KEEPALIVE.items():
            argv += ["-mca", f"oob_tcp_keepalive_{name}", str(value)]
    if options.networks:
        # Include, never exclude: an exclude list replaces the default one, which holds the loopback.
        cidrs = ",".join(options.networks)
        argv += ["-mca", "btl_tcp_if_include", cidrs, "-mca", "oob_tcp_if_include", cidrs]
    if not options.single_copy:
        argv += ["-mca", "btl_vader_single_copy_mechanism", "none"]
    if options.yields:
        # Open MPI waits in a busy loop. Beside TensorFlow's threads on the same cores that loop takes the time the
        # step needs: MNIST on 3 hosts that share 2 cores went from 800 to 2,500 samples/s with this.
        argv += ["-mca", "mpi_yield_when_idle", "1"]
    for name in options.env_names:
        argv += ["-x", name]
    return [*argv, *options.extra, *program]


def rank_argv(project: str, script: str, args: Sequence[str]) -> list[str]:
    """What mpirun starts on every node: that node's own rank.sh, which finds project and python itself."""
    return [*ON_EACH_NODE, project, script, *args]


def job_environment(environ: Mapping[str, str], extra: Mapping[str, str]) -> dict[str, str]:
    """The variables handed to the job: the tuning ones of `environ`, then the user's own `extra`.

    UsageError for a name that only a node itself can set.
    """
    wanted = {name: value for name, value in environ.items() if _matches(name, PASSED_ON + MPIRUN_ONLY)}
    for name in extra:
        if name in NODE_OWN or _matches(name, RESERVED):
            raise UsageError(
                f"--env {name}=…: is set by every node itself and cannot be passed on",
                remedy="leave it out",
            )
        if not name.isidentifier() or not name.isascii():
            raise UsageError(f"--env {name!r}: expected a name of letters, digits and underscores")
    return {**wanted, **extra}


def exported(names: Iterable[str]) -> tuple[str, ...]:
    """Those of `names` that need `-x`, sorted; mpirun passes its own parameters on by itself."""
    return tuple(sorted(name for name in names if not _matches(name, MPIRUN_ONLY)))


def parse_env(words: Iterable[str], environ: Mapping[str, str]) -> dict[str, str]:
    """`--env` values: `NAME=VALUE`, or `NAME` to pass the controller's own value on."""
    pairs = {}
    for word in words:
        name, equals, value = word.partition("=")
        if not equals:
            if name not in environ:
                raise UsageError(f"--env {name}: is not set here", remedy=f"write --env {name}=VALUE")
            value = environ[name]
        pairs[name] = value
    return pairs


def _matches(name: str, patterns: Iterable[str]) -> bool:
    return any(fnmatch.fnmatchcase(name, pattern) for pattern in patterns)
