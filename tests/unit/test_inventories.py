"""resolve(): every way to name hosts, and what the SSH configuration adds."""

from __future__ import annotations

import json
import os
import random
import shutil
import stat
from pathlib import Path

import pytest

from provision.ansible_inventory import parse_ini, parse_list_json, parse_yaml
from provision.cluster import Cluster, Node
from provision.errors import HostTextError, UsageError
from provision.hosttext import HostSpec, parse_hosts
from provision.inventories import kind_of, parse_slurm, read_ansible, resolve
from provision.sshconfig import apply_ssh_config, host_key_rules, load_ssh_config, parse_ssh_config


@pytest.fixture
def no_ssh(tmp_path):
    path = tmp_path / "empty_ssh_config"
    path.write_text("")
    return path


def names_of(specs):
    return [(s.alias or s.host, s.host, s.user, s.port, s.slots) for s in specs]


# --- resolve -------------------------------------------------------------------------


def test_no_hosts_is_this_machine(tmp_path):
    cluster = resolve(state_dir=tmp_path)
    assert cluster == Cluster(nodes=(Node(name="localhost", host="localhost", local=True),))
    assert resolve(state_dir=tmp_path, slots=2).head.slots == 2


def test_no_hosts_is_the_saved_cluster(tmp_path):
    saved = Cluster(nodes=(Node("h1", "h1", slots=1), Node("h2", "h2", slots=0)), id="x")
    saved.save(tmp_path / "cluster.json")
    assert resolve(state_dir=tmp_path) == saved
    assert [node.slots for node in resolve(state_dir=tmp_path, slots=3).nodes] == [3, 0]
    assert resolve(hosts_from=str(tmp_path / "cluster.json"), state_dir=tmp_path / "none") == saved


@pytest.mark.parametrize(
    ("hosts", "expected"),
    [
        pytest.param("h1,h2", ["h1", "h2"], id="plain"),
        pytest.param("alice@h1:2222,h2", ["h1", "h2"], id="user-port"),
        pytest.param("127.0.0.1:2222,127.0.0.1:2200", ["127-0-0-1-2222", "127-0-0-1-2200"], id="ports"),
        pytest.param("fe80::1%eth0,::1", ["ip6-fe80--1-eth0", "ip6-1"], id="ipv6"),
        pytest.param("a_b", ["a-b"], id="underscore"),
    ],
)
def test_names_are_what_mpirun_accepts(hosts, expected, no_ssh, tmp_path):
    assert list(resolve(hosts=hosts, ssh_config=no_ssh, state_dir=tmp_path).names) == expected


def test_slots_fill_what_the_text_leaves_open(no_ssh, tmp_path):
    cluster = resolve(hosts="h1,h2 slots=3,h3 slots=0", slots=2, ssh_config=no_ssh, state_dir=tmp_path)
    assert [node.slots for node in cluster.nodes] == [2, 3, 0]


def test_localhost_alone_is_local(no_ssh, tmp_path):
    assert resolve(hosts="localhost slots=2", ssh_config=no_ssh, state_dir=tmp_path).nodes == (
        Node(name="localhost", host="localhost", local=True, slots=2),
    )
    assert not resolve(hosts="localhost:2222", ssh_config=no_ssh, state_dir=tmp_path).head.local


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        pytest.param({"hosts": ""}, "names no host", id="empty"),
        pytest.param({"hosts": "h1", "hosts_from": "x"}, "both given", id="both"),
        pytest.param({"hosts": "h1", "slots": 0}, "--slots: got 0", id="slots-0"),
        pytest.param({"hosts": "h1 max_slots=1", "slots": 2}, "more than its max_slots=1", id="max"),
        pytest.param({"hosts": "localhost,h2"}, "localhost is another machine on every host", id="localhost"),
        pytest.param({"hosts": "h1 slots=0,h2 slots=0"}, "every host has 0 slots", id="no-slots"),
        pytest.param({"hosts": "a_b,a-b"}, "would both be called", id="names"),
        pytest.param({"hosts_from": "/nowhere/x"}, "cannot be read: No such file", id="missing"),
        pytest.param(
            {"hosts": "h1", "ssh_config": "/nowhere/x"}, "--ssh-config /nowhere/x: cannot", id="ssh"
        ),
    ],
)
def test_resolve_refuses(given, expected, no_ssh, tmp_path):
    with pytest.raises(UsageError) as caught:
        resolve(**{"ssh_config": no_ssh, "state_dir": tmp_path, **given})
    assert expected in str(caught.value)


