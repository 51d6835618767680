"""Memory that one step frees is there for the next one."""

import json
import os
import subprocess
import sys

import pytest

from tests.trainer.launch import ROOT

# Two threads that allocate and free 24 MB, again and again, as the kernels of training steps do.
SCRIPT = """
import ctypes, json, resource, sys, threading
from trainer import memory

libc = ctypes.CDLL(None)
libc.malloc.restype = ctypes.c_void_p
libc.malloc.argtypes = [ctypes.c_size_t]
libc.free.argtypes = [ctypes.c_void_p]
libc.memset.argtypes = [ctypes.c_void_p, ctypes.c_int, ctypes.c_size_t]
SIZE = 8 << 20

def steps():
    for _ in range(20):
        blocks = [libc.malloc(SIZE) for _ in range(3)]
        for block in blocks:
            libc.memset(block, 1, SIZE)
        for block in blocks:
            libc.free(block)

does_keep = memory.keep_between_steps() if sys.argv[1] == "keep" else None
threads = [threading.Thread(target=steps) for _ in range(2)]
before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
for thread in threads:
    thread.start()
for thread in threads:
    thread.join()
print(json.dumps([does_keep, resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before]))
"""


def _result(way, **variables):
    environment = dict(os.environ, PYTHONPATH=str(ROOT), **variables)
    output = subprocess.check_output([sys.executable, "-c", SCRIPT, way], env=environment, timeout=120)
    return json.loads(output.decode().splitlines()[-1])


def test_memory_is_not_taken_from_the_system_again_every_step():
    kept, faults = _result("keep")
    _, faults_by_default = _result("leave")
    assert kept is True
    assert faults < faults_by_default / 4, (faults, faults_by_default)


@pytest.mark.parametrize(
    ("name", "value"), [("MALLOC_TOP_PAD_", "131072"), ("GLIBC_TUNABLES", "glibc.malloc.arena_max=2")]
)
def test_what_the_user_set_is_left_alone(name, value):
    assert _result("keep", **{name: value})[0] is False
