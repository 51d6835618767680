"""The main job on real hosts: provision, health check, train; and what happens when a host is bad."""

from __future__ import annotations

import json
import os
import re
import shutil
import socket
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.cluster.conftest import MakeTestbed
from tests.cluster.lab import ROOT, Lab
from tests.testbed import Testbed
from tests.testbed.node import TestbedNode

pytestmark = [pytest.mark.cluster, pytest.mark.slow]

STEPS = ("ssh_mesh", "python", "openmpi", "runtime")


@pytest.fixture(scope="module")
def lab(make_testbed: MakeTestbed, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Lab]:
    """Three hosts, provisioned; the tests of this module run in order and build on each other."""
    bed = make_testbed(3)
    yield Lab(bed, tmp_path_factory.mktemp("lab"))
    bed.down()


def words_of(output: str) -> dict[tuple[str, str], str]:
    """(host, step) -> changed or unchanged, from what provision printed."""
    return {
        (name, step): word
        for name, step, word in re.findall(r"^(\w+): (\w+) \([\d.]+ s\) (changed|unchanged)$", output, re.M)
    }


def test_provision_gives_every_host_every_step(lab: Lab) -> None:
    output = lab.provision("h1,h2,h3", "--mpi", "wheel")
    assert words_of(output) == {(h, s): "changed" for h in ("h1", "h2", "h3") for s in STEPS}
    hostfile = (lab.cwd / "hostfile").read_text()
    assert [line.split()[0] for line in hostfile.splitlines() if not line.startswith("#")] == [
        "h1",
        "h2",
        "h3",
    ]


def test_the_wheels_were_built_once(lab: Lab) -> None:
    logs = sorted((lab.cwd / ".ringmaster" / "logs").glob("provision-*/*.log"))
    builders = [log.stem for log in logs if re.search(r"(?i)building horovod.*: \d+ s", log.read_text())]
    assert len(builders) <= 1, "at most one host builds; none when the cache has the wheels already"


def test_a_second_provision_changes_nothing(lab: Lab) -> None:
    output = lab.provision("h1,h2,h3", "--mpi", "wheel", timeout_s=120)
    assert words_of(output) == {(h, s): "unchanged" for h in ("h1", "h2", "h3") for s in STEPS}


def test_provision_without_hosts_means_the_cluster_there_is(lab: Lab) -> None:
    output = lab.run("provision", timeout_s=120).stdout
    assert words_of(output) == {(h, s): "unchanged" for h in ("h1", "h2", "h3") for s in STEPS}


def test_no_key_of_the_user_and_no_readable_secret_on_the_hosts(lab: Lab) -> None:
    # The first lines of such a file are the same for every key; the secret part is at its end.
    users_key = lab.bed.private_key.read_text().splitlines()[-2]
    for node in lab.bed.nodes():
        found = node.exec(["grep", "-rlF", users_key, "/root"], check=False)
        assert found.stdout == ""
        modes = node.exec(["stat", "-c", "%a", "/root/local/ssh/id_ed25519"]).stdout.split()
        assert modes == ["600"]
    assert oct((lab.cwd / ".ringmaster" / "id_ed25519").stat().st_mode)[-3:] == "600"


def test_the_cluster_is_healthy(lab: Lab) -> None:
    done = lab.run("healthcheck", timeout_s=180)
    assert "h[1-3]" in done.stdout


def accuracy_of(output: str) -> float:
    found = re.search(r"test accuracy ([01]\.\d+) on (\d+) held-out images", output)
    assert found, output[-3000:]
    assert int(found[2]) == 10_000
    return float(found[1])


def ranks_on(lab: Lab, script: str) -> dict[str, int]:
    """How many Python processes run `script` on each host, as seen on the hosts themselves."""
    return {
        node.name: sum(
            Path(process.args[0]).name.startswith("python") and process.args[1].endswith(f"/{script}")
            for process in node.workload()
            if len(process.args) > 1
        )
        for node in lab.bed.nodes()
    }


def test_cifar10_trains_on_two_hosts_on_drawn_pictures(lab: Lab) -> None:
    script = str(ROOT / "examples" / "cifar10.py")
    words = ("--synthetic-images", "2000", "--epochs", "2")
    process = lab.start("train", "--script", script, "--np", "2", "--", *words)
    seen = []
    try:
        lines = []
        assert process.stdout is not None
        for line in process.stdout:
            lines.append(line)
            if "training on" in line:
                seen.append(ranks_on(lab, "cifar10.py"))
        status = process.wait(timeout=60)
    finally:
        process.kill()
        process.communicate()
    output = "".join(lines)
    assert status == 0, output
    assert seen == [{"h1": 1, "h2": 1, "h3": 0}], output
    assert "training on 2000 SYNTHETIC pictures, not CIFAR-10" in output
    found = re.findall(r"test accuracy ([01]\.\d+) on 500 held-out images, SYNTHETIC .*, 2 ranks,", output)
    assert len(found) == 1, output
    assert float(found[0]) >= 0.25, "chance is 0.1"