def test_file_that_is_no_utf8_text(tmp_path):
    (tmp_path / "h").write_bytes(b"h1\nh\xff2\n")
    with pytest.raises(HostTextError, match=r"h:2: is no UTF-8 text"):
        resolve(hosts_from=str(tmp_path / "h"), state_dir=tmp_path)


def test_endless_file_is_refused(tmp_path):
    with pytest.raises(HostTextError, match="is larger than"):
        resolve(hosts_from="/dev/zero", state_dir=tmp_path)


@pytest.mark.parametrize(
    ("name", "text", "expected"),
    [
        pytest.param("hostfile", "h1 slots=2\n", "hostfile", id="hostfile"),
        pytest.param("hostfile", "[h2]:22 slots=1\n", "hostfile", id="bracketed-host"),
        pytest.param("hosts", "# c\n[gpu]\nh1\n", "ansible-ini", id="group"),
        pytest.param("hosts", "h1 ansible_host=h2\n", "ansible-ini", id="variable"),
        pytest.param("h.ini", "h1\n", "ansible-ini", id="ini"),
        pytest.param("h.yml", "all:\n", "ansible-yaml", id="yml"),
        pytest.param("h", "---\nall:\n", "ansible-yaml", id="yaml-start"),
        pytest.param("h", "all:\n  hosts:\n", "ansible-yaml", id="yaml-first-word"),
        pytest.param("h.json", '{"_meta": {}}', "ansible-json", id="json"),
        pytest.param("c.json", '{"kind": "ringmaster-cluster"}', "cluster", id="cluster"),
        pytest.param("c", "Host h1\n", "ssh-config", id="ssh-config"),
        pytest.param("inv.py", "#!/usr/bin/python3\n", "ansible", id="program"),
        pytest.param("h", "", "hostfile", id="empty"),
    ],
)
def test_kind_of_file(name, text, expected):
    assert kind_of(name, text) == expected


# --- SSH configuration ---------------------------------------------------------------

SSH = """
User everyone # a comment
Host h1 alias1
  HostName %h.example.org
  Port=2222
  IdentityFile ~/.ssh/id_%r
  IdentityFile "${KEYS}/a b"
  IdentitiesOnly yes
  ProxyJump bob@jump:2200,ssh://jump2
Host h2
  ProxyJump none
  IdentityFile none
Match user carol
  Port 99
Match Host h3
  Port 98
Host p
  ProxyCommand nc %h %p
Host bad-port
  Port ssh
Host bad-name
  HostName -oProxyCommand=id
Host *
  ProxyJump never
"""


@pytest.mark.parametrize(
    ("text", "changed"),
    [
        pytest.param(
            "h1",
            {
                "host": "h1.example.org",
                "user": "everyone",
                "port": 2222,
                "identity_files": (os.path.expanduser("~/.ssh/id_everyone"), "/k/a b"),
                "identities_only": True,
                "proxy_jump": "bob@jump:2200,jump2",
            },
            id="all",
        ),
        pytest.param("h2", {"user": "everyone"}, id="none"),
        pytest.param("dave@h2:23", {}, id="text-wins"),
        pytest.param("carol@h4", {"port": 99, "proxy_jump": "never"}, id="match-user-of-the-text"),
        pytest.param("h3", {"user": "everyone", "port": 98, "proxy_jump": "never"}, id="match-host"),
    ],
)
def test_ssh_config(text, changed):
    settings = parse_ssh_config([("cfg", SSH, "/")], lambda pattern, folder: [])
    spec = parse_hosts(text)[0]
    got = apply_ssh_config(spec, settings, environ={"KEYS": "/k"})
    expected = {**spec.__dict__, "alias": spec.host, **changed}
    assert got.__dict__ == expected


