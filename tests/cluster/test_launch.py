"""Jobs on real hosts with different users, ports and homes: output, exit statuses, refusals, nothing left running."""

from __future__ import annotations

import hashlib
import json
import os
import re
import signal
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.cluster.conftest import MakeTestbed
from tests.cluster.lab import PROGRAM, Lab
from tests.testbed.spec import NodeSpec

pytestmark = [pytest.mark.cluster, pytest.mark.slow]

PREFIX = {"h1": "/root/local", "h2": "/home/alice/local", "h3": "/home/bob/local"}
PROBE = """\
import json, os, sys
print(json.dumps({
    "rank": int(os.environ["OMPI_COMM_WORLD_RANK"]), "size": int(os.environ["OMPI_COMM_WORLD_SIZE"]),
    "host": os.uname().nodename, "user": os.environ.get("USER"), "uid": os.getuid(), "cwd": os.getcwd(),
    "args": sys.argv[1:], "cpus": len(os.sched_getaffinity(0)), "own": os.environ.get("MY_OWN"),
}))
"""


@pytest.fixture(scope="module")
def lab(make_testbed: MakeTestbed, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Lab]:
    """h1 as root, alice@h2 on port 2222, bob@h3: three users with three homes."""
    specs = [NodeSpec("h1"), NodeSpec("h2", port=2222, users=("alice",)), NodeSpec("h3", users=("bob",))]
    bed = make_testbed(specs)
    made = Lab(bed, tmp_path_factory.mktemp("lab"))
    made.provision("h1,alice@h2:2222,bob@h3", "--mpi", "wheel", "--slots", "3")
    yield made
    bed.down()


@pytest.fixture(autouse=True)
def idle(lab: Lab) -> Iterator[None]:
    """After every test no host runs anything, whatever the job came to."""
    yield
    deadline = time.monotonic() + 10
    while any(node.workload() for node in lab.bed.nodes()) and time.monotonic() < deadline:
        time.sleep(0.2)
    assert {node.name: node.workload() for node in lab.bed.nodes()} == {"h1": [], "h2": [], "h3": []}


def project(tmp_path: Path, text: str) -> Path:
    script = tmp_path / "project" / "job.py"
    script.parent.mkdir(exist_ok=True)
    script.write_text(text)
    return script


def said(output: str) -> dict[int, dict[str, Any]]:
    """What PROBE printed, by rank; the line's own rank mark must agree."""
    found = {}
    for mark, text in re.findall(r"^\[(\d+)\] (\{.*\})$", output, re.M):
        value = json.loads(text)
        assert value["rank"] == int(mark)
        found[value["rank"]] = value
    return found


def newest_run(lab: Lab) -> Path:
    return max((lab.cwd / ".ringmaster" / "runs").iterdir())


def test_users_ports_and_homes_may_differ(lab: Lab, tmp_path: Path) -> None:
    """CASES user@host, binding, root: alice@h2:2222 and bob@h3 under a root head."""
    words = ["a b", "$(id)", "x;y", "q'uo\"te", "--flag", "é"]
    done = lab.run(
        *("train", "--script", str(project(tmp_path, PROBE)), "--np", "9", "--env", "MY_OWN=v a"),
        "--",
        *words,
    )
    ranks = said(done.stdout)
    assert sorted(ranks) == list(range(9))
    assert [ranks[r]["host"] for r in range(9)] == ["h1"] * 3 + ["h2"] * 3 + ["h3"] * 3
    assert {(v["host"], v["cwd"].split("/projects/")[0]) for v in ranks.values()} == set(PREFIX.items())
    assert len({v["cwd"].split("/projects/")[1] for v in ranks.values()}) == 1
    assert {v["size"] for v in ranks.values()} == {9}
    assert {tuple(v["args"]) for v in ranks.values()} == {tuple(words)}
    assert {v["own"] for v in ranks.values()} == {"v a"}
    assert {v["cpus"] for v in ranks.values()} == {len(os.sched_getaffinity(0))}, "no rank is bound to a core"
    assert done.stderr.count("--allow-run-as-root") == 1
    meta = json.loads((newest_run(lab) / "meta.json").read_text())
    assert (meta["state"], meta["status"], meta["np"]) == ("done", 0, 9)
    assert meta["ended"] is not None


