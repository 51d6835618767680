"""Starts hosts: one process per run, forks each host's init into its own namespaces, then exits.

Run by `launcher.py` as `python -I launch.py`: the standard library only. It reads one JSON plan line, writes
one JSON line of process ids once the namespaces exist, waits for the line `go` (the caller has by then put
the network cards in), and writes one JSON line of errors by host: an empty one means that all are running.
A host whose launcher or caller dies before `go` ends by itself.
"""

from __future__ import annotations

import contextlib
import ctypes
import glob
import json
import os
import shutil
import signal
import subprocess
import sys
import traceback
from collections.abc import Callable
from typing import Any

# <sched.h>, <sys/mount.h>
CLONE_NEWNS, CLONE_NEWUTS, CLONE_NEWIPC = 0x00020000, 0x04000000, 0x08000000
CLONE_NEWPID, CLONE_NEWNET = 0x20000000, 0x40000000
MS_RDONLY, MS_NOSUID, MS_NODEV, MS_NOEXEC, MS_REMOUNT = 1, 2, 4, 8, 32
MS_BIND, MS_REC, MS_PRIVATE = 0x1000, 0x4000, 0x40000
MNT_DETACH = 2

LIBC = ctypes.CDLL(None, use_errno=True)
NODE_PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
SHARED_DEVICES = ("null", "zero", "full", "random", "urandom", "tty")
FIRST_UID = 2001

# PID 1 of a host. bash reaps every child that ends, also adopted ones; the read never returns, so
# nothing but this process and sshd stands in an idle host's process table.
INIT_SCRIPT = """
trap '' HUP INT TERM
mkfifo -m 600 /run/init.fifo
exec 3<>/run/init.fifo
/usr/sbin/sshd -E /var/log/sshd.log
while :; do read -r _ <&3; done
"""


def call(what: str, returned: int) -> None:
    if returned != 0:
        number = ctypes.get_errno()
        raise OSError(number, f"{what}: {os.strerror(number)}")


def mount(source: str, target: str, kind: str, flags: int = 0, options: str = "") -> None:
    call(
        f"mount {kind or 'bind'} {source} on {target} ({options})",
        LIBC.mount(
            source.encode(), target.encode(), kind.encode(), ctypes.c_ulong(flags), options.encode() or None
        ),
    )


def bind(source: str, target: str, *, readonly: bool = False) -> None:
    if os.path.isdir(source):
        os.makedirs(target, exist_ok=True)
    elif not os.path.exists(target):
        os.makedirs(os.path.dirname(target), exist_ok=True)
        with open(target, "w"):
            pass
    mount(source, target, "", MS_BIND | MS_REC)
    if readonly:
        mount(source, target, "", MS_BIND | MS_REMOUNT | MS_RDONLY)


def overlay(lower: str, upper: str, work: str, target: str, *, readonly: bool = False) -> None:
    for directory in (upper, work, target):
        os.makedirs(directory, exist_ok=True)
    # redirect_dir: renaming a directory of the machine works as on a real host (else EXDEV).
    # index=off: one layer may be the base of many hosts at once.
    options = f"lowerdir={lower},upperdir={upper},workdir={work},index=off,redirect_dir=on"
    mount("overlay", target, "overlay", MS_RDONLY if readonly else 0, options)


def hide(lower: str, upper: str, path: str, mode: int) -> None:
    """Makes `path` an empty directory of the host: an opaque directory in its upper layer."""
    below = lower.rstrip("/")
    for parent in parents(path):
        made = upper + parent
        if not os.path.isdir(made):
            os.mkdir(made)
            if os.path.isdir(below + parent):
                shutil.copystat(below + parent, made)
                status = os.stat(below + parent)
                os.chown(made, status.st_uid, status.st_gid)
    made = upper + path
    os.makedirs(made, exist_ok=True)
    os.chmod(made, mode)
    os.setxattr(made, "trusted.overlay.opaque", b"y")


def parents(path: str) -> list[str]:
    parts = path.strip("/").split("/")[:-1]
    return ["/" + "/".join(parts[: n + 1]) for n in range(len(parts))]