@pytest.mark.parametrize(
    ("host", "expected"),
    [
        pytest.param("p", "ProxyCommand is not supported", id="proxycommand"),
        pytest.param("bad-port", "Port: got 'ssh'", id="port"),
        pytest.param("bad-name", "cannot start with a dash", id="hostname"),
        pytest.param("h1", "the environment variable KEYS is not set", id="variable"),
    ],
)
def test_ssh_config_value_refused(host, expected):
    text = SSH.replace("  ProxyJump never", "  Compression yes")
    settings = parse_ssh_config([("cfg", text, "/")], lambda pattern, folder: [])
    with pytest.raises(HostTextError) as caught:
        apply_ssh_config(parse_hosts(host)[0], settings, environ={})
    assert expected in str(caught.value)
    assert str(caught.value).startswith("cfg (for ")


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        pytest.param("Host h1\n  Port\n", "cfg:2: 'Port' is no `Keyword value` line", id="no-value"),
        pytest.param("Match tagged x\n", "cfg:1: Match 'tagged' is not read", id="match-keyword"),
        pytest.param("Match host\n", "cfg:1: Match 'host' is not read", id="match-no-value"),
        pytest.param('Host "h1\n', "is no SSH configuration", id="quote"),
        pytest.param("Host h1\nInclude sub\n", "inside `Host h1` is not read", id="include-in-host"),
        pytest.param("Include loop\n", "deeper than 16 files", id="include-loop"),
    ],
)
def test_ssh_config_refused(text, expected):
    files = {"sub": "Host h2\n User x\n", "loop": "Include loop\n"}
    with pytest.raises(HostTextError) as caught:
        parse_ssh_config([("cfg", text, "/")], lambda pattern, folder: [(pattern, files[pattern])])
    assert expected in str(caught.value)


GLOBAL = ("/etc/ssh/ssh_known_hosts", "/etc/ssh/ssh_known_hosts2")


@pytest.mark.parametrize(
    ("text", "files"),
    [
        pytest.param("User x", ("~/.ssh/known_hosts", "~/.ssh/known_hosts2", *GLOBAL), id="default"),
        pytest.param("UserKnownHostsFile /a ~/b", ("/a", "~/b", *GLOBAL), id="several"),
        pytest.param('UserKnownHostsFile "/a b" "/c d"', ("/a b", "/c d", *GLOBAL), id="quoted"),
        pytest.param("UserKnownHostsFile=/dev/null # x", ("/dev/null", *GLOBAL), id="dev-null"),
        pytest.param("UserKnownHostsFile none", GLOBAL, id="none"),
        pytest.param("globalknownhostsfile /g1 /g2\nUserKnownHostsFile none", ("/g1", "/g2"), id="global"),
        pytest.param(
            "UserKnownHostsFile %d/%n/%h/%p/%r/%k/${DIR}/100%% /x\nUserKnownHostsFile /late",
            ("~/h1/10.0.0.1/2222/u/10.0.0.1/dir/100%", "/x", *GLOBAL),
            id="tokens",
        ),
    ],
)
def test_known_hosts_files(text, files):
    text += "\nHost h1\n  HostName 10.0.0.1\nHost other\n  UserKnownHostsFile /not/for/h1\n"
    settings = parse_ssh_config([("cfg", text, "/")], lambda pattern, folder: [])
    rules = host_key_rules(settings, ["h1"], "10.0.0.1", user="u", port=2222, environ={"DIR": "dir"})
    assert rules.files == tuple(os.path.expanduser(file) for file in files)


@pytest.mark.parametrize(
    ("value", "strict"),
    [("yes", True), ("YES", True), ("no", False), ("ask", False), ("accept-new", False)],
)
def test_strict_host_key_checking(value, strict, tmp_path):
    (tmp_path / "cfg").write_text(f"Host h1\n StrictHostKeyChecking {value}\n HostKeyAlias a1\n")
    settings = load_ssh_config(tmp_path / "cfg")
    rules = host_key_rules(settings, ["h1"], "h1", user="u", port=22)
    assert (rules.strict, rules.alias, settings.file) == (strict, "a1", f"{tmp_path}/cfg")
    assert not host_key_rules(settings, ["h2"], "h2", user="u", port=22).strict