def test_full_mnist_on_three_hosts_reaches_97_percent_twice_alike(lab: Lab) -> None:
    data = os.environ.get("RINGMASTER_TEST_DATA")
    if not data:
        pytest.skip("RINGMASTER_TEST_DATA is not set: the full MNIST is not here")
    accuracies = []
    for _ in range(2):
        done = lab.run(
            *("train", "--script", str(ROOT / "examples" / "mnist.py"), "--np", "3"),
            *("--", "--data-dir", f"{data}/data/mnist", "--seed", "7"),
            timeout_s=600,
        )
        accuracies.append(accuracy_of(done.stdout))
    assert min(accuracies) >= 0.97
    assert abs(accuracies[0] - accuracies[1]) <= 0.003
    assert [node.workload() for node in lab.bed.nodes()] == [[], [], []], "nothing is left running"


def test_ranks_run_on_all_three_hosts(lab: Lab, tmp_path: Path) -> None:
    script = tmp_path / "where.py"
    script.write_text(
        "import socket\nimport horovod.tensorflow as hvd\nhvd.init()\nprint('on', socket.gethostname())\n"
    )
    done = lab.run("train", "--script", str(script), "--np", "3", timeout_s=120)
    assert sorted(re.findall(r"on (h\d)", done.stdout)) == ["h1", "h2", "h3"]
    # What a job brings along is what provision would have put there.
    words = words_of(lab.run("provision", timeout_s=120).stdout)
    assert words == {(h, s): "unchanged" for h in ("h1", "h2", "h3") for s in STEPS}


def kill_a_provision_at_its_work(lab: Lab, sign: str) -> None:
    """Start a provision, kill -9 it once it prints `sign`; nothing of it stays at work on any host."""
    process = lab.start("provision")
    try:
        assert process.stdout is not None
        for line in process.stdout:
            if sign in line:
                break
        else:
            pytest.fail(f"provision ended before it printed {sign!r}")
    finally:
        process.kill()
        process.communicate()
    deadline = time.monotonic() + 30
    while any(node.workload() for node in lab.bed.nodes()):
        assert time.monotonic() < deadline, [node.workload() for node in lab.bed.nodes()]
        time.sleep(0.5)


def test_drift_is_found_and_repaired(lab: Lab) -> None:
    """CASES drift: a protobuf that TensorFlow 1.15 cannot use; a kill -9 in the middle of the repair loses nothing."""
    stack = "/root/local/stacks/tf1/lib/python3.7/site-packages"
    lab.bed.node("h2").exec(
        ["sh", "-c", f"mv {stack}/protobuf-3.20.3.dist-info {stack}/protobuf-4.24.4.dist-info"]
    )
    found = lab.run("healthcheck", timeout_s=180, expect=None)
    assert found.returncode != 0
    assert "h2" in found.stdout
    assert "protobuf" in found.stdout
    kill_a_provision_at_its_work(lab, "h2: runtime:")
    words = words_of(lab.run("provision", timeout_s=300).stdout)
    assert words[("h2", "runtime")] == "changed"
    assert words[("h1", "runtime")] == words[("h3", "runtime")] == "unchanged"
    lab.run("healthcheck", timeout_s=180)


def test_one_bad_host_hides_no_other(make_testbed: MakeTestbed, lab: Lab, tmp_path: Path) -> None:
    """CASES one bad host: a silent listener on port 22, and a name that does not resolve."""
    listener = socket.create_server(("127.0.0.1", 0))
    held: list[socket.socket] = []
    threading.Thread(target=lambda: held.append(listener.accept()[0]), daemon=True).start()
    port = listener.getsockname()[1]
    other = Lab(lab.bed, tmp_path)
    hosts = f"h1,h2,127.0.0.1:{port},no-such-host.invalid"
    done = other.run(
        *("provision", "--hosts", hosts, "--ssh-config", str(lab.bed.ssh_config), "--mpi", "wheel"),
        timeout_s=200,
        expect=3,
    )
    listener.close()
    assert "127-0-0-1" in done.stderr or "127.0.0.1" in done.stderr
    assert "no-such-host" in done.stderr
    assert "2 not ready" in done.stderr
    words = words_of(done.stdout)
    assert {host for host, _ in words} == {"h1", "h2"}
    lines = (tmp_path / "hostfile").read_text().splitlines()
    assert [line.split()[0] for line in lines if not line.startswith("#")] == ["h1", "h2"]
    # They stay part of what was asked for: the health check names them and the next provision tries them again.
    saved = json.loads((tmp_path / ".ringmaster" / "cluster.json").read_text())
    assert [node["host"] for node in saved["left_out"]] == ["127.0.0.1", "no-such-host.invalid"]
    found = json.loads(other.run("healthcheck", "--json", timeout_s=180, expect=None).stdout)
    assert "no-such-host" in json.dumps(found)