def test_a_head_that_is_not_root_is_not_run_as_root(lab: Lab, tmp_path: Path) -> None:
    """The same hosts without h1: alice's h2 is the head."""
    other = Lab(lab.bed, tmp_path / "cwd")
    other.cwd.mkdir()
    other.provision("alice@h2:2222,bob@h3", "--mpi", "wheel", "--slots", "1")
    done = other.run("train", "--script", str(project(tmp_path, PROBE)), "--np", "2")
    assert [said(done.stdout)[rank]["host"] for rank in (0, 1)] == ["h2", "h3"]
    assert "root" not in done.stderr
    assert "--allow-run-as-root" not in json.loads((newest_run(other) / "meta.json").read_text())["argv"]
    # The first cluster's own SSH settings were replaced on h2 and h3: bring them back.
    lab.run("provision")


def test_output_of_8_ranks_is_whole_and_exact(lab: Lab, tmp_path: Path) -> None:
    """CASES carriage returns: 10,000 lines of up to 8,000 bytes a rank, UTF-8, some with \\r."""
    text = """\
import os, random, sys
def lines(rank, count):
    rnd = random.Random(rank)
    for i in range(count):
        body = rnd.choice(["\\u65e5\\u672c\\u8a9e ", "abc<&> ", "10%\\r", "\\u00e9", "~o"]) * 2000
        cut = ("%d %d " % (rank, i) + body).encode()[:rnd.randrange(8, 8000)]
        yield cut.decode("utf-8", "ignore").encode() + b"\\n"
if __name__ == "__main__":
    for line in lines(int(os.environ["OMPI_COMM_WORLD_RANK"]), int(sys.argv[1])):
        sys.stdout.buffer.write(line)
"""
    script = project(tmp_path, text)
    space: dict[str, Any] = {"__name__": "lines"}
    exec(compile(text, "lines", "exec"), space)  # the very generator that the ranks run
    count = 10_000
    with open(tmp_path / "shown", "wb") as shown:
        done = subprocess.run(
            [str(PROGRAM), "train", "--script", str(script), "--np", "8", "--", str(count)],
            cwd=lab.cwd, stdout=shown, stderr=subprocess.PIPE, timeout=300, check=False,
        )  # fmt: skip
    assert done.returncode == 0, done.stderr[-2000:]
    assert b"lost" not in done.stderr
    folder = newest_run(lab)
    for rank in range(8):
        expected = hashlib.sha256()
        for line in space["lines"](rank, count):
            expected.update(line)
        assert hashlib.sha256((folder / f"rank-{rank}.out").read_bytes()).hexdigest() == expected.hexdigest()
        (folder / f"rank-{rank}.out").unlink()
    counts = dict.fromkeys(range(8), 0)
    with open(tmp_path / "shown", encoding="utf-8", newline="\n") as shown_text:
        for line in shown_text:
            match = re.match(r"\[(\d)\] ", line)
            assert match, line[:80]
            counts[int(match[1])] += 1
    assert set(counts.values()) == {count}


def test_a_failing_rank_is_named_and_its_status_is_the_jobs(lab: Lab, tmp_path: Path) -> None:
    script = project(
        tmp_path,
        "import os, time\n"
        "if os.environ['OMPI_COMM_WORLD_RANK'] == '4':\n    raise SystemExit('cannot read the data')\n"
        "time.sleep(120)\n",
    )
    started = time.monotonic()
    done = lab.run("train", "--script", str(script), "--np", "7", timeout_s=60, expect=1)
    assert time.monotonic() - started < 30
    assert "error: rank 4 on h2 exited 1" in done.stderr
    assert "cannot read the data" in done.stderr
    assert json.loads((newest_run(lab) / "meta.json").read_text())["state"] == "failed"