@pytest.mark.parametrize("word", ["%Z", "${NOT_SET_ANYWHERE}", "%"])
def test_known_hosts_file_with_an_unknown_token(word):
    text = f"UserKnownHostsFile /a/{word}\n"
    settings = parse_ssh_config([("cfg", text, "/")], lambda pattern, folder: [])
    with pytest.raises(HostTextError, match=r"^cfg \(for h1\): UserKnownHostsFile: ") as caught:
        host_key_rules(settings, ["h1"], "h1", user="u", port=22, environ={})
    assert caught.value.part == word


def test_include_is_read_from_files(tmp_path):
    (tmp_path / "conf.d").mkdir()
    (tmp_path / "conf.d" / "a").write_text("Host h1\n User included\n")
    (tmp_path / "cfg").write_text(f"Include {tmp_path}/conf.d/*\nInclude {tmp_path}/missing\nUser rest\n")
    cluster = resolve(hosts="h1,h2", ssh_config=tmp_path / "cfg", state_dir=tmp_path)
    assert [node.user for node in cluster.nodes] == ["included", "rest"]


def test_two_names_of_one_machine_are_refused(tmp_path):
    (tmp_path / "cfg").write_text("Host a b\n HostName 10.0.0.1\n")
    with pytest.raises(HostTextError, match=r"10\.0\.0\.1 is given twice"):
        resolve(hosts="a,b", ssh_config=tmp_path / "cfg", state_dir=tmp_path)


# --- Vagrant, SLURM ------------------------------------------------------------------

VAGRANT = """Host m1
  HostName 127.0.0.1
  User vagrant
  Port 2222
  UserKnownHostsFile /dev/null
  StrictHostKeyChecking no
  PasswordAuthentication no
  IdentityFile "/home/a b/.vagrant/private_key"
  IdentitiesOnly yes
  LogLevel FATAL

Host m2
  HostName 127.0.0.1
  User vagrant
  Port 2200
"""
M1 = Node(
    name="m1",
    host="127.0.0.1",
    user="vagrant",
    port=2222,
    identity_files=("/home/a b/.vagrant/private_key",),
    identities_only=True,
)
M2 = Node(name="m2", host="127.0.0.1", user="vagrant", port=2200)


def test_saved_vagrant_ssh_config(tmp_path):
    (tmp_path / "vagrant.txt").write_text(VAGRANT)
    assert resolve(hosts_from=str(tmp_path / "vagrant.txt"), state_dir=tmp_path).nodes == (M1, M2)


@pytest.mark.parametrize(
    ("script", "expected"),
    [
        pytest.param(f"echo note; cat <<'X'\n{VAGRANT}X\n", (M1, M2), id="two"),
        pytest.param("echo no machine >&2; exit 1\n", "exited 1:\nno machine", id="fails"),
        pytest.param("echo nothing\n", "names no host", id="nothing"),
    ],
)
def test_vagrant_program(script, expected, tmp_path, monkeypatch):
    # It prints what Vagrant prints: what is tested is how it is called and how its words are taken.
    program = tmp_path / "bin" / "vagrant"
    program.parent.mkdir()
    program.write_text(f'#!/bin/sh\n[ "$*" = ssh-config ] || exit 9\n{script}')
    program.chmod(stat.S_IRWXU)
    monkeypatch.setenv("PATH", f"{program.parent}:{os.environ['PATH']}")
    if isinstance(expected, tuple):
        assert resolve(hosts_from="vagrant", state_dir=tmp_path).nodes == expected
    else:
        with pytest.raises(HostTextError) as caught:
            resolve(hosts_from="vagrant", state_dir=tmp_path)
        assert expected in str(caught.value)