@pytest.fixture
def one_bare(make_testbed: MakeTestbed) -> Iterator[Testbed]:
    bed = make_testbed(["b1"], kind="bare")
    yield bed
    bed.down()


def test_a_bare_host_gets_everything_and_trains(one_bare: Testbed, tmp_path: Path) -> None:
    """CASES no 3.7: a minimal Debian without a compiler and without Python 3.7."""
    bare = one_bare.node("b1")
    for tool in ("gcc", "c++", "python3.7"):
        assert bare.exec(["which", tool], check=False).status != 0
    lab = Lab(one_bare, tmp_path)
    words = words_of(lab.provision("b1", "--mpi", "wheel"))
    assert words == {("b1", step): "changed" for step in STEPS}
    assert bare.exec(["/root/local/python/bin/python3.7", "--version"]).stdout.startswith("Python 3.7")
    done = lab.run(
        *("train", "--script", str(ROOT / "examples" / "mnist.py"), "--np", "2"), "--", "--max-steps", "20",
        timeout_s=300,
    )  # fmt: skip
    assert "test accuracy" in done.stdout


def test_open_mpi_is_built_from_source_once_for_two_hosts(make_testbed: MakeTestbed, tmp_path: Path) -> None:
    source = os.environ.get("RINGMASTER_OPENMPI_SOURCE")
    if not source:
        assert not os.environ.get("CI"), "RINGMASTER_OPENMPI_SOURCE is not set; scripts/test sets it"
        pytest.skip("RINGMASTER_OPENMPI_SOURCE names no source archive")
    version = re.search(r"openmpi_(\d+\.\d+\.\d+)", source)
    assert version
    bed = make_testbed(2)
    lab = Lab(bed, tmp_path)
    cache = tmp_path / "cache"
    # A cache of its own, so that the build is not answered from an earlier run; the wheels may be.
    shared = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "ringmaster" / "wheelhouse"
    (cache / "ringmaster").mkdir(parents=True)
    if shared.is_dir():
        shutil.copytree(shared, cache / "ringmaster" / "wheelhouse", copy_function=os.link)
    before = os.environ.get("XDG_CACHE_HOME")
    os.environ["XDG_CACHE_HOME"] = str(cache)
    try:
        words = words_of(
            lab.provision(
                "h1,h2", "--openmpi-version", version[1], "--openmpi-source", source, timeout_s=1500
            )
        )
    finally:
        if before is None:
            del os.environ["XDG_CACHE_HOME"]
        else:
            os.environ["XDG_CACHE_HOME"] = before
    assert words[("h1", "openmpi")] == words[("h2", "openmpi")] == "changed"
    for node in bed.nodes():
        said = node.exec(
            ["sh", "-c", ". /root/local/env.sh && ompi_info --version"],
            env={"RINGMASTER_PREFIX": "/root/local"},
        ).stdout
        assert f"v{version[1]}" in said
    logs = {log.stem: log.read_text() for log in (lab.cwd / ".ringmaster" / "logs").glob("provision-*/*.log")}
    assert sorted(name for name, text in logs.items() if "compiling Open MPI" in text) == ["h1"]
    done = lab.run("healthcheck", timeout_s=180)
    assert version[1] in done.stdout
    assert_works_when_moved(bed.node("h2"))
    bed.down()


def assert_works_when_moved(node: TestbedNode) -> None:
    """CASES moved prefix: what was built on another host, in another place, compiles and runs a program."""
    node.exec(["mv", "/root/local", "/root/moved"])
    node.write(
        "/root/hello.c",
        "#include <mpi.h>\n#include <stdio.h>\nint main(int c, char **v) { int r, n, s; MPI_Init(&c, &v);\n"
        "MPI_Comm_rank(MPI_COMM_WORLD, &r); MPI_Comm_size(MPI_COMM_WORLD, &n);\n"
        "MPI_Allreduce(&r, &s, 1, MPI_INT, MPI_SUM, MPI_COMM_WORLD);\n"
        'printf("rank %d of %d sum %d\\n", r, n, s); MPI_Finalize(); return 0; }\n',
    )
    script = ". /root/moved/env.sh && mpicc hello.c -o hello && "
    script += "mpirun --allow-run-as-root --oversubscribe -np 3 ./hello"
    done = node.exec(["bash", "-c", script], timeout_s=120)
    assert sorted(done.stdout.splitlines()) == [f"rank {rank} of 3 sum 3" for rank in range(3)]
    assert done.stderr == ""
