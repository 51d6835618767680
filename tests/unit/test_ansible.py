"""The playbook says what `fab provision` says: the same steps, options and defaults, and no logic of its own."""

from __future__ import annotations

import inspect
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from provision.ansible_inventory import parse_yaml
from provision.cli import load_tasks
from provision.plan import STEPS
from provision.steps import SCRIPTS

ROOT = Path(__file__).resolve().parents[2]
ANSIBLE = ROOT / "ansible"
ROLES = sorted(path.name for path in (ANSIBLE / "roles").iterdir())
PLAYBOOK = Path(sys.executable).with_name("ansible-playbook")
# The file of provision.apply that runs each step.
APPLY = {"ssh_mesh": "mesh.py", "python": "stack.py", "openmpi": "openmpi.py", "runtime": "stack.py"}
# Options of `fab provision` -> variables. The inventory says which hosts.
VARIABLES = {
    "hosts": None,
    "hosts_from": None,
    "local": None,
    "ssh_config": "cluster_ssh_config",
    "slots": "cluster_slots",
    "prefix": "cluster_prefix",
    "mpi": "openmpi_from",
    "openmpi_version": "openmpi_version",
    "openmpi_source": "openmpi_source",
    "openmpi_sha256": "openmpi_sha256",
    "mirror": "openmpi_mirror",
    "gpu": "runtime_gpu",
    "jobs": "openmpi_jobs",
    "stack": "cluster_stack",
    "wheelhouse": "runtime_wheelhouse",
    "python_archive": "python_archive",
    "hostfile": "cluster_hostfile",
}


def read(path: Path) -> Any:
    return yaml.safe_load(path.read_text("utf-8"))


def defaults_of(role: str) -> dict[str, Any]:
    path = ANSIBLE / "roles" / role / "defaults" / "main.yml"
    return read(path) if path.is_file() else {}


def tasks_in(value: Any) -> Iterator[dict[str, Any]]:
    """Every task of a list of tasks, those in blocks too."""
    for task in value:
        yield task
        for part in ("block", "rescue", "always"):
            yield from tasks_in(task.get(part, ()))


def task_files() -> list[Path]:
    return sorted((ANSIBLE / "roles").glob("*/tasks/*.yml"))


def runs_of(step: str) -> list[dict[str, Any]]:
    """The variables of every call of the installer in the step's role."""
    found = []
    for path in (ANSIBLE / "roles" / step / "tasks").glob("*.yml"):
        for task in tasks_in(read(path)):
            given = task.get("vars", {})
            if "installer_script" in given:
                found.append(given)
    return found


def options_in(text: str) -> set[str]:
    return set(re.findall(r"""["'\[ (]--([a-z][a-z0-9-]*)""", text))


def accepted_by(script: str) -> set[str]:
    text = (ROOT / "scripts" / script).read_text("utf-8")
    found = re.search(r'parse_options "([^"]*)" "\$@"', text)
    assert found, script
    return {word.rstrip("!") for word in found[1].split()}


def test_the_playbook_has_the_steps_in_their_order() -> None:
    (play,) = read(ANSIBLE / "site.yml")
    assert tuple(role["role"] for role in play["roles"]) == STEPS
    assert set(ROLES) == {*STEPS, "cluster", "installer"}


@pytest.mark.parametrize("step", STEPS)
def test_a_role_runs_its_steps_script_and_no_other(step: str) -> None:
    runs = runs_of(step)
    assert {(run["installer_step"], run["installer_script"]) for run in runs} == {(step, SCRIPTS[step])}


@pytest.mark.parametrize("step", STEPS)
def test_a_role_passes_what_provision_passes(step: str) -> None:
    accepted = accepted_by(SCRIPTS[step])
    passed = options_in((ROOT / "provision" / "apply" / APPLY[step]).read_text("utf-8")) & accepted
    role = ANSIBLE / "roles" / step
    texts = [path.read_text("utf-8") for part in ("tasks", "vars") for path in role.glob(f"{part}/*.yml")]
    ours = options_in("".join(texts))
    assert len(passed) >= 2
    assert ours == passed


def test_every_option_of_fab_provision_is_a_variable() -> None:
    options = set(inspect.signature(load_tasks().provision.body).parameters) - {"c"}
    assert options == set(VARIABLES)
    known = {name for role in ROLES for name in defaults_of(role)}
    assert {name for name in VARIABLES.values() if name} <= known


@pytest.mark.parametrize("role", ROLES)
def test_defaults_are_specified_and_named_after_their_role(role: str) -> None:
    spec = read(ANSIBLE / "roles" / role / "meta" / "argument_specs.yml")["argument_specs"]["main"]["options"]
    defaults = defaults_of(role)
    assert set(spec) == set(defaults)
    for name, value in defaults.items():
        assert name.startswith(f"{role}_")
        if not (isinstance(value, str) and "{{" in value):
            assert spec[name]["default"] == value
        assert spec[name]["description"]