@pytest.mark.parametrize(
    ("ending", "status", "words"),
    [
        ("os.kill(os.getpid(), 9)", 137, "rank 2 on h2 was killed by signal 9"),
        ("os._exit(41)", 41, "rank 2 on h2 exited 41"),
        ("os.kill(os.getpid(), 19)", 137, "rank 2 on h2 was stopped for"),
        ("MPI.Finalize(); sys.exit(7)", 7, "rank 2 on h2 exited 7"),
    ],
    ids=["killed", "exits", "stopped", "finalised"],
)
def test_a_dead_rank_ends_the_job(lab: Lab, tmp_path: Path, ending: str, status: int, words: str) -> None:
    """CASES dead rank, as far as the launcher can see it; all ranks take part in MPI."""
    script = project(
        tmp_path,
        "import os, sys, time\nfrom mpi4py import MPI\nMPI.COMM_WORLD.Barrier()\n"
        f"if MPI.COMM_WORLD.rank == 2:\n    {ending}\n"
        "if 'Finalize' in sys.argv: MPI.Finalize()\ntime.sleep(90)\n",
    )
    more = ["--", "Finalize"] if "Finalize" in ending else []
    environ = dict(os.environ, RINGMASTER_STOPPED_LIMIT_S="3")
    started = time.monotonic()
    done = subprocess.run(
        [str(PROGRAM), "train", "--script", str(script), "--np", "6", *more],
        cwd=lab.cwd, env=environ, capture_output=True, text=True, timeout=80, check=False,
    )  # fmt: skip
    assert done.returncode == status, done.stderr
    assert words in done.stderr
    assert time.monotonic() - started < 45


