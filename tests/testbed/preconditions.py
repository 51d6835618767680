"""Whether this machine can hold a testbed; what is missing is named before anything is made."""

from __future__ import annotations

import os
import shutil
from collections.abc import Mapping
from pathlib import Path

from provision.errors import PreconditionError

SBIN = ("/usr/local/sbin", "/usr/sbin", "/sbin")
TOOLS = {  # program -> Debian package
    "sshd": "openssh-server",
    "ssh-keygen": "openssh-client",
    "ip": "iproute2",
    "nsenter": "util-linux",
    "setpriv": "util-linux",
    "nft": "nftables",
    "bash": "bash",
}
BARE_TOOLS = {"debootstrap": "debootstrap", "unshare": "util-linux"}


def problems(kinds: frozenset[str], *, uid: int, path: str, filesystems: str) -> list[str]:
    """What is missing, as sentences; empty where a testbed of these kinds can be made."""
    found = []
    if uid != 0:
        found.append(f"it is run by uid {uid}, and mounting and namespaces need root")
    wanted: Mapping[str, str] = {**TOOLS, **(BARE_TOOLS if "bare" in kinds else {})}
    missing = {tool: package for tool, package in wanted.items() if shutil.which(tool, path=path) is None}
    if missing:
        packages = " ".join(sorted(set(missing.values())))
        found.append(f"{', '.join(sorted(missing))} not found; install: apt-get install {packages}")
    if "overlay" not in filesystems.split():
        found.append("this kernel has no overlayfs loaded; load it: modprobe overlay")
    return found


def problems_here(kinds: frozenset[str]) -> list[str]:
    """`problems` of this process on this machine."""
    path = os.pathsep.join((os.environ.get("PATH", ""), *SBIN))
    filesystems = Path("/proc/filesystems").read_text()
    return problems(kinds, uid=os.geteuid(), path=path, filesystems=filesystems)


def check(kinds: frozenset[str]) -> None:
    """Raises: PreconditionError with everything that is missing."""
    found = problems_here(kinds)
    if found:
        raise PreconditionError("a testbed cannot be made here: " + "; and ".join(found))
    # pip and cron give a PATH without sbin; everything started from here on needs it.
    missing = [folder for folder in SBIN if folder not in os.environ.get("PATH", "").split(os.pathsep)]
    os.environ["PATH"] = os.pathsep.join([os.environ.get("PATH", ""), *missing])
