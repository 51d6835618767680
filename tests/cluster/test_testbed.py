"""The testbed itself: its hosts are real hosts, its faults are real faults, and it leaves nothing behind."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from provision.errors import CommandFailed, DeadlineExceeded, UsageError
from tests.cluster.conftest import MakeTestbed
from tests.testbed import Bind, NodeSpec, Testbed, TestbedError, net, processes, state

pytestmark = pytest.mark.cluster

CHECKOUT = Path(__file__).resolve().parents[2]
GREET = 'exec 3<>"/dev/tcp/$1/$2" && head -c 4 <&3'


def ssh(bed: Testbed, host: str, *command: str, timeout_s: float = 30) -> subprocess.CompletedProcess[str]:
    argv = ["ssh", "-F", str(bed.ssh_config), "-o", "BatchMode=yes", "-o", "ConnectTimeout=2", host, *command]
    return subprocess.run(argv, capture_output=True, text=True, timeout=timeout_s)


def reaches(bed: Testbed, source: str, target: str, port: int = 22) -> bool:
    """Whether sshd of `target` (a name or an address) greets a client on host `source`."""
    argv = ["timeout", "1.5", "bash", "-c", GREET, "greet", target, str(port)]
    return bed.node(source).exec(argv, check=False).stdout == "SSH-"


def wait_for(holds: Callable[[], bool], *, timeout_s: float = 10) -> None:
    deadline = time.monotonic() + timeout_s
    while not holds():
        assert time.monotonic() < deadline, f"it did not come to hold within {timeout_s} s"
        time.sleep(0.02)


# -- hosts -----------------------------------------------------------------------------------------------------


def test_every_host_is_itself(three_clones: Testbed) -> None:
    names = ["h1", "h2", "h3"]
    assert [ssh(three_clones, name, "hostname").stdout.strip() for name in names] == names
    assert [three_clones.node(name).exec(["cat", "/etc/hostname"]).stdout.strip() for name in names] == names
    for path in ("/etc/machine-id", "/etc/ssh/ssh_host_ed25519_key.pub"):
        assert len({three_clones.node(name).read(path) for name in names}) == 3
    addresses = {three_clones.node(name).address for name in names}
    assert len(addresses) == 3
    for name in names:
        cards = json.loads(three_clones.node(name).exec(["ip", "-4", "-j", "addr"]).stdout)
        seen = {address["local"] for card in cards for address in card["addr_info"]}
        assert seen == {"127.0.0.1", three_clones.node(name).address}


def test_hosts_reach_each_other_by_name_and_nothing_else(three_clones: Testbed) -> None:
    for source in ("h1", "h2", "h3"):
        for target in ("h1", "h2", "h3"):
            assert reaches(three_clones, source, target)
    assert not reaches(three_clones, "h1", "198.51.100.1")
    route = three_clones.node("h1").exec(["ip", "route", "get", "198.51.100.1"], check=False)
    assert "unreachable" in route.stderr


def test_homes_and_temporary_directories_are_empty(three_clones: Testbed) -> None:
    node = three_clones.node("h1")
    assert node.exec(["ls", "-A", "/root"]).stdout.split() == [".ssh"]
    for path in ("/tmp", "/var/tmp", "/home", "/dev/shm"):
        assert node.exec(["ls", "-A", path]).stdout == ""


def test_writes_stay_on_their_host(three_clones: Testbed) -> None:
    mark = f"mark-{os.getpid()}"
    for folder in ("/root", "/tmp", "/dev/shm", "/etc", "/usr/local", "/run"):
        path = f"{folder}/{mark}"
        three_clones.node("h1").write(path, "x")
        assert three_clones.node("h1").read(path) == "x"
        assert three_clones.node("h2").exec(["test", "-e", path], check=False).status == 1
        assert not Path(path).exists()
    three_clones.node("h1").exec(["rm", "/etc/debian_version"])
    assert three_clones.node("h2").exec(["test", "-e", "/etc/debian_version"], check=False).status == 0
    assert Path("/etc/debian_version").exists()


def test_process_tables_are_apart_and_orphans_are_reaped(three_clones: Testbed) -> None:
    h1, h2 = three_clones.node("h1"), three_clones.node("h2")
    assert h1.workload() == []
    h1.exec(["sh", "-c", "setsid sleep 1000 </dev/null >/dev/null 2>&1 &"])
    wait_for(lambda: [process.args for process in h1.workload()] == [("sleep", "1000")])
    assert h2.workload() == []
    assert h1.processes()[0].pid == 1
    os.kill(h1.workload()[0].outer_pid, signal.SIGKILL)
    wait_for(lambda: h1.workload() == [])  # no zombie either: init waits for its adopted child


def test_users_and_another_port(make_testbed: MakeTestbed) -> None:
    spec = NodeSpec("h1", users=("alice", "bob"), port=2222)
    bed = make_testbed([spec, NodeSpec("h2", users=("alice",), login="alice")])
    try:
        assert ssh(bed, "bob@h1", "id -un; pwd; ls -A").stdout.split() == ["bob", "/home/bob", ".ssh"]
        assert ssh(bed, "h2", "whoami").stdout == "alice\n"
        assert bed.node("h1").exec(["id", "-un"], user="alice").stdout == "alice\n"
        assert ssh(bed, "alice@h1", "cat /home/bob/.ssh/authorized_keys").returncode != 0
        assert reaches(bed, "h2", "h1", 2222)
        assert not reaches(bed, "h2", "h1", 22)
    finally:
        bed.down()


def test_interfaces(three_clones: Testbed) -> None:
    for number in (1, 2):
        node = three_clones.node(f"h{number}")
        node.add_interface("docker0", "172.17.0.1/16")
        node.add_interface("data0", f"192.168.77.{number}/24", kind="veth", network="data")
    three_clones.node("h3").add_interface("data0", "192.168.77.3/24", kind="veth", network="other")
    assert reaches(three_clones, "h1", "192.168.77.2")
    assert not reaches(three_clones, "h1", "192.168.77.3")
    three_clones.node("h2").restart()
    assert reaches(three_clones, "h1", "192.168.77.2")
    cards = {card["ifname"] for card in json.loads(three_clones.node("h2").exec(["ip", "-j", "link"]).stdout)}
    assert cards == {"lo", "eth0", "docker0", "data0"}


def test_no_host_paces_what_it_sends(three_clones: Testbed) -> None:
    for name in ("h1", "h2", "h3"):
        setting = three_clones.node(name).exec(["cat", "/proc/sys/net/ipv4/tcp_congestion_control"]).stdout
        assert setting.strip() in ("cubic", "reno")


def test_a_host_that_fails_late_is_told_of(make_testbed: MakeTestbed, tmp_path: Path) -> None:
    (tmp_path / "name").write_text("mine\n")
    # What is mounted cannot be replaced, and the host writes its name once its network is there.
    with pytest.raises(TestbedError, match=r"1 of 2 hosts did not start\n  h2: .*busy"):
        make_testbed([NodeSpec("h1"), NodeSpec("h2", binds=(Bind(str(tmp_path / "name"), "/etc/hostname"),))])


def test_binds(make_testbed: MakeTestbed, tmp_path: Path) -> None:
    (tmp_path / "home").mkdir()
    (tmp_path / "data").write_text("data")
    binds = (Bind(str(tmp_path / "home"), "/root", readonly=False), Bind(str(tmp_path / "data"), "/srv/data"))
    bed = make_testbed(2, binds=binds)
    try:
        bed.node("h1").write("/root/shared", "one home")
        assert bed.node("h2").read("/root/shared") == "one home"
        assert (tmp_path / "home" / "shared").read_text() == "one home"
        assert bed.node("h2").read("/srv/data") == "data"
        assert bed.node("h2").exec(["sh", "-c", "echo x >/srv/data"], check=False).status != 0
        assert ssh(bed, "h1", "hostname").stdout == "h1\n"
    finally:
        bed.down()
    assert (tmp_path / "home" / "shared").exists()  # `down` removes layers, never what was bound


def test_hosts_start_from_a_frozen_one(three_clones: Testbed) -> None:
    h1 = three_clones.node("h1")
    h1.write("/root/provisioned", "yes")
    h1.exec(["mv", "/usr/share/doc", "/usr/share/doc.moved"])
    base = three_clones.freeze("h1")
    three_clones.add(["h4", "h5"], base=base)
    three_clones.node("h4").write("/root/provisioned", "changed")
    read = {name: three_clones.node(name).read("/root/provisioned") for name in ("h1", "h4", "h5")}
    assert read == {"h1": "yes", "h4": "changed", "h5": "yes"}
    for path in ("/root/provisioned", "/usr/share/doc.moved"):
        assert three_clones.node("h2").exec(["test", "-e", path], check=False).status == 1
    assert three_clones.node("h5").exec(["test", "-d", "/usr/share/doc.moved"], check=False).status == 0
    assert ssh(three_clones, "h5", "hostname").stdout == "h5\n"
    assert reaches(three_clones, "h2", "h5")
    assert three_clones.node("h1").read("/etc/machine-id") != three_clones.node("h5").read("/etc/machine-id")


# -- commands --------------------------------------------------------------------------------------------------


def test_exec_has_status_input_and_deadline(three_clones: Testbed) -> None:
    node = three_clones.node("h1")
    assert node.exec(["cat"], stdin=b"a\xff").stdout == "a�"
    assert node.exec(["pwd"], cwd="/usr").stdout == "/usr\n"
    assert node.exec(["sh", "-c", "exit 7"], check=False).status == 7
    with pytest.raises(CommandFailed, match=r"h1: .* exited 7"):
        node.exec(["sh", "-c", "exit 7"])
    began = time.monotonic()
    with pytest.raises(DeadlineExceeded, match=r"h1: .* did not end within 0\.3 s"):
        node.exec(["sh", "-c", "setsid sleep 1000 & sleep 1000"], timeout_s=0.3)
    assert time.monotonic() - began < 5
    assert node.workload() == []  # also the one in a session of its own


def test_command_line(make_testbed: MakeTestbed, tmp_path: Path) -> None:
    make_testbed(1).down()  # skips where no hosts can be made
    # The path goes into overlayfs options; pytest's own temporary directories may hold brackets, not commas.
    root = ["--state-dir", str(tmp_path / "beds")]

    def cli(*argv: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-m", "tests.testbed", *argv]
        return subprocess.run(command, capture_output=True, text=True, cwd=CHECKOUT, timeout=60)

    made = cli("up", *root, "--nodes", "n1,n2", "--users", "alice")
    assert made.returncode == 0, made.stderr
    assert [line.split("\t")[0] for line in made.stdout.splitlines()] == ["n1", "n2"]
    assert cli("status", *root).stdout.count("running") == 2
    assert cli("exec", *root, "--user", "alice", "n2", "--", "sh", "-c", "id -un; exit 3").stdout == "alice\n"
    assert cli("exec", *root, "n2", "--", "sh", "-c", "exit 3").returncode == 3
    again = cli("up", *root)
    assert again.returncode == 1
    assert "already up" in again.stderr
    assert cli("exec", *root, "n9", "--", "true").returncode == 2
    cli("kill", *root, "n1")
    assert cli("status", *root).returncode == 1
    assert cli("down", *root).stderr.strip() == "removed"
    assert cli("down", *root).stderr.strip() == "nothing to remove"
    assert not (tmp_path / "beds").exists()


# -- faults ----------------------------------------------------------------------------------------------------


def test_cut_everything(three_clones: Testbed) -> None:
    node = three_clones.node("h3")
    node.cut()
    assert not reaches(three_clones, "h1", "h3")
    assert not reaches(three_clones, "h3", "h1")
    assert reaches(three_clones, "h3", "127.0.0.1")
    assert "timed out" in ssh(three_clones, "h3", "true").stderr
    assert node.exec(["hostname"]).stdout == "h3\n"
    node.restore()
    assert reaches(three_clones, "h1", "h3")
    assert ssh(three_clones, "h3", "hostname").stdout == "h3\n"


def test_cut_one_port(three_clones: Testbed) -> None:
    three_clones.node("h3").cut(port=22)
    assert not reaches(three_clones, "h1", "h3")
    assert reaches(three_clones, "h3", "h1")
    three_clones.node("h3").restore()
    assert reaches(three_clones, "h1", "h3")


def test_cut_one_pair(three_clones: Testbed) -> None:
    three_clones.node("h3").cut(peers=["h1"])
    assert not reaches(three_clones, "h1", "h3")
    assert not reaches(three_clones, "h3", "h1")
    assert reaches(three_clones, "h2", "h3")
    assert ssh(three_clones, "h3", "hostname").stdout == "h3\n"


def connect_s(bed: Testbed, name: str) -> float:
    began = time.monotonic()
    with socket.create_connection((bed.node(name).address, 22), timeout=10):
        return time.monotonic() - began


def copy_s(bed: Testbed, name: str, size_bytes: int) -> float:
    began = time.monotonic()
    argv = ["ssh", "-F", str(bed.ssh_config), name, f"head -c {size_bytes} /dev/urandom"]
    done = subprocess.run(argv, stdout=subprocess.PIPE, timeout=60)
    assert len(done.stdout) == size_bytes
    return time.monotonic() - began


def test_slow(three_clones: Testbed) -> None:
    node = three_clones.node("h3")
    node.slow(delay_ms=150)
    assert 0.3 <= connect_s(three_clones, "h3") < 3  # one round trip, 150 ms each way
    assert connect_s(three_clones, "h2") < 0.3
    node.slow(rate_mbit=8)  # replaces the delay
    assert copy_s(three_clones, "h3", 2_000_000) >= 2.0
    node.restore()
    assert connect_s(three_clones, "h3") < 0.3
    assert copy_s(three_clones, "h3", 2_000_000) < 2.0
    assert reaches(three_clones, "h1", "h3")


def test_pause(three_clones: Testbed) -> None:
    node = three_clones.node("h3")
    node.exec(["sh", "-c", "while :; do sleep 0.01; done >/dev/null 2>&1 &"])
    node.pause()
    still = node.processes()
    assert {process.state for process in still} - {"Z"} == {"T"}
    time.sleep(0.2)
    assert node.processes() == still
    assert ssh(three_clones, "h3", "true").returncode == 255
    node.resume()
    assert ssh(three_clones, "h3", "hostname").stdout == "h3\n"
    assert node.workload() != []
    for _ in range(30):  # now and then one meets the shell between vfork and exec
        node.pause()
        node.resume()


def test_kill_and_restart(three_clones: Testbed) -> None:
    node = three_clones.node("h3")
    node.write("/root/kept", "on disk")
    node.write("/dev/shm/lost", "in memory")
    session = subprocess.Popen(
        ["ssh", "-F", str(three_clones.ssh_config), "-o", "ServerAliveInterval=1", "h3", "sleep 1000"],
        stderr=subprocess.PIPE,
    )
    wait_for(lambda: any(process.name == "sleep" for process in node.processes()))
    victims = [process.outer_pid for process in node.processes()]
    node.slow(delay_ms=5)
    node.kill()
    assert [pid for pid in victims if processes.is_alive(pid)] == []
    assert not node.is_running()
    with pytest.raises(TestbedError, match="h3 is not running"):
        node.exec(["true"])
    assert not reaches(three_clones, "h1", "h3")
    assert session.wait(timeout=20) != 0  # the client noticed that its peer is silent
    assert session.stderr is not None
    session.stderr.close()
    address = node.address
    node.restart()
    assert node.address == address
    assert ssh(three_clones, "h3", "cat kept; ls /dev/shm").stdout == "on disk"  # its pinned host key holds
    assert reaches(three_clones, "h1", "h3")


def test_sshd_stops_and_starts(three_clones: Testbed) -> None:
    three_clones.node("h2").stop_sshd()
    assert "refused" in ssh(three_clones, "h2", "true").stderr
    three_clones.node("h2").start_sshd()
    assert ssh(three_clones, "h2", "hostname").stdout == "h2\n"


# -- nothing is left -------------------------------------------------------------------------------------------


def links() -> set[str]:
    return {link["ifname"] for link in json.loads(net.run(["ip", "-j", "link"]))}


def network_namespaces() -> set[str]:
    return set(net.run(["lsns", "-t", "net", "-n", "-o", "NS"]).split())


def namespaces_of(bed: Testbed) -> set[str]:
    pids = [bed.switch, *(node.pid for node in bed.nodes())]
    return {str(os.stat(f"/proc/{pid}/ns/net").st_ino) for pid in pids}


def assert_gone(place: state.Place, *, links_before: set[str]) -> None:
    """No process, interface, mount, directory of this testbed; and no new interface of nobody."""
    assert processes.pids_with(processes.TAG, place.tag) == []
    root = state.DEFAULT_ROOT
    others = {state.Place(root, entry.name).link for entry in root.iterdir()} if root.is_dir() else set()
    assert place.link not in links()
    assert links() - links_before - others - {f"{other}p" for other in others} == set()
    assert str(place.directory) not in Path("/proc/self/mountinfo").read_text()
    assert not place.directory.exists()


def test_down_leaves_nothing(make_testbed: MakeTestbed) -> None:
    before = links()
    bed = make_testbed(2)
    bed.node("h1").add_interface("data0", "192.168.77.1/24", kind="veth", network="data")
    bed.node("h1").slow(delay_ms=1)
    bed.node("h2").cut()
    bed.node("h2").pause()
    popen = bed.node("h1").popen(["sleep", "1000"])
    place, namespaces = bed.place, namespaces_of(bed)
    assert len(namespaces) == 3
    assert bed.down() is True
    assert popen.wait(timeout=5) != 0
    assert_gone(place, links_before=before)
    assert network_namespaces() & namespaces == set()
    assert bed.down() is False


HOLDER = """
import sys, time
from tests.testbed import Testbed
bed = Testbed(3, name=sys.argv[1]).up()
bed.node("h1").exec(["sh", "-c", "setsid sleep 1000 >/dev/null 2>&1 &"])
print("up", flush=True)
time.sleep(1000)
"""


@pytest.fixture
def holder_name(make_testbed: MakeTestbed) -> Iterator[str]:
    make_testbed(1).down()  # skips where no hosts can be made
    name = f"held-{os.getpid()}"
    yield name
    Testbed(1, name=name).down()


def start_holder(name: str) -> subprocess.Popen[str]:
    argv = [sys.executable, "-c", HOLDER, name]
    return subprocess.Popen(argv, stdout=subprocess.PIPE, text=True, cwd=CHECKOUT)


def kill_holder(holder: subprocess.Popen[str]) -> None:
    holder.kill()
    holder.wait()
    assert holder.stdout is not None
    holder.stdout.close()


def test_down_after_kill_9(holder_name: str) -> None:
    before = links()
    holder = start_holder(holder_name)
    assert holder.stdout is not None
    assert holder.stdout.readline() == "up\n"
    with pytest.raises(TestbedError, match=f"belongs to process {holder.pid}"):
        Testbed(1, name=holder_name).up()
    kill_holder(holder)
    bed = Testbed.attach(holder_name)
    assert [node.is_running() for node in bed.nodes()] == [True, True, True]
    place, namespaces = bed.place, namespaces_of(bed)
    assert Testbed(1, name=holder_name).down() is True
    assert_gone(place, links_before=before)
    assert network_namespaces() & namespaces == set()


def test_up_clears_a_dead_one_of_the_same_name(holder_name: str) -> None:
    holder = start_holder(holder_name)
    assert holder.stdout is not None
    assert holder.stdout.readline() == "up\n"
    kill_holder(holder)
    old = {node.pid for node in Testbed.attach(holder_name).nodes()}
    with Testbed(["a1"], name=holder_name) as bed:
        assert [pid for pid in old if processes.is_alive(pid)] == []
        assert bed.names == ["a1"]
        assert ssh(bed, "a1", "hostname").stdout == "a1\n"


@pytest.mark.parametrize("after_s", [0.08, 0.11, 0.14, 0.17, 0.20, 0.23, 0.26, 0.30])
def test_down_after_kill_9_in_the_middle_of_up(holder_name: str, after_s: float) -> None:
    before = links()
    holder = start_holder(holder_name)
    time.sleep(after_s)
    kill_holder(holder)
    bed = Testbed(1, name=holder_name)
    bed.down()
    assert_gone(bed.place, links_before=before)


def test_failed_up_names_the_host_and_leaves_nothing(make_testbed: MakeTestbed) -> None:
    make_testbed(1).down()  # skips where no hosts can be made
    before = links()
    good, bad = NodeSpec("good"), NodeSpec("bad", binds=(Bind("/nonexistent/source", "/mnt/x"),))
    bed = Testbed([good, bad], name=f"fails-{os.getpid()}")
    with pytest.raises(TestbedError, match=r"1 of 2 hosts did not start\n  bad: .*/nonexistent/source"):
        bed.up()
    assert_gone(bed.place, links_before=before)


def test_two_at_once_do_not_meet(make_testbed: MakeTestbed) -> None:
    first, second = make_testbed(1), make_testbed(1)
    try:
        assert not first.subnet.overlaps(second.subnet)
        assert ssh(first, "h1", "hostname").stdout == ssh(second, "h1", "hostname").stdout == "h1\n"
        first.node("h1").write("/root/mark", "first")
        assert second.node("h1").exec(["ls", "/root"]).stdout == ""
        assert not reaches(first, "h1", second.node("h1").address)
        first.down()
        assert ssh(second, "h1", "hostname").stdout == "h1\n"
    finally:
        first.down()
        second.down()


def test_bad_requests_are_refused_before_anything_is_made() -> None:
    before = links()
    for wrong in (0, 201, ["h1", "h1"], ["H 1"], ["a/b"], ["localhost"]):
        with pytest.raises(UsageError):
            Testbed(wrong)
    for options in ({"kind": "x"}, {"users": ("a b",)}, {"login": "bob"}, {"port": 0}, {"name": "../x"}):
        with pytest.raises(UsageError):
            Testbed(1, **options)
    with pytest.raises(UsageError, match="overlayfs options"):
        Testbed(1, state_root=Path("/var/tmp/a,b"))
    assert links() - before == set()


# -- bare hosts ------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_bare_hosts_are_bare(make_testbed: MakeTestbed) -> None:
    bed = make_testbed(2, kind="bare")
    try:
        assert ssh(bed, "h1", "hostname").stdout == "h1\n"
        for absent in ("gcc", "cc", "g++", "make", "cmake", "python3.7", "mpirun", "curl"):
            assert bed.node("h1").exec(["sh", "-c", f"command -v {absent}"], check=False).stdout == ""
        for present in ("python3", "sshd", "ip", "rsync"):
            assert bed.node("h1").exec(["sh", "-c", f"command -v {present}"]).stdout != ""
        assert bed.node("h1").exec(["ls", "-A", "/root"]).stdout.split() == [".ssh"]
        assert reaches(bed, "h1", "h2")
        bed.node("h1").write("/etc/mark", "x")
        assert bed.node("h2").exec(["test", "-e", "/etc/mark"], check=False).status == 1
        base = bed.freeze("h1")
        bed.add(["h3"], kind="bare", base=base)
        assert bed.node("h3").read("/etc/mark") == "x"
    finally:
        bed.down()
