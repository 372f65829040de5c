"""Read YAML as nodes with line numbers, so that error messages name file, line and key."""

from __future__ import annotations

import difflib
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any


class ProfileError(ValueError):
    """A profile is missing or has a mistake; the message names file, line and key."""


@dataclass(frozen=True)
class Node:
    """A YAML node with its line: a text, a list of items, or pairs of key and value."""

    line: int  # from 1
    text: str | None = None
    items: list[Node] | None = None
    pairs: list[tuple[Node, Node]] | None = None

    @property
    def found(self) -> str:
        """The description of the node in an error message."""
        if self.text is not None:
            return repr(self.text)
        return "a list" if self.items is not None else "a set of keys"

    def get(self, key: str) -> Node | None:
        """Return the value of a key; None if this is no mapping, or has no such key."""
        return next((value for name, value in self.pairs or () if name.text == key), None)


def read_text(path: Path, name: str = "") -> str:
    """Read a YAML file. name: for messages. Raises ProfileError."""
    try:
        return path.read_text(encoding="utf-8")
    except OSError as error:
        raise ProfileError(
            f"The site file {name or path} cannot be read: {error.strerror}. Expected the path of "
            "a YAML file. Check the path."
        ) from None
    except UnicodeDecodeError as error:
        raise ProfileError(
            f"The site file {name or path} is not UTF-8 text: {error.reason} at byte "
            f"{error.start}. Save it as UTF-8."
        ) from None


def compose(text: str, path: Path) -> Node:
    """Read the nodes of a YAML text. path: for messages. Raises ProfileError.

    Scalars stay texts: YAML would read 6:00:00 as a number, and `on` as a truth value.
    """
    try:
        import yaml
    except ImportError:
        raise ProfileError(
            "PyYAML is not installed, and site profiles are YAML files. Install it with "
            "`python -m pip install pyyaml`, or run scripts/setup_env.sh."
        ) from None
    try:
        root = yaml.compose(text, Loader=yaml.SafeLoader)
        if root is not None:
            return _converted(root)
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        where = f"{path}, line {mark.line + 1}" if mark else str(path)
        raise ProfileError(f"{where}: this is not YAML: {error.problem}. Correct it.") from None
    except (yaml.YAMLError, RecursionError) as error:
        raise ProfileError(f"{path}: this is not YAML: {error}. Correct the file.") from None
    raise ProfileError(f"{path}: the file is empty. Expected keys such as 'title' and 'scheduler'.")


def _converted(node: Any) -> Node:
    line = node.start_mark.line + 1
    if node.id == "sequence":
        return Node(line, items=[_converted(item) for item in node.value])
    if node.id == "mapping":
        pairs = [(_converted(key), _converted(value)) for key, value in node.value]
        return Node(line, pairs=pairs)
    return Node(line, text=str(node.value))


class Reader:
    """Convert YAML nodes to values, each with the function of its key."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def error(self, node: Node, key: str, found: str, expected: str) -> ProfileError:
        return ProfileError(
            f"{self.path}, line {node.line}: {key} is {found}. Expected: {expected}."
        )

    def items(self, node: Node, key: str) -> Iterator[tuple[str, Node, Node]]:
        """Yield (name, node of the name, node of the value) of a mapping."""
        if node.pairs is None:
            raise self.error(node, key, node.found, "keys with values, one 'key: value' per line")
        seen: set[str] = set()
        for name_node, value_node in node.pairs:
            name = name_node.text
            if name is None:
                raise self.error(name_node, f"a key of {key}", name_node.found, "a word")
            if name in seen:
                raise self.error(name_node, f"key {name!r}", "given twice", "each key once")
            seen.add(name)
            yield name, name_node, value_node

    def mapping(self, node: Node, key: str, readers: dict[str, Read]) -> dict[str, Any]:
        values: dict[str, Any] = {}
        for name, name_node, value_node in self.items(node, key):
            if name not in readers:
                raise ProfileError(
                    f"{self.path}, line {name_node.line}: the key {name!r} is unknown."
                    f"{suggestion(name, list(readers))} Expected one of: {', '.join(readers)}."
                )
            values[name] = readers[name](self, value_node, repr(name))
        return values

    def text(self, node: Node, key: str) -> str:
        if node.text is None:
            raise self.error(node, key, node.found, "one value")
        if not node.text.strip():
            raise self.error(node, key, "empty", "a value; remove the line if there is none")
        return node.text

    def one_of(self, node: Node, key: str, choices: tuple[str, ...]) -> str:
        value = self.text(node, key)
        if value not in choices:
            raise self.error(node, key, repr(value), f"one of {', '.join(choices)}")
        return value

    def matching(self, node: Node, key: str, pattern: str, expected: str) -> str:
        """Read a text that matches a regular expression. expected: the pattern in words."""
        value = self.text(node, key)
        if not re.fullmatch(pattern, value):
            raise self.error(node, key, repr(value), expected)
        return value

    def count(self, node: Node, key: str) -> int:
        return int(self.matching(node, key, "[1-9][0-9]{0,6}", "a whole number from 1 on"))

    def boolean(self, node: Node, key: str) -> bool:
        return self.one_of(node, key, ("true", "false")) == "true"

    def list_of(self, node: Node, key: str) -> list[Node]:
        if node.items is None:
            raise self.error(node, key, node.found, "a list, [a, b] or one '- value' per line")
        return node.items

    def texts(self, node: Node, key: str) -> tuple[str, ...]:
        return tuple(self.text(item, f"an entry of {key}") for item in self.list_of(node, key))


Read = Callable[[Any, Node, str], object]  # (reader, node, key for messages) -> value


def suggestion(word: str, known: list[str]) -> str:
    """Return " Did you mean ...?" if a known word is similar to this one, else ""."""
    near = difflib.get_close_matches(word, known, n=1, cutoff=0.5)
    return f" Did you mean {near[0]!r}?" if near else ""
