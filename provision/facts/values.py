"""The facts of one node as frozen values."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class OperatingSystem:
    id: str | None  # debian, ubuntu, centos...
    version: str | None  # 12, 22.04...
    pretty: str | None


@dataclass(frozen=True)
class Cpu:
    count: int | None
    model: str | None
    flags: tuple[str, ...] | None


@dataclass(frozen=True)
class Disk:
    prefix_free_bytes: int | None
    tmp_free_bytes: int | None
    tmp_noexec: bool | None


@dataclass(frozen=True)
class Gpu:
    index: int
    name: str | None
    memory_mib: int | None
    driver: str | None


@dataclass(frozen=True)
class Cuda:
    home: str | None
    version: str | None


@dataclass(frozen=True)
class Interface:
    name: str
    up: bool
    loopback: bool
    mtu: int | None
    cidrs: tuple[str, ...]


@dataclass(frozen=True)
class SshServer:
    """The node's own end of the SSH connection that asked for the facts."""

    address: str | None
    port: int | None


@dataclass(frozen=True)
class Python:
    path: str
    version: str | None
    usable: bool
    problem: str | None


@dataclass(frozen=True)
class OpenMPI:
    """The Open MPI under the prefix. `version` is what its own mpirun says."""

    version: str | None
    origin: str | None  # "source", "wheel", "archive": `from` in the JSON
    digest: str | None
    path: str | None


@dataclass(frozen=True)
class Stack:
    python: str | None
    digest: str | None
    packages: Mapping[str, str]
    horovod_build: Mapping[str, Any]


@dataclass(frozen=True)
class NodeFacts:
    """One node's facts. None means absent, or unknown if `is_unknown` says so; () and {} are known to be empty."""

    hostname: str | None
    fqdn: str | None
    user: str
    uid: int
    home: str
    shell: str | None
    kernel: str | None
    arch: str | None
    glibc: str | None
    clock_epoch_s: float | None
    os: OperatingSystem
    cpu: Cpu
    memory_bytes: int | None
    disk: Disk
    gpus: tuple[Gpu, ...] | None
    cuda: Cuda | None
    interfaces: tuple[Interface, ...] | None
    ssh_server: SshServer | None  # None: not asked over SSH
    host_keys: tuple[str, ...] | None
    tools: Mapping[str, str | bool | None]  # name -> version text, or False if it is absent
    pythons: tuple[Python, ...] | None
    sudo: str | None  # root, passwordless, password, none
    ptrace_scope: int | None
    prefix: str  # absolute
    home_token: str | None  # equal on nodes that share one home
    openmpi: OpenMPI | None
    stacks: Mapping[str, Stack]
    manifest: Mapping[str, Any] | None
    unknown: Mapping[str, str]  # key -> why the node could not tell

    def is_unknown(self, key: str) -> bool:
        return key in self.unknown

    @property
    def platform(self) -> str:
        """Nodes of one platform can use the same binaries: `debian12-x86_64-glibc2.36-nocuda`.

        A CUDA toolkit counts only beside a GPU: without one nothing is built against it.
        """
        system = f"{self.os.id or 'linux'}{self.os.version or ''}".replace("-", "_").replace("/", "_")
        if self.gpus is not None and not self.gpus:
            cuda = "nocuda"
        elif self.cuda is not None and self.cuda.version:
            cuda = "cuda" + self.cuda.version.partition(".")[0]
        else:
            cuda = "cudaunknown" if self.is_unknown("cuda") else "nocuda"
        return f"{system}-{self.arch or 'unknown'}-glibc{self.glibc or 'unknown'}-{cuda}"

    @property
    def has_avx(self) -> bool | None:
        """Whether the CPU has AVX, which TensorFlow's wheels need; None if unknown."""
        return None if self.cpu.flags is None else "avx" in self.cpu.flags

    @property
    def gpu_count(self) -> int | None:
        return None if self.gpus is None else len(self.gpus)

    def usable_pythons(self, series: str) -> tuple[Python, ...]:
        """The interpreters of that major.minor that a stack can be made with, best first."""
        return tuple(
            python
            for python in self.pythons or ()
            if python.usable and f"{python.version}.".startswith(f"{series}.")
        )