def mount_root(node: dict[str, Any]) -> None:
    """Mounts the host's whole file system at `node["root"]`."""
    lower, root = node["lower"], node["root"]
    if node["base"]:
        # Overlayfs refuses a second lower layer that lies inside the first (ELOOP): stack two mounts.
        overlay(lower, node["base"], node["base_work"], node["base_root"], readonly=True)
        lower = node["base_root"]
    node["fresh"] = not os.path.isdir(node["upper"])
    if node["fresh"]:
        os.makedirs(node["upper"])
        os.chmod(node["upper"], 0o755)
        for path, mode in node["hidden"]:
            hide(lower, node["upper"], path, mode)
    overlay(lower, node["upper"], node["work"], root)
    mount("proc", root + "/proc", "proc", MS_NOSUID | MS_NODEV | MS_NOEXEC)
    mount("sysfs", root + "/sys", "sysfs", MS_NOSUID | MS_NODEV | MS_NOEXEC | MS_RDONLY)
    mount("tmpfs", root + "/run", "tmpfs", MS_NOSUID | MS_NODEV, "mode=755")
    mount("tmpfs", root + "/dev", "tmpfs", MS_NOSUID, "mode=755")
    devices = [f"/dev/{name}" for name in SHARED_DEVICES]
    devices += [path for path in glob.glob("/dev/nvidia*") if not os.path.isdir(path)]
    for device in devices:
        bind(device, root + device)
    for name in ("pts", "shm", "mqueue"):
        os.mkdir(f"{root}/dev/{name}")
    mount("devpts", root + "/dev/pts", "devpts", MS_NOSUID | MS_NOEXEC, "newinstance,ptmxmode=0666,mode=620")
    mount("tmpfs", root + "/dev/shm", "tmpfs", MS_NOSUID | MS_NODEV, "mode=1777")
    mount("mqueue", root + "/dev/mqueue", "mqueue", MS_NOSUID | MS_NODEV | MS_NOEXEC)
    os.symlink("pts/ptmx", root + "/dev/ptmx")
    for name, target in (("fd", "fd"), ("stdin", "fd/0"), ("stdout", "fd/1"), ("stderr", "fd/2")):
        os.symlink(f"/proc/self/{target}", f"{root}/dev/{name}")
    for source, target, readonly in node["binds"]:
        bind(source, root + target, readonly=readonly)


def enter_root(root: str) -> None:
    os.chdir(root)
    call("pivot_root", LIBC.pivot_root(b".", b"."))
    call("umount old root", LIBC.umount2(b".", MNT_DETACH))
    os.chdir("/")


def write(path: str, text: str, mode: int = 0o644, uid: int = 0, gid: int = 0) -> None:
    """Replaces `path` (a symbolic link itself, not its target)."""
    os.makedirs(os.path.dirname(path), exist_ok=True)
    temporary = f"{path}.{os.uname().nodename}.new"  # hosts may share a directory
    with open(temporary, "w") as file:
        os.fchmod(file.fileno(), mode)
        os.fchown(file.fileno(), uid, gid)
        file.write(text)
    os.replace(temporary, path)


def edit(path: str, change: Callable[[list[str]], list[str]]) -> None:
    status = os.stat(path)
    with open(path) as file:
        lines = file.read().splitlines()
    text = "".join(f"{line}\n" for line in change(lines))
    write(path, text, status.st_mode & 0o7777, status.st_uid, status.st_gid)


def unlock_root(lines: list[str]) -> list[str]:
    """sshd without PAM refuses keys for a password field that starts with "!" (locked); "*" only has none."""
    return ["root:*:" + line.split(":", 2)[2] if line.startswith("root:!") else line for line in lines]


def authorize(home: str, keys: str, uid: int, gid: int) -> None:
    os.makedirs(home, exist_ok=True)
    os.chmod(home, 0o700)
    os.makedirs(f"{home}/.ssh", mode=0o700, exist_ok=True)
    os.chown(home, uid, gid)
    os.chown(f"{home}/.ssh", uid, gid)
    write(f"{home}/.ssh/authorized_keys", keys, 0o600, uid, gid)


def add_user(name: str, uid: int, keys: str) -> None:
    home = f"/home/{name}"
    with open("/etc/passwd") as file:
        if any(line.startswith(f"{name}:") for line in file):
            return
    edit("/etc/group", lambda lines: [*lines, f"{name}:x:{uid}:"])
    edit("/etc/passwd", lambda lines: [*lines, f"{name}:x:{uid}:{uid}::{home}:/bin/bash"])
    edit("/etc/shadow", lambda lines: [*lines, f"{name}:*:19700:0:99999:7:::"])
    authorize(home, keys, uid, uid)


def personalise(node: dict[str, Any]) -> None:
    """Writes what makes this host itself; the first start of a host only, but for /etc/hosts and /run."""
    for directory, mode in (("/run/sshd", 0o755), ("/run/lock", 0o1777)):
        os.makedirs(directory, exist_ok=True)
        os.chmod(directory, mode)
    write("/etc/hosts", node["hosts"])
    if not node["fresh"]:
        return
    write("/etc/hostname", node["name"] + "\n")
    write("/etc/machine-id", node["machine_id"] + "\n")
    # No name server: a look-up fails at once (127.0.0.1 refuses) instead of waiting for an unreachable one.
    write("/etc/resolv.conf", "# this host has no name server\n")
    write("/etc/ssh/sshd_config", node["sshd_config"])
    write("/etc/ssh/ssh_host_ed25519_key", node["host_key"], 0o600)
    write("/etc/ssh/ssh_host_ed25519_key.pub", node["host_key_pub"])
    edit("/etc/shadow", unlock_root)
    authorize("/root", node["authorized_keys"], 0, 0)
    for number, user in enumerate(node["users"]):
        add_user(user, FIRST_UID + number, node["authorized_keys"])


