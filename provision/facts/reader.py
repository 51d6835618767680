"""Takes values of the expected kind out of a JSON object."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

from provision.errors import NodeError

T = TypeVar("T")


class Reader:
    """One JSON object. `null` and `false` are None or empty; a missing key and another kind are NodeErrors."""

    def __init__(self, node: str, where: str, value: object, unknown: object = None) -> None:
        self._node = node
        self._where = where
        self._unknown = unknown if isinstance(unknown, dict) else {}
        if not isinstance(value, dict):
            raise self._error("", value, "an object")
        self._value: dict[str, Any] = value

    def names(self) -> Iterator[str]:
        return iter(self._value)

    def text(self, key: str) -> str | None:
        return self._get(key, str, "text")

    def boolean(self, key: str) -> bool | None:
        value = self._present(key)
        if value is None or isinstance(value, bool):
            return value
        raise self._error(key, value, "true or false")

    def integer(self, key: str) -> int | None:
        return self._get(key, int, "an integer")

    def number(self, key: str) -> float | None:
        value = self._present(key)
        return self._get(key, float if isinstance(value, float) else int, "a number")

    def mapping(self, key: str) -> dict[str, Any] | None:
        return self._get(key, dict, "an object")

    def texts(self, key: str) -> tuple[str, ...] | None:
        values = self._list(key)
        for value in values or ():
            if not isinstance(value, str):
                raise self._error(key, value, "a list of texts")
        return None if values is None else tuple(values)

    def tools(self, key: str) -> dict[str, str | bool | None]:
        tools = self.mapping(key) or {}
        for name, value in tools.items():
            if not (value is None or value is False or isinstance(value, str)):
                raise self._error(f"{key}.{name}", value, "a version text or false")
        return tools

    def sub(self, key: str) -> Reader:
        """The object at `key`; an empty one where the node could not tell."""
        value = self._present(key)
        empty = value is None or value is False
        return Reader(self._node, f"{self._where}{key}.", _Nulls() if empty else value, self._unknown)

    def optional(self, key: str, make: Callable[[Reader], T]) -> T | None:
        value = self._present(key)
        return None if value is None or value is False else make(self.sub(key))

    def items(self, key: str, make: Callable[[Reader], T]) -> tuple[T, ...] | None:
        values = self._list(key)
        if values is None:
            return None
        return tuple(
            make(Reader(self._node, f"{self._where}{key}[{index}].", value, self._unknown))
            for index, value in enumerate(values)
        )

    def must(self, key: str, get: Callable[[str], T | None]) -> T:
        """A value the rest cannot do without."""
        value = get(key)
        if value is None:
            why = self._unknown.get(f"{self._where}{key}", "no reason given")
            raise NodeError(self._node, f"probe.sh could not find out `{self._where}{key}`: {why}")
        return value

    def _list(self, key: str) -> list[Any] | None:
        value = self._present(key)
        if value is False:
            return []
        if value is None or isinstance(value, list):
            return value
        raise self._error(key, value, "a list")

    def _get(self, key: str, kind: type[T], expected: str) -> T | None:
        value = self._present(key)
        if value is None or value is False:
            return None
        if isinstance(value, kind) and not isinstance(value, bool):
            return value
        raise self._error(key, value, expected)

    def _present(self, key: str) -> Any:
        if key not in self._value:
            raise NodeError(
                self._node,
                f"probe.sh's answer has no `{self._where}{key}`",
                remedy="use the probe.sh of this installation",
            )
        return self._value[key]

    def _error(self, key: str, value: object, expected: str) -> NodeError:
        where = f"{self._where}{key}".rstrip(".")
        shown = json.dumps(value)[:80]
        return NodeError(self._node, f"probe.sh: `{where or 'the answer'}` is {shown}, expected {expected}")


class _Nulls(dict[str, Any]):
    """An object whose every key is null."""

    def __contains__(self, key: object) -> bool:
        return True

    def __missing__(self, key: str) -> None:
        return None
