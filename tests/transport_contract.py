"""What every transport promises; run against this machine and against real sshds."""

from __future__ import annotations

import hashlib
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path

import pytest

from provision.errors import CommandFailed, DeadlineExceeded, UsageError
from provision.transport import Transport, TreeChange

ROOT = Path(__file__).resolve().parents[1]

# Prints its own and a child's process id, then runs on.
LONG = ["bash", "-c", "sleep 1000 & echo $$ $!; wait"]
STUBBORN = ["bash", "-c", "trap '' TERM; sleep 1000 & echo $$ $!; while :; do wait; done"]

NASTY = [
    ["a  b", "", " lead", "trail "],
    ["'", '"', "it's", '"$HOME"', "$(id)", "`id`", "${x}", "\\", "\\n", "\\\\'"],
    ["!", "!!", "#x", "~", "*", "?", "[a]", "{a,b}", "a;b", "a|b", "a&b", "<x>", "(", ")", "%s", "-n", "--"],
    ["line\nbreak", "tab\there", "cr\rhere", "é", "日本語", "\x7f", "\x01"],
    ["x" * 120_000],
]


def still_there(transport: Transport, pid: str) -> bool:
    """Whether a process runs on the node; one that has ended but was not taken note of does not."""
    script = 'read -r _ _ state _ <"/proc/$1/stat" && [[ $state != Z ]]'
    return transport.run(["bash", "-c", script, "see", pid], timeout_s=20, check=False).status == 0


def eventually(condition: Callable[[], bool], timeout_s: float = 12.0) -> bool:
    deadline = time.monotonic() + timeout_s
    while time.monotonic() < deadline:
        if condition():
            return True
        time.sleep(0.2)
    return condition()