def make_host_key(node: dict[str, Any]) -> None:
    path = node["host_key_path"]
    if not os.path.exists(path):
        subprocess.run(
            ["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-C", f"root@{node['name']}", "-f", path],
            check=True,
        )
    with open(path) as file:
        node["host_key"] = file.read()
    with open(f"{path}.pub") as file:
        node["host_key_pub"] = file.read()


def configure_network(node: dict[str, Any]) -> None:
    batch = f"link set lo up\naddr add {node['cidr']} brd + dev eth0\nlink set eth0 up\n"
    subprocess.run(["ip", "-batch", "-"], input=batch, text=True, check=True)


def become_init(node: dict[str, Any], go: int) -> None:
    """In the new namespaces, as PID 1: builds the host, waits for `go`, and becomes its init."""
    mount("none", "/", "", MS_REC | MS_PRIVATE)
    os.umask(0o022)
    make_host_key(node)
    mount_root(node)
    hostname = node["name"].encode()
    call("sethostname", LIBC.sethostname(hostname, len(hostname)))
    if os.read(go, 1) != b"g":
        os._exit(1)
    configure_network(node)
    enter_root(node["root"])
    personalise(node)
    # Python ignores these two, and an ignored signal stays ignored in every process of the host.
    for number in (signal.SIGPIPE, signal.SIGXFSZ):
        signal.signal(number, signal.SIG_DFL)
    null = os.open("/dev/null", os.O_RDWR)
    os.dup2(null, 0)
    environment = {"PATH": NODE_PATH, "HOME": "/root", **node["environment"]}
    os.execve("/bin/bash", ["init", "-c", INIT_SCRIPT], environment)


def fork_node(node: dict[str, Any], go: int, report_pid: int, report_error: int) -> None:
    """In a forked child: enters new namespaces and forks their PID 1; never returns."""
    try:
        os.setsid()
        log = os.open(node["log"], os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        os.dup2(log, 1)
        os.dup2(log, 2)
        flags = CLONE_NEWNS | CLONE_NEWUTS | CLONE_NEWIPC | CLONE_NEWPID | CLONE_NEWNET
        call("unshare", LIBC.unshare(flags))
        init = os.fork()
        if init:
            os.write(report_pid, str(init).encode())
            os._exit(0)
        os.close(report_pid)  # its reader waits for the last writer to close
        become_init(node, go)
    except BaseException as error:  # whatever it is, the parent must hear of it
        traceback.print_exc()
        sys.stderr.flush()
        os.write(report_error, f"{type(error).__name__}: {error}".encode())
        os.close(
            report_error
        )  # after `go` its reader waits for this end, and keeps the other pipe open meanwhile
        os.read(go, 1)  # the caller is putting cards into this namespace: it must last until then
    os._exit(1)


def fork_switch() -> int:
    """Starts the process that holds the switch's network namespace; its pid."""
    ready, report = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            os.setsid()
            call("unshare", LIBC.unshare(CLONE_NEWNET))
            null = os.open("/dev/null", os.O_RDWR)
            for stream in (0, 1, 2):
                os.dup2(null, stream)
            os.write(report, b"r")
            os.execvp("sleep", ["sleep", "infinity"])
        finally:
            os._exit(1)
    os.close(report)
    if os.read(ready, 1) != b"r":
        raise SystemExit("cannot make a network namespace for the switch")
    os.close(ready)
    return pid


def read_all(descriptor: int) -> str:
    with open(descriptor) as file:
        return file.read()


def main() -> int:
    plan = json.loads(sys.stdin.readline())
    switch = fork_switch() if plan["switch"] else None
    go_pipes: dict[str, int] = {}
    error_pipes: dict[str, int] = {}
    pid_pipes: dict[str, int] = {}
    for node in plan["nodes"]:
        name = node["name"]
        go, go_write = os.pipe()
        errors, errors_write = os.pipe()
        pid_read, pid_write = os.pipe()
        if os.fork() == 0:
            # An end held open by a sibling would hide the death of this process from the others.
            for descriptor in (*go_pipes.values(), go_write, errors, pid_read):
                os.close(descriptor)
            fork_node(node, go, pid_write, errors_write)
        for descriptor in (go, errors_write, pid_write):
            os.close(descriptor)
        go_pipes[name], error_pipes[name], pid_pipes[name] = go_write, errors, pid_read
    # A host that failed this early has no pid; its reason is in its error pipe.
    pids = {name: int(read_all(descriptor) or 0) for name, descriptor in pid_pipes.items()}
    print(json.dumps({"switch": switch, "nodes": pids}), flush=True)
    if sys.stdin.readline().strip() != "go":
        return 1
    for descriptor in go_pipes.values():
        with contextlib.suppress(BrokenPipeError):  # it failed; the error pipe says why
            os.write(descriptor, b"g")
    errors_by_name = {name: read_all(descriptor) for name, descriptor in error_pipes.items()}
    print(json.dumps({name: text for name, text in errors_by_name.items() if text}), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
