"""The mpirun command line, as a list, for every kind of cluster."""

from __future__ import annotations

import shlex
from dataclasses import replace

import pytest

from provision.errors import UsageError
from provision.launch.command import (
    MpirunOptions,
    exported,
    job_environment,
    mpirun_argv,
    parse_env,
    rank_argv,
)

BASE = MpirunOptions(
    prefix="/home/alice/local", np=4, hostfile="/home/alice/local/.ringmaster/jobs/j.hostfile",
    networks=("10.0.0.0/24",), env_names=("HOROVOD_X", "RINGMASTER_NP"),
)  # fmt: skip
FULL = """\
/home/alice/local/openmpi/bin/mpirun --prefix /home/alice/local/openmpi -xml -np 4
 --hostfile /home/alice/local/.ringmaster/jobs/j.hostfile -bind-to none -map-by slot -mca pml ob1 -mca btl ^openib
 -mca orte_keep_fqdn_hostnames 1 -mca plm_rsh_agent /home/alice/local/libexec/rsh_agent.sh
 -mca plm_rsh_no_tree_spawn 1 -mca oob_tcp_keepalive_time 15 -mca oob_tcp_keepalive_intvl 5
 -mca oob_tcp_keepalive_probes 4 -mca btl_tcp_if_include 10.0.0.0/24 -mca oob_tcp_if_include 10.0.0.0/24
 -x HOROVOD_X -x RINGMASTER_NP prog arg"""


def test_the_whole_command_line_over_several_hosts() -> None:
    assert mpirun_argv(BASE, ["prog", "arg"]) == shlex.split(FULL)


def pairs(argv: list[str]) -> set[tuple[str, str]]:
    return set(zip(argv, argv[1:]))


def test_root_is_allowed_exactly_when_asked() -> None:
    assert "--allow-run-as-root" not in mpirun_argv(BASE, ["p"])
    assert mpirun_argv(replace(BASE, as_root=True), ["p"]).count("--allow-run-as-root") == 1


def test_one_host_alone_needs_no_ssh_and_no_network() -> None:
    argv = mpirun_argv(replace(BASE, alone=True, networks=()), ["p"])
    assert not any("rsh" in word or "if_include" in word for word in argv)


def test_interfaces_are_included_never_excluded() -> None:
    argv = mpirun_argv(replace(BASE, networks=("10.0.0.0/24", "10.0.1.0/24")), ["p"])
    assert ("btl_tcp_if_include", "10.0.0.0/24,10.0.1.0/24") in pairs(argv)
    assert ("oob_tcp_if_include", "10.0.0.0/24,10.0.1.0/24") in pairs(argv)
    assert not any("exclude" in word for word in argv)


def test_ranks_on_the_cpu_wait_without_taking_it() -> None:
    wanted = ("mpi_yield_when_idle", "1")
    assert wanted not in pairs(mpirun_argv(BASE, ["p"]))
    assert wanted in pairs(mpirun_argv(replace(BASE, yields=True), ["p"]))


def test_single_copy_goes_off_where_ptrace_is_restricted() -> None:
    wanted = ("btl_vader_single_copy_mechanism", "none")
    assert wanted not in pairs(mpirun_argv(BASE, ["p"]))
    assert wanted in pairs(mpirun_argv(replace(BASE, single_copy=False), ["p"]))


def test_words_of_the_script_stay_words() -> None:
    args = ["a b", "$(id)", "x;y", "--np", "-x", "", "é'\""]
    argv = mpirun_argv(BASE, rank_argv("mnist-1a2b", "mnist.py", args))
    assert argv[-len(args) - 6 :] == [
        "/bin/sh", "-c", 'exec "$RINGMASTER_PREFIX/libexec/rank.sh" "$@"', "rank", "mnist-1a2b", "mnist.py", *args,
    ]  # fmt: skip


def test_the_tuning_variables_are_passed_on_and_nothing_else() -> None:
    environ = {
        "HOROVOD_FUSION_THRESHOLD": "1", "NCCL_DEBUG": "INFO", "TF_CPP_MIN_LOG_LEVEL": "2", "OMP_NUM_THREADS": "4",
        "OMPI_MCA_btl_base_verbose": "10", "PATH": "/bin", "LD_LIBRARY_PATH": "/x", "SECRET": "s", "HOME": "/root",
    }  # fmt: skip
    got = job_environment(environ, {"MY": "own", "OMP_NUM_THREADS": "1"})
    assert got == {
        "HOROVOD_FUSION_THRESHOLD": "1", "NCCL_DEBUG": "INFO", "TF_CPP_MIN_LOG_LEVEL": "2", "OMP_NUM_THREADS": "1",
        "OMPI_MCA_btl_base_verbose": "10", "MY": "own",
    }  # fmt: skip
    # mpirun hands OMPI_MCA_ variables on by itself and complains about -x for them.
    assert exported(got) == (
        "HOROVOD_FUSION_THRESHOLD", "MY", "NCCL_DEBUG", "OMP_NUM_THREADS", "TF_CPP_MIN_LOG_LEVEL",
    )  # fmt: skip


@pytest.mark.parametrize(
    "name", ["PATH", "LD_LIBRARY_PATH", "OPAL_PREFIX", "RINGMASTER_NP", "A-B", "1A", "é"]
)
def test_variables_that_cannot_be_passed_on_are_refused(name: str) -> None:
    with pytest.raises(UsageError, match=r"--env"):
        job_environment({}, {name: "x"})


def test_env_words() -> None:
    assert parse_env(["A=b=c", "E=", "HERE"], {"HERE": "v"}) == {"A": "b=c", "E": "", "HERE": "v"}
    with pytest.raises(UsageError, match="GONE"):
        parse_env(["GONE"], {})