class TransportContract:
    """Subclasses give the fixtures `transport` and `known_hosts` (a file that knows the node's host key)."""

    # -- commands ------------------------------------------------------------------------------------------

    @pytest.mark.parametrize("words", NASTY, ids=["spaces", "quotes", "shell", "control", "long"])
    def test_arguments_arrive_as_they_are(self, transport: Transport, words: list[str]) -> None:
        result = transport.run(["printf", "%s\\0", *words], timeout_s=20)
        assert result.stdout.split("\0")[:-1] == words
        assert result.argv == ("printf", "%s\\0", *words)

    def test_the_environment_arrives_as_it_is(self, transport: Transport) -> None:
        env = {"RM_A": "1 '2' \"3\"\n$4 \\", "RM_EMPTY": "", "_x9": "é"}
        script = 'printf "%s\\0" "$RM_A" "${RM_EMPTY-unset}" "$_x9"'
        result = transport.run(["bash", "-c", script], env=env, timeout_s=20)
        assert result.stdout.split("\0")[:-1] == list(env.values())

    @pytest.mark.parametrize(
        ("script", "status"),
        [("exit 0", 0), ("exit 7", 7), ("exit 255", 255), ("kill -TERM $$", 143), ("kill -KILL $$", 137)],
    )
    def test_the_exit_status_comes_through(self, transport: Transport, script: str, status: int) -> None:
        assert transport.run(["sh", "-c", script], timeout_s=20, check=False).status == status

    def test_a_failure_is_an_error_with_the_last_lines(self, transport: Transport) -> None:
        with pytest.raises(CommandFailed) as caught:
            transport.run(["sh", "-c", "echo shown; echo why >&2; exit 9"], timeout_s=20)
        assert (caught.value.status, caught.value.stdout, caught.value.stderr) == (9, "shown\n", "why\n")
        assert caught.value.node == transport.node.name
        assert "exited 9" in str(caught.value)
        assert "why" in str(caught.value)

    @pytest.mark.parametrize(("program", "status"), [("no-such-program", 127), ("/etc", 126)])
    def test_a_program_that_cannot_start(self, transport: Transport, program: str, status: int) -> None:
        result = transport.run([program], timeout_s=20, check=False)
        assert result.status == status
        assert program in result.stderr

    def test_the_working_directory(self, transport: Transport) -> None:
        home = transport.run(["pwd"], timeout_s=20).stdout
        assert home.startswith("/")
        assert transport.run(["sh", "-c", 'echo "$HOME"'], timeout_s=20).stdout == home
        transport.run(["mkdir", "-p", "rm-test/a b"], timeout_s=20)
        for cwd in ("rm-test/a b", "$HOME/rm-test/a b", "~/rm-test/a b", f"{home.strip()}/rm-test/a b"):
            assert transport.run(["pwd"], cwd=cwd, timeout_s=20).stdout == f"{home.strip()}/rm-test/a b\n"
        missing = transport.run(["pwd"], cwd="rm-test/nowhere", timeout_s=20, check=False)
        assert missing.status == 1
        assert "rm-test/nowhere" in missing.stderr
        transport.run(["rm", "-rf", "rm-test"], timeout_s=20)

    @pytest.mark.parametrize("argv", [[], ["a\0b"]], ids=["empty", "nul"])
    def test_what_no_process_can_be_given(self, transport: Transport, argv: list[str]) -> None:
        with pytest.raises(ValueError, match=r"argv is empty|NUL"):
            transport.run(argv, timeout_s=20)

    # -- input and output ----------------------------------------------------------------------------------

    def test_standard_input(self, transport: Transport) -> None:
        data = os.urandom(3_000_000)
        result = transport.run(["sha256sum"], stdin=data, timeout_s=60)
        assert result.stdout.split()[0] == hashlib.sha256(data).hexdigest()
        assert transport.run(["cat"], stdin=b"", timeout_s=20).stdout == ""
        assert transport.run(["readlink", "/proc/self/fd/0"], timeout_s=20).stdout == "/dev/null\n"

    def test_input_that_nobody_reads(self, transport: Transport) -> None:
        assert transport.run(["true"], stdin=b"x" * 3_000_000, timeout_s=20).status == 0

    def test_streams_are_kept_apart_and_decoded(self, transport: Transport) -> None:
        script = "printf 'out \\303\\251 \\377\\n'; printf 'err\\n' >&2"
        result = transport.run(["bash", "-c", script], timeout_s=20)
        assert (result.stdout, result.stderr) == ("out é \ufffd\n", "err\n")

    def test_lines_come_whole_while_the_command_runs(self, transport: Transport) -> None:
        lines: list[tuple[str, str, float]] = []
        begun = time.monotonic()
        script = (
            "printf 'one\\ntw'; sleep 1.5; printf 'o\\r50%%\\r100%%\\n\\303'; printf '\\251 end'; echo e >&2"
        )
        result = transport.run(
            ["bash", "-c", script],
            timeout_s=20,
            on_line=lambda stream, line: lines.append((stream, line, time.monotonic() - begun)),
        )
        out = [(line, when) for stream, line, when in lines if stream == "stdout"]
        assert [line for line, _ in out] == ["one", "two\r50%\r100%", "é end"]
        assert out[1][1] - out[0][1] > 1.0, "the first line was held back"
        assert [line for stream, line, _ in lines if stream == "stderr"] == ["e"]
        assert result.stdout == "one\ntwo\r50%\r100%\né end"

    def test_a_flood_is_drained_in_bounded_memory(self, transport: Transport) -> None:
        script = "yes 0123456789abcdef | head -c 34000000; echo the-end; yes err | head -c 400000 >&2"
        count = 0

        def on_line(stream: str, line: str) -> None:
            nonlocal count
            count += stream == "stdout"

        result = transport.run(["bash", "-c", script], timeout_s=100, on_line=on_line)
        assert count == 2_000_001
        assert len(result.stdout) < (8 << 20) + 100
        assert result.stdout.startswith("0123456789abcdef\n")
        assert result.stdout.endswith("0123456789abcdef\nthe-end\n")
        assert " bytes left out here]" in result.stdout
        assert len(result.stderr) == 400_000

    def test_many_commands_at_once_on_one_connection(self, transport: Transport) -> None:
        results: list[str] = []

        def one(number: int) -> None:
            script = 'sleep 0.3; echo "$1"'
            results.append(transport.run(["sh", "-c", script, "x", str(number)], timeout_s=60).stdout)

        threads = [threading.Thread(target=one, args=(number,)) for number in range(20)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)
        assert sorted(results) == sorted(f"{number}\n" for number in range(20))

    # -- the end of a command ------------------------------------------------------------------------------

    @pytest.mark.parametrize("argv", [LONG, STUBBORN], ids=["TERM", "KILL"])
    def test_the_deadline_ends_the_whole_group(self, transport: Transport, argv: list[str]) -> None:
        pids: list[str] = []
        begun = time.monotonic()
        with pytest.raises(DeadlineExceeded) as caught:
            transport.run(argv, timeout_s=1.5, on_line=lambda _, line: pids.extend(line.split()))
        assert time.monotonic() - begun < 12
        assert caught.value.node == transport.node.name
        assert "bash -c" in str(caught.value)
        assert "1.5 s" in str(caught.value)
        assert len(pids) == 2
        assert [pid for pid in pids if still_there(transport, pid)] == []

    def test_the_deadline_ends_a_command_that_does_not_read_its_input(self, transport: Transport) -> None:
        pids: list[str] = []
        with pytest.raises(DeadlineExceeded):
            transport.run(
                LONG, stdin=b"x" * 500_000, timeout_s=1.5, on_line=lambda _, line: pids.extend(line.split())
            )
        assert len(pids) == 2
        assert [pid for pid in pids if still_there(transport, pid)] == []

    def test_what_a_command_leaves_in_its_group_goes_with_it(self, transport: Transport) -> None:
        result = transport.run(["bash", "-c", "sleep 1000 & echo $!; exit 3"], timeout_s=20, check=False)
        assert result.status == 3
        assert not still_there(transport, result.stdout.strip())

    def test_a_daemon_stays_and_holds_nobody_up(self, transport: Transport) -> None:
        begun = time.monotonic()
        result = transport.run(["bash", "-c", "setsid sleep 1000 & echo $!; sleep 0.3"], timeout_s=20)
        assert time.monotonic() - begun < 6
        assert still_there(transport, result.stdout.strip())
        transport.run(["kill", result.stdout.strip()], timeout_s=20)

    @pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGINT, signal.SIGTERM], ids=lambda it: it.name)
    def test_the_command_ends_with_its_controller(
        self, transport: Transport, known_hosts: Path, how: signal.Signals
    ) -> None:
        controller = (
            "import json, sys\n"
            "from pathlib import Path\n"
            "from provision.cluster import Node\n"
            "from provision.transport import Connections\n"
            "fields = json.loads(sys.argv[1])\n"
            "node = Node(**{**fields, 'identity_files': tuple(fields['identity_files'])})\n"
            "with Connections(Path(sys.argv[2])) as connections:\n"
            "    connections.to(node).run(json.loads(sys.argv[3]), timeout_s=600,\n"
            "                             on_line=lambda _, line: print(line, flush=True))\n"
        )
        arguments = [json.dumps(asdict(transport.node)), str(known_hosts), json.dumps(LONG)]
        process = subprocess.Popen(
            [sys.executable, "-c", controller, *arguments],
            cwd=ROOT,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
        )
        assert process.stdout is not None
        pids = process.stdout.readline().decode().split()
        assert len(pids) == 2
        assert all(still_there(transport, pid) for pid in pids)
        begun = time.monotonic()
        process.send_signal(how)
        process.wait(15)
        assert time.monotonic() - begun < 10
        process.stdout.close()
        assert eventually(lambda: not any(still_there(transport, pid) for pid in pids))

    def test_an_error_in_a_callback_ends_the_command(self, transport: Transport) -> None:
        pids: list[str] = []

        def on_line(stream: str, line: str) -> None:
            pids.extend(line.split())
            raise RuntimeError("reader broke")

        with pytest.raises(RuntimeError, match="reader broke"):
            transport.run(LONG, timeout_s=60, on_line=on_line)
        assert eventually(lambda: not any(still_there(transport, pid) for pid in pids))

    # -- files ---------------------------------------------------------------------------------------------

    def test_put_and_get(self, transport: Transport, tmp_path: Path) -> None:
        data = os.urandom(2_500_000)
        source = tmp_path / "source"
        source.write_bytes(data)
        dest = '$HOME/rm-test/new folder/it\'s a "file"'
        transport.put(source, dest, mode=0o600, timeout_s=60)
        transport.put(source, dest, mode=0o640, timeout_s=60)
        transport.get(dest.replace("$HOME/", ""), tmp_path / "back", timeout_s=60)
        assert (tmp_path / "back").read_bytes() == data
        listing = transport.run(["ls", "-A", "rm-test/new folder"], timeout_s=20).stdout
        assert listing == 'it\'s a "file"\n'
        mode = transport.run(["stat", "-c", "%a", 'rm-test/new folder/it\'s a "file"'], timeout_s=20).stdout
        assert mode == "640\n"
        assert sorted(path.name for path in tmp_path.iterdir()) == ["back", "source"]
        transport.run(["rm", "-rf", "rm-test"], timeout_s=20)

    def test_put_an_empty_file(self, transport: Transport, tmp_path: Path) -> None:
        (tmp_path / "empty").touch()
        transport.put(tmp_path / "empty", "rm-test/empty", timeout_s=20)
        transport.get("rm-test/empty", tmp_path / "back", timeout_s=20)
        assert (tmp_path / "back").read_bytes() == b""
        transport.run(["rm", "-rf", "rm-test"], timeout_s=20)

    def test_put_that_cannot_be_done_leaves_nothing(self, transport: Transport, tmp_path: Path) -> None:
        (tmp_path / "file").write_text("new")
        transport.run(["mkdir", "-p", "rm-test/folder"], timeout_s=20)
        with pytest.raises(CommandFailed, match="is a directory"):
            transport.put(tmp_path / "file", "rm-test/folder", timeout_s=20)
        with pytest.raises(CommandFailed, match=r"put .*file.* /proc/nowhere/file"):
            transport.put(tmp_path / "file", "/proc/nowhere/file", timeout_s=20)
        with pytest.raises(UsageError, match="missing"):
            transport.put(tmp_path / "missing", "rm-test/file", timeout_s=20)
        assert transport.run(["find", "rm-test"], timeout_s=20).stdout == "rm-test\nrm-test/folder\n"
        transport.run(["rm", "-rf", "rm-test"], timeout_s=20)

    def test_get_of_a_missing_file_leaves_nothing(self, transport: Transport, tmp_path: Path) -> None:
        (tmp_path / "dest").write_text("old")
        with pytest.raises(CommandFailed, match="no such file"):
            transport.get("rm-test/nothing", tmp_path / "dest", timeout_s=20)
        assert [(path.name, path.read_text()) for path in tmp_path.iterdir()] == [("dest", "old")]

    def test_put_tree_sends_what_differs(self, transport: Transport, tmp_path: Path) -> None:
        source = tmp_path / "project"
        (source / "sub" / "empty").mkdir(parents=True)
        (source / ".git").mkdir()
        (source / ".git" / "config").write_text("not sent")
        (source / "train.py").write_text("print(1)\n")
        (source / "run me.sh").write_text("#!/bin/sh\necho ran\n")
        (source / "run me.sh").chmod(0o755)
        (source / "sub" / "-data é").write_bytes(os.urandom(100_000))
        (source / "sub" / "link").symlink_to("../train.py")
        os.link(source / "train.py", source / "zz-same-inode.py")

        def put(*, delete: bool = False) -> TreeChange:
            return transport.put_tree(source, "rm-test/p", exclude=(".git",), delete=delete, timeout_s=60)

        everything = (
            "run me.sh",
            "sub",
            "sub/-data é",
            "sub/empty",
            "sub/link",
            "train.py",
            "zz-same-inode.py",
        )
        assert put() == TreeChange(everything, (), 0)
        assert put() == TreeChange((), (), 7)
        look = transport.run(
            ["sh", "-c", '"./run me.sh"; readlink sub/link; ls -A'], cwd="rm-test/p", timeout_s=20
        )
        assert look.stdout == "ran\n../train.py\nrun me.sh\nsub\ntrain.py\nzz-same-inode.py\n"

        (source / "train.py").unlink()
        (source / "train.py").write_text("print(2)\n")
        (source / "run me.sh").chmod(0o644)
        (source / "sub" / "link").unlink()
        (source / "sub" / "link").write_text("a file now")
        assert put() == TreeChange(("run me.sh", "sub/link", "train.py"), (), 4)
        transport.get("rm-test/p/train.py", tmp_path / "back", timeout_s=20)
        assert (tmp_path / "back").read_text() == "print(2)\n"

        transport.run(
            [
                "sh",
                "-c",
                "mkdir -p .git/x sub/old; echo 1 >sub/old/f; echo 2 >stray; rm train.py; mkdir -p train.py/x",
            ],
            cwd="rm-test/p",
            timeout_s=20,
        )
        assert put() == TreeChange(("train.py",), (), 6)
        assert put(delete=True) == TreeChange((), ("stray", "sub/old", "sub/old/f"), 7)
        names = transport.run(["ls", "-A"], cwd="rm-test/p", timeout_s=20).stdout.split("\n")
        assert names == [".git", "run me.sh", "sub", "train.py", "zz-same-inode.py", ""]
        transport.run(["rm", "-rf", "rm-test"], timeout_s=20)

    def test_put_tree_refuses_to_delete_a_home(self, transport: Transport, tmp_path: Path) -> None:
        for dest in ("$HOME", "~/", "/", "."):
            with pytest.raises(UsageError, match="not deleted"):
                transport.put_tree(tmp_path, dest, delete=True, timeout_s=20)

    def test_a_file_in_the_place_of_the_tree(self, transport: Transport, tmp_path: Path) -> None:
        (tmp_path / "f").touch()
        transport.run(["sh", "-c", "mkdir -p rm-test; echo x >rm-test/p"], timeout_s=20)
        with pytest.raises(CommandFailed, match="no directory"):
            transport.put_tree(tmp_path, "rm-test/p", timeout_s=20)
        transport.run(["rm", "-rf", "rm-test"], timeout_s=20)