@pytest.mark.parametrize(
    ("environ", "expected"),
    [
        pytest.param(
            {"SLURM_JOB_NODELIST": "gpu[01-02,04],login1", "SLURM_TASKS_PER_NODE": "2(x3),1"},
            [("gpu01", 2), ("gpu02", 2), ("gpu04", 2), ("login1", 1)],
            id="tasks",
        ),
        pytest.param({"SLURM_NODELIST": "n1"}, [("n1", None)], id="older-name"),
        pytest.param({}, "SLURM_JOB_NODELIST is not set", id="no-job"),
        pytest.param({"SLURM_JOB_NODELIST": "n[1-"}, "SLURM_JOB_NODELIST: a bracket", id="bad-list"),
        pytest.param(
            {"SLURM_JOB_NODELIST": "n1", "SLURM_TASKS_PER_NODE": "2(x99999)"},
            "does not fit the 1",
            id="too-many",
        ),
        pytest.param({"SLURM_JOB_NODELIST": "n1", "SLURM_TASKS_PER_NODE": "x"}, "got 'x'", id="bad-tasks"),
    ],
)
def test_slurm(environ, expected):
    if isinstance(expected, list):
        assert [(s.host, s.slots) for s in parse_slurm(environ)] == expected
    else:
        with pytest.raises(HostTextError) as caught:
            parse_slurm(environ)
        assert expected in str(caught.value)


# --- Ansible -------------------------------------------------------------------------

INI = """\
; comment
login ansible_host=10.0.0.9 ansible_connection=ssh
[gpu]
g[01:02] ansible_port=2222 slots=4
g07:2200 ansible_user="root"  # comment
[gpu:vars]
ansible_user=alice
ansible_ssh_private_key_file=/tmp/k
[all:vars]
ansible_user=bob
ansible_ssh_common_args='-o ProxyJump=jump'
[big:children]
gpu
[big:vars]
ansible_user=carol
"""
YAML = """\
all:
  vars: {ansible_user: bob}
  hosts:
    login: {ansible_host: 10.0.0.9}
  children:
    gpu:
      hosts:
        g[01:02]: {ansible_port: 2222}
        g07:
      vars: {ansible_user: alice}
"""
LISTED = json.dumps(
    {
        "_meta": {"hostvars": {"a": {"ansible_host": "10.0.0.1", "ansible_port": 23}}},
        "all": {"children": ["ungrouped", "g"]},
        "g": {"hosts": ["b", "a"]},
    }
)


@pytest.mark.parametrize(
    ("read", "text", "expected"),
    [
        pytest.param(
            parse_ini,
            INI,
            [
                ("login", "10.0.0.9", "bob", None, None),
                ("g01", "g01", "alice", 2222, 4),
                ("g02", "g02", "alice", 2222, 4),
                ("g07", "g07", "root", 2200, None),
            ],
            id="ini",
        ),
        pytest.param(
            parse_yaml,
            YAML,
            [
                ("login", "10.0.0.9", "bob", None, None),
                ("g01", "g01", "alice", 2222, None),
                ("g02", "g02", "alice", 2222, None),
                ("g07", "g07", "alice", None, None),
            ],
            id="yaml",
        ),
        pytest.param(
            parse_list_json,
            LISTED,
            [("b", "b", None, None, None), ("a", "10.0.0.1", None, 23, None)],
            id="json",
        ),
        pytest.param(
            parse_ini, "h1 ansible_connection=local\n", [("localhost",) * 2 + (None,) * 3], id="local"
        ),
    ],
)
def test_ansible_inventory(read, text, expected):
    assert names_of(read(text, source="inv")) == expected


def test_ansible_key_and_jump():
    spec: HostSpec = parse_ini(INI, source="inv")[1]
    assert (spec.identity_files, spec.proxy_jump) == (("/tmp/k",), "jump")


@pytest.mark.skipif(shutil.which("ansible-inventory") is None, reason="needs ansible-inventory")
@pytest.mark.parametrize(("name", "text", "read"), [("i.ini", INI, parse_ini), ("i.yml", YAML, parse_yaml)])
def test_plain_readers_agree_with_ansible(name, text, read, tmp_path):
    (tmp_path / name).write_text(text)
    through_ansible = read_ansible(tmp_path / name, "ansible", text)
    assert names_of(through_ansible) == names_of(read(text, source="inv"))


