"""The command line's edge: how `--hosts` and `--` reach a task, how errors become text and exit statuses."""

from __future__ import annotations

import functools
import importlib.util
import signal
import sys
from collections.abc import Callable, Iterable
from types import ModuleType
from typing import Any

from fabric.config import Config
from fabric.executor import Executor as FabricExecutor
from fabric.main import Fab
from invoke.collection import Collection
from invoke.exceptions import Exit
from invoke.executor import Executor as InvokeExecutor
from invoke.tasks import Call, Task
from rich.console import Console

from provision import paths
from provision.errors import RingmasterError

INTERRUPTED = 130


# The tasks that read `words_after_dashes`.
TAKE_WORDS = frozenset({"train"})


def words_after_dashes() -> list[str]:
    """The command line's words after `--`, as they were typed: Fabric itself joins them and loses their borders."""
    return sys.argv[sys.argv.index("--") + 1 :] if "--" in sys.argv else []


class OneRunExecutor(FabricExecutor):  # type: ignore[misc]
    """Hands `-H/--hosts` and `-S/--ssh-config` to the task as arguments.

    Fabric itself would run the task once per host, in turn; a cluster is one thing and needs one run. Text
    after `--` is for the tasks in TAKE_WORDS, word by word, where Fabric would run it as a command.
    """

    def expand_calls(self, calls: Iterable[Any], apply_hosts: bool = True) -> list[Any]:
        core = self.core[0].args
        given = {"hosts": core["hosts"].value, "ssh_config": core["ssh-config"].value}
        expanded = []
        for call in calls:
            clone = Call(call) if isinstance(call, Task) else call
            accepted = {argument.attr_name or argument.name for argument in clone.task.get_arguments()}
            kwargs = dict(clone.kwargs)
            for name, value in given.items():
                if not value:
                    continue
                if name not in accepted:
                    raise Exit(f"{clone.task.name} takes no --{name.replace('_', '-')}", code=2)
                if kwargs.get(name):
                    raise Exit(
                        f"--{name} is given twice: {value!r} and {kwargs[name]!r}; give it once", code=2
                    )
                kwargs[name] = value
            words = words_after_dashes()
            if words and clone.task.name not in TAKE_WORDS:
                raise Exit(f"{clone.task.name} takes no words after --, got {words!r}", code=2)
            clone.kwargs = kwargs
            expanded.append(clone)
        result: list[Any] = InvokeExecutor.expand_calls(self, expanded)
        return result


def task_body(body: Callable[..., int | None]) -> Callable[..., None]:
    """Turn a function that returns an exit status into a task body that ends the program with it.

    Expected errors are printed as one message without a traceback; Ctrl-C and SIGTERM end with 130.
    """

    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    @functools.wraps(body)
    def run(*args: Any, **kwargs: Any) -> None:
        console = Console(stderr=True, soft_wrap=True, highlight=False)
        signal.signal(signal.SIGTERM, interrupt)
        try:
            status = body(*args, **kwargs)
        except RingmasterError as error:
            console.print("error:", style="bold red", end=" ")
            console.print(str(error), markup=False)
            raise Exit(code=error.exit_status) from None
        except KeyboardInterrupt:
            console.print("interrupted", style="bold red")
            raise Exit(code=INTERRUPTED) from None
        except OSError as error:
            # A full disk, a read-only folder: this machine's own trouble, told without a traceback.
            console.print("error:", style="bold red", end=" ")
            console.print(f"{error.filename or 'this machine'}: {error.strerror or error}", markup=False)
            raise Exit(code=1) from None
        if status:
            raise Exit(code=status)

    return run


def load_tasks() -> ModuleType:
    """The tasks module: of the checkout, or of the installed package's own data."""
    path = paths.data_dir() / "tasks.py"
    spec = importlib.util.spec_from_file_location("ringmaster_tasks", path)
    if spec is None or spec.loader is None:
        raise ImportError(f"{path} cannot be loaded")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def main() -> None:
    """`ringmaster`: the same tasks as `fab`, from any directory."""
    program = Fab(
        name="ringmaster",
        binary="ringmaster",
        version="0.1.0",
        namespace=Collection.from_module(load_tasks()),
        executor_class=OneRunExecutor,
        config_class=Config,
    )
    program.run()
