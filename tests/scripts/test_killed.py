"""kill -9 at random moments of the other installers; Open MPI's test also replaces versions."""

from __future__ import annotations

import os
import random
import shutil
import signal
import subprocess
import time
from collections.abc import Callable
from pathlib import Path

from tests.scripts.conftest import Mesh, Site
from tests.scripts.test_openmpi import leftovers, workers
from tests.scripts.test_python import runs

KILLS = 10


def kill_at_random(
    site: Site, argv: list[str], undo: Callable[[], None], look: Callable[[], None], seed: int
) -> None:
    """Kill KILLS runs at moments spread over a whole run; `undo` makes work again, `look` judges what is visible."""
    rng = random.Random(seed)
    begun = time.monotonic()
    subprocess.run(argv, env=site.env(), check=True, capture_output=True, timeout=120)
    whole_s = time.monotonic() - begun
    killed = 0
    for _ in range(4 * KILLS):
        if killed == KILLS:
            break
        undo()
        run = subprocess.Popen(
            argv,
            env=site.env(),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        time.sleep(whole_s * (killed + rng.random()) / KILLS)
        if run.poll() is None:
            killed += 1
            os.kill(run.pid, signal.SIGKILL)
        run.wait()
        look()
    assert killed == KILLS


def test_python(bare: Site, packed: Path) -> None:
    python = bare.prefix / "python"

    def look() -> None:
        if python.exists():
            runs(python / "bin/python3.7")

    words = [f"--archive={packed}"]
    argv = bare.argv("install_python.sh", *words)
    kill_at_random(bare, argv, lambda: shutil.rmtree(python, ignore_errors=True), look, 1)
    assert bare.word("install_python.sh", *words) in ("changed", "unchanged")
    assert bare.word("install_python.sh", *words) == "unchanged"
    runs(python / "bin/python3.7")
    assert (leftovers(bare.prefix), workers(bare.prefix)) == ([], [])


def test_ssh_mesh(mesh: Mesh) -> None:
    site = mesh.site
    mine = "ssh-ed25519 AAAA mine\n"
    mesh.authorized.parent.mkdir(mode=0o700)
    mesh.authorized.write_text(mine)
    mesh.authorized.chmod(0o600)
    turn = 0

    def undo() -> None:
        nonlocal turn
        turn += 1
        mesh.write_peers(("h1", "127.0.0.1", 2000 + turn))
        mesh.authorized.write_text(mine)

    def look() -> None:
        assert mesh.authorized.read_text().startswith(mine)
        if mesh.ssh.exists():
            assert (mesh.ssh / "id_ed25519").stat().st_mode & 0o777 == 0o600
            assert {"config", "known_hosts", "peers.tsv", ".ringmaster.json"} <= set(os.listdir(mesh.ssh))

    kill_at_random(site, site.argv("setup_ssh_mesh.sh", *mesh.words()), undo, look, 2)
    assert site.word("setup_ssh_mesh.sh", *mesh.words()) in ("changed", "unchanged")
    assert site.word("setup_ssh_mesh.sh", *mesh.words()) == "unchanged"
    assert sorted(os.listdir(mesh.authorized.parent)) == ["authorized_keys"]
    assert mesh.authorized.read_text().count("ringmaster-c1") == 1
    assert leftovers(site.prefix) == []