@pytest.mark.parametrize("path", task_files(), ids=lambda p: str(p.relative_to(ANSIBLE / "roles")))
def test_tasks_are_named_and_plain(path: Path) -> None:
    keywords = {
        *("name", "when", "vars", "register", "loop", "block", "rescue", "always", "delegate_to", "run_once"),
        *("changed_when", "failed_when", "check_mode", "timeout", "diff", "no_log"),
    }
    for task in tasks_in(read(path)):
        assert task["name"]
        modules = set(task) - keywords
        assert len(modules) == (0 if "block" in task else 1), task["name"]
        for module in modules:
            assert module.startswith("ansible.builtin."), module
            assert module not in ("ansible.builtin.shell", "ansible.builtin.script", "ansible.builtin.raw")
            arguments = task[module] if isinstance(task[module], dict) else {}
            assert isinstance(arguments.get("mode", ""), str), task["name"]
            if module == "ansible.builtin.command":
                assert "changed_when" in task, task["name"]


def test_a_copied_private_key_is_never_shown() -> None:
    copies = [
        task
        for path in task_files()
        for task in tasks_in(read(path))
        if "private_key" in str(task.get("ansible.builtin.copy", ""))
    ]
    assert [(task["no_log"], task["diff"]) for task in copies] == [(True, False)]
    assert copies[0]["ansible.builtin.copy"]["mode"] == "0600"


def run_playbook(*words: str, timeout_s: float = 60) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [str(PLAYBOOK), *words],
        env=dict(os.environ, ANSIBLE_CONFIG=str(ANSIBLE / "ansible.cfg"), ANSIBLE_NOCOLOR="1"),
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=timeout_s,
        check=False,
    )


@pytest.mark.parametrize("inventory", ["h1,h2,", str(ANSIBLE / "inventory" / "example.yml")])
def test_ansible_accepts_the_playbook(inventory: str) -> None:
    done = run_playbook("-i", inventory, "--syntax-check", str(ANSIBLE / "site.yml"))
    assert done.returncode == 0, done.stderr
    assert "site.yml" in done.stdout


def test_the_example_inventory_names_its_hosts_in_order() -> None:
    specs = parse_yaml((ANSIBLE / "inventory" / "example.yml").read_text("utf-8"), source="example.yml")
    assert [(spec.alias, spec.host, spec.port, spec.slots) for spec in specs] == [
        ("h1", "192.0.2.11", None, None),
        ("h2", "192.0.2.12", 2222, 8),
    ]


RECORDER = """
class Recorder < BasicObject
  def initialize(path) = @path = path

  def method_missing(name, *values, **options, &block)
    path = "#{@path}.#{name}"
    said = values + (options.empty? ? [] : [options.map { |key, value| "#{key}=#{value}" }.join(" ")])
    ::Kernel.puts "#{path} #{said.join(" ")}" unless said.empty?
    inner = ::Recorder.new(block && values.first ? "#{path}(#{values.first})" : path)
    block&.call(inner)
    inner
  end
end

module Vagrant
  def self.configure(version) = yield(Recorder.new("config"))
end

load ARGV[0]
"""


@pytest.fixture
def ruby() -> str:
    found = shutil.which("ruby")
    if found is None:
        pytest.skip("ruby is not installed: the Vagrantfile cannot be read")
    return found


def vagrantfile(ruby: str, **environ: str) -> subprocess.CompletedProcess[str]:
    """What the Vagrantfile sets, one setting a line; Vagrant itself is not run."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith("RINGMASTER_")}
    return subprocess.run(
        [ruby, "-w", "-e", RECORDER, str(ROOT / "Vagrantfile")],
        env={**kept, **environ},
        capture_output=True,
        text=True,
        timeout=30,
        check=False,
    )


def test_the_vagrantfile_makes_as_many_machines_as_asked(ruby: str) -> None:
    done = vagrantfile(ruby, RINGMASTER_NODES="2", RINGMASTER_MEMORY_MB="2048", RINGMASTER_KVM="0")
    assert (done.returncode, done.stderr) == (0, "")
    lines = done.stdout.splitlines()
    assert [line for line in lines if "private_network" in line] == [
        f"config.vm.define({name}).vm.network private_network ip=192.168.56.{number}"
        for name, number in (("h1", 11), ("h2", 12))
    ]
    for provider in ("libvirt", "virtualbox"):
        assert f"config.vm.provider({provider}).memory= 2048" in lines
    assert "config.vm.provider(libvirt).qemuargs value=max" in lines, "the emulated CPU has AVX"


def test_the_vagrantfile_refuses_what_is_no_number(ruby: str) -> None:
    done = vagrantfile(ruby, RINGMASTER_NODES="many")
    assert done.returncode != 0
    assert 'RINGMASTER_NODES is "many"' in done.stderr