@pytest.mark.parametrize(
    ("read", "text", "expected"),
    [
        pytest.param(parse_ini, "", "names no host", id="ini-empty"),
        pytest.param(parse_ini, "[g:what]\n", "inv:1: section [g:what] is not known", id="ini-section"),
        pytest.param(parse_ini, "[g]\nh[a:c]\n", "only number ranges", id="ini-letters"),
        pytest.param(parse_ini, "h1 x\n", "inv:1: 'x' after 'h1': expected key=value", id="ini-word"),
        pytest.param(parse_ini, 'h1 a="\n', "inv:1", id="ini-quote"),
        pytest.param(parse_ini, "h1\n[a:children]\nb\n", "child 'b' that is not there", id="ini-child"),
        pytest.param(parse_ini, "h1\n[a:children]\nb\n[b:children]\na\n", "in a circle", id="ini-circle"),
        pytest.param(parse_ini, "h1 ansible_host={{x}}\n", "templates are not read", id="ini-template"),
        pytest.param(parse_ini, "h1 ansible_host=-oX\n", "start with a dash", id="ini-option"),
        pytest.param(parse_ini, "h1 ansible_port=x\n", "port: got 'x'", id="ini-port"),
        pytest.param(parse_ini, "h1 ansible_connection=winrm\n", "expected ssh or local", id="ini-winrm"),
        pytest.param(parse_yaml, "all: [1]\n", "all: got [1], expected a mapping", id="yaml-list"),
        pytest.param(
            parse_yaml, "all:\n  host: {}\n", "all.host: expected hosts, vars or children", id="yaml-key"
        ),
        pytest.param(parse_yaml, "a: b: c\n", "inv:1: is no plain YAML", id="yaml-syntax"),
        pytest.param(parse_yaml, "all: {hosts: {h: {x: !vault y}}}\n", "is no plain YAML", id="yaml-tag"),
        pytest.param(parse_list_json, "{}", "is no `ansible-inventory --list` output", id="json-empty"),
        pytest.param(parse_list_json, "x", "is no `ansible-inventory --list` output", id="json-text"),
    ],
)
def test_ansible_inventory_refused(read, text, expected):
    with pytest.raises(HostTextError) as caught:
        read(text, source="inv")
    assert expected in str(caught.value)


def test_without_ansible_a_folder_and_variable_folders_are_refused(tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(HostTextError, match="install Ansible"):
        resolve(hosts_from=str(tmp_path), state_dir=tmp_path)
    (tmp_path / "group_vars").mkdir()
    (tmp_path / "h.ini").write_text("h1\n")
    with pytest.raises(HostTextError, match="group_vars/ beside it"):
        resolve(hosts_from=str(tmp_path / "h.ini"), state_dir=tmp_path)


PIECES = (
    *"ha1:,[]{}-=#'\"%\n\n\n \t",
    *("[g]\n", "[g:vars]\n", "[g:children]\ng\n", "ansible_host=", "ansible_port=2", "all:\n", "  hosts:\n"),
    *(
        "    h1:\n",
        "Host h1\n",
        "Match ",
        " User a\n",
        "Include x\n",
        '{"_meta": {"hostvars": ',
        "null",
        "}}",
    ),
)


@pytest.mark.parametrize("seed", range(10))
def test_any_inventory_text_parses_or_is_a_host_text_error(seed):
    pieces = random.Random(seed)

    def read_ssh(text, source):
        settings = parse_ssh_config([(source, text, "/")], lambda pattern, folder: [])
        return (apply_ssh_config(parse_hosts("h1")[0], settings),)

    parsed = 0
    for _ in range(150):
        text = "".join(pieces.choices(PIECES, k=pieces.randrange(1, 12)))
        for read in (parse_ini, parse_yaml, parse_list_json, read_ssh):
            try:
                specs = read(text, source="f")
            except HostTextError:
                continue
            parsed += 1
            assert all(spec.host[0] != "-" for spec in specs)
    assert parsed > 0


def test_paths_are_made_from_home(tmp_path):
    (tmp_path / "h").write_text("h1\n")
    shown = os.path.relpath(tmp_path / "h", Path.home())
    cluster = resolve(hosts_from=f"~/{shown}", ssh_config="/dev/null", state_dir=tmp_path)
    assert cluster.names == ("h1",)