@pytest.mark.parametrize("how", [signal.SIGINT, signal.SIGKILL], ids=["Ctrl-C", "kill -9"])
def test_a_job_ends_with_its_controller(lab: Lab, tmp_path: Path, how: signal.Signals) -> None:
    script = project(tmp_path, "import time\nprint('up')\ntime.sleep(300)\n")
    process = subprocess.Popen(
        [str(PROGRAM), "train", "--script", str(script), "--np", "9"],
        cwd=lab.cwd, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    assert process.stdout is not None
    up = [process.stdout.readline() for _ in range(9)]
    assert sorted(up) == [f"[{rank}] up\n" for rank in range(9)]
    process.send_signal(how)
    _, err = process.communicate(timeout=30)
    if how is signal.SIGINT:
        assert err.splitlines()[-1] == "interrupted: the job's ranks on h[1-3] were ended"
    assert process.returncode == (130 if how is signal.SIGINT else -signal.SIGKILL)
    # That nothing is left running is looked at after every test.


def test_two_jobs_at_once_keep_apart(lab: Lab, tmp_path: Path) -> None:
    scripts = []
    for name in ("one", "two"):
        (tmp_path / name).mkdir()
        scripts.append(project(tmp_path / name, f"import time\ntime.sleep(1)\nprint('{name}')\n"))
    jobs = [
        subprocess.Popen(
            [str(PROGRAM), "train", "--script", str(script), "--np", "4"],
            cwd=lab.cwd, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        )
        for script in scripts
    ]  # fmt: skip
    for name, job in zip(("one", "two"), jobs):
        out, err = job.communicate(timeout=60)
        assert job.returncode == 0, err
        assert sorted(out.splitlines()) == [f"[{rank}] {name}" for rank in range(4)]


def test_an_older_copy_on_a_host_is_replaced(lab: Lab, tmp_path: Path) -> None:
    """CASES script missing: the project is on the controller alone; then h2 holds another version of it."""
    script = project(tmp_path, "import helper\nprint('version', helper.VERSION)\n")
    (script.parent / "helper.py").write_text("VERSION = 1\n")
    assert lab.run("train", "--script", str(script), "--np", "9").stdout.count("version 1") == 9
    name = json.loads((newest_run(lab) / "meta.json").read_text())["project_id"]
    older = f"{PREFIX['h2']}/projects/{name}/helper.py"
    lab.bed.node("h2").write(older, "VERSION = 0\n", user="alice")
    lab.bed.node("h3").exec(["rm", "-r", f"{PREFIX['h3']}/projects/{name}"])
    (script.parent / "helper.py").write_text("VERSION = 2\n")
    assert lab.run("train", "--script", str(script), "--np", "9").stdout.count("version 2") == 9


def test_rank_sh_names_the_host_where_the_script_is_missing(lab: Lab, tmp_path: Path) -> None:
    argv = [f"{PREFIX['h2']}/libexec/rank.sh", "no-such-project", "job.py"]
    world = {"OMPI_COMM_WORLD_RANK": "1", "OMPI_COMM_WORLD_SIZE": "2", "RINGMASTER_NP": "2"}
    done = lab.bed.node("h2").exec(argv, user="alice", env=world, check=False)
    assert done.status == 69
    assert (
        "rank 1 on h2: the project directory /home/alice/local/projects/no-such-project is missing"
        in done.stderr
    )


def test_another_mpirun_first_in_path_does_no_harm(lab: Lab, tmp_path: Path) -> None:
    """CASES rank 0 of 1: a shim that starts N programs with nothing in common."""
    shim = '#!/bin/sh\nwhile [ "$1" != rank ]; do shift; done\nshift\nexec "$RANK_SH" "$@"\n'
    h1 = lab.bed.node("h1")
    h1.write("/usr/local/bin/mpirun", shim, mode=0o755)
    try:
        done = lab.run("train", "--script", str(project(tmp_path, PROBE)), "--np", "9")
        assert sorted(said(done.stdout)) == list(range(9))
        world = {"RANK_SH": f"{PREFIX['h1']}/libexec/rank.sh", "RINGMASTER_NP": "9"}
        alone = h1.exec(["/usr/local/bin/mpirun", "rank", "p", "job.py"], env=world, check=False)
        assert alone.status == 69
        assert "was started outside MPI, expected to be one of 9 ranks" in alone.stderr
        world.update(OMPI_COMM_WORLD_RANK="0", OMPI_COMM_WORLD_SIZE="1")
        alone = h1.exec(["/usr/local/bin/mpirun", "rank", "p", "job.py"], env=world, check=False)
        assert alone.status == 69
        assert "is rank 0 of 1, expected one of 9 ranks" in alone.stderr
    finally:
        h1.exec(["rm", "/usr/local/bin/mpirun"])


def test_more_ranks_than_slots_are_refused_with_a_table(lab: Lab, tmp_path: Path) -> None:
    """CASES slots: before anything is contacted."""
    started = time.monotonic()
    done = lab.run("train", "--script", str(project(tmp_path, PROBE)), "--np", "10", expect=5)
    assert time.monotonic() - started < 5
    assert "10 ranks wanted, 9 slots in the cluster" in done.stderr
    assert re.search(r"h2 +3 +\? +3", done.stderr)


def test_a_missing_orted_is_found_before_the_launch(lab: Lab, tmp_path: Path) -> None:
    """CASES orted: it is on no PATH anywhere; here it is gone from h2."""
    orted = f"{PREFIX['h2']}/openmpi/bin/orted"
    lab.bed.node("h2").exec(["mv", orted, f"{orted}.away"])
    try:
        done = lab.run("train", "--script", str(project(tmp_path, PROBE)), "--np", "9", expect=5)
    finally:
        lab.bed.node("h2").exec(["mv", f"{orted}.away", orted])
    assert f"h2: its Open MPI is broken: {orted} is missing; run `fab provision`" in done.stderr


def test_another_open_mpi_on_a_host_is_refused(lab: Lab, tmp_path: Path) -> None:
    """CASES mixed MPI: an orted that says 2.1.1."""
    orted = f"{PREFIX['h3']}/openmpi/bin/orted"
    h3 = lab.bed.node("h3")
    h3.exec(["mv", orted, f"{orted}.away"])
    h3.write(orted, "#!/bin/sh\necho 'orted (OpenRTE) 2.1.1'\n", mode=0o755, user="bob")
    try:
        done = lab.run("train", "--script", str(project(tmp_path, PROBE)), "--np", "9", expect=5)
        found = lab.run("healthcheck", timeout_s=240, expect=None)
    finally:
        h3.exec(["mv", f"{orted}.away", orted])
    assert "h3: Open MPI 2.1.1, expected 4.1.8" in done.stderr
    assert found.returncode != 0
    assert "orted says 2.1.1, expected Open MPI 4.1.8" in found.stdout


def test_a_worker_that_asks_for_a_password_is_refused_at_once(lab: Lab, tmp_path: Path) -> None:
    """CASES prompt: the cluster's key is gone from h2; nothing may wait for a terminal."""
    keys = "/home/alice/.ssh/authorized_keys"
    h2 = lab.bed.node("h2")
    before = h2.read(keys)
    key = (lab.cwd / ".ringmaster" / "id_ed25519.pub").read_text().split()[1]
    kept = [line for line in before.splitlines() if key not in line]
    assert len(kept) == len(before.splitlines()) - 1, before
    h2.write(keys, "\n".join(kept) + "\n", mode=0o600, user="alice")
    started = time.monotonic()
    try:
        done = lab.run("train", "--script", str(project(tmp_path, PROBE)), "--np", "9", expect=5)
    finally:
        h2.write(keys, before, mode=0o600, user="alice")
    assert time.monotonic() - started < 40
    assert "h2: cannot be reached from h1 over SSH" in done.stderr
    assert "Permission denied" in done.stderr


def test_a_worker_the_head_cannot_reach_is_refused_in_time(lab: Lab, tmp_path: Path) -> None:
    """CASES prompt: the network between head and h3 drops everything; plain ssh would wait 130 s."""
    h3 = lab.bed.node("h3")
    h3.cut(peers=["h1"])
    started = time.monotonic()
    try:
        done = lab.run("train", "--script", str(project(tmp_path, PROBE)), "--np", "9", expect=5)
        took = time.monotonic() - started
        found = lab.run("healthcheck", timeout_s=240, expect=None)
    finally:
        h3.restore()
    assert took < 45
    assert "1 of 3 nodes cannot take part" in done.stderr
    assert "h3: " in done.stderr
    assert found.returncode == 1
    assert re.search(r"ssh-mesh +h1 -> h3 +failed", found.stdout)
    assert "6 ranks" not in found.stdout
    assert "2 ranks over 2 hosts (without h3)" in found.stdout


def test_a_host_cut_off_while_the_job_runs_is_noticed_and_named(lab: Lab, tmp_path: Path) -> None:
    """Its connections stay open and say nothing; the ranks on both sides of the cut must end."""
    script = project(tmp_path, "import time\nprint('up', flush=True)\ntime.sleep(300)\n")
    h3 = lab.bed.node("h3")
    process = lab.start("train", "--script", str(script), "--np", "9")
    assert process.stdout is not None
    seen = []
    while sum(line.endswith("] up\n") for line in seen) < 9:
        seen.append(process.stdout.readline())
        assert seen[-1], "".join(seen)
    h3.cut()
    started = time.monotonic()
    try:
        text, _ = process.communicate(timeout=120)
        took = time.monotonic() - started
    finally:
        h3.restore()
    assert process.returncode == 3, text
    assert took < 90
    assert "error: h3 (ranks 6, 7, 8) was lost: it answers h1 no more" in text
    assert "warning: h3 could not be searched for what the job left running" in text
    # That h3's own ranks have ended as well is looked at after every test.


def test_two_trains_of_one_project_at_once(lab: Lab, tmp_path: Path) -> None:
    script = project(tmp_path, "print('twin')\n")
    jobs = [lab.start("train", "--script", str(script), "--np", "3") for _ in range(2)]
    for job in jobs:
        text, _ = job.communicate(timeout=90)
        assert job.returncode == 0, text
        assert text.count("] twin\n") == 3


def test_names_need_no_resolver_on_the_head(lab: Lab, tmp_path: Path) -> None:
    h1 = lab.bed.node("h1")
    before = h1.read("/etc/hosts")
    h1.write("/etc/hosts", "127.0.0.1 localhost\n")
    try:
        done = lab.run("train", "--script", str(project(tmp_path, PROBE)), "--np", "9")
    finally:
        h1.write("/etc/hosts", before)
    assert sorted(said(done.stdout)) == list(range(9))
