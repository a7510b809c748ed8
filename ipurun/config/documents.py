"""The YAML files of a config: read with the line of every key, and checked."""

from __future__ import annotations

import os
from codecs import BOM_UTF8
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Dict, Iterator, List, Mapping, Optional, Sequence, Set, Tuple

import yaml

from ipurun.config import keys
from ipurun.config.folders import builtin_folder
from ipurun.config.foreign import explain, translate
from ipurun.config.keys import ONE_CHOICE, several_choices
from ipurun.errors import Problem

__all__ = [
    "Document",
    "Entry",
    "NotText",
    "Unfit",
    "check_aliases",
    "check_document",
    "display",
    "load_file",
    "load_text",
    "read_document",
    "without_keys",
    "yaml_problem",
]

# Values that aliases may add to a file. Aliases of aliases multiply: ten lines can mean a billion values.
_MOST_ALIASED = 10_000
_MOST_LEVELS = 100  # of lists and mappings; OmegaConf reaches the end of Python's stack at a few hundred


@dataclass(frozen=True)
class Entry:
    """One key of a document, with its full path in the config."""

    key: str
    node: yaml.Node
    line: int

    @property
    def value(self) -> Any:
        """Value of the key in the file."""
        return _constructed(self.node)


@dataclass(frozen=True)
class Document:
    """One YAML file and the place of its keys in the config."""

    path: Path
    package: str
    entries: Tuple[Entry, ...]
    holds_keys: bool = True  # false where the file is a list or a single value
    choices: Tuple[Entry, ...] = ()  # of its defaults list: group and chosen node
    is_default: bool = False  # listed by the built-in primary config and not overridden by another choice

    @property
    def has_byte_order_mark(self) -> bool:
        """Whether the file begins with an invisible byte order mark, which hides its first comment."""
        with open(self.path, "rb") as file:
            return file.read(len(BOM_UTF8)) == BOM_UTF8

    def where(self, line: Optional[int] = None) -> str:
        """Return the file as a user knows it, with a line."""
        return display(self.path) + (f":{line}" if line else "")

    def line_of(self, key: str) -> Optional[int]:
        """Return the line that sets a key."""
        return next((entry.line for entry in reversed(self.entries) if entry.key == key), None)


class NotText(yaml.YAMLError):
    """A file that is not UTF-8 text."""

    def __init__(self, error: UnicodeDecodeError) -> None:
        super().__init__(f"not UTF-8 text: {error.reason} at byte {error.start}")


class Unfit(yaml.MarkedYAMLError):
    """YAML that no config can be made of, although it is well-formed."""

    def __init__(self, what: str, fix: str, mark: Optional[yaml.Mark] = None) -> None:
        super().__init__(problem=what, problem_mark=mark)
        self.fix = fix


def read_document(path: Path, package: str) -> Document:
    """Read a YAML file with the line of every key.

    Raises:
        yaml.YAMLError: If it is not YAML, or aliases make it too large; see `yaml_problem`.
    """
    root = _root(_text_of(path))
    prefix = package if package not in ("", "_global_") else ""
    entries = list(_entries(root, prefix)) if isinstance(root, yaml.MappingNode) else []
    defaults = f"{prefix}.defaults" if prefix else "defaults"  # Hydra's, wherever the file's keys go
    own = tuple(entry for entry in entries if not f"{entry.key}.".startswith(f"{defaults}."))
    holds_keys = root is None or isinstance(root, yaml.MappingNode)
    return Document(path, package, own, holds_keys, tuple(_choices(entries)))


def load_file(path: Path) -> Any:
    """Load a YAML file as an OmegaConf config, None if it is empty.

    Raises:
        yaml.YAMLError: As for `read_document`.
    """
    from omegaconf import OmegaConf

    _root(_text_of(path))
    return OmegaConf.load(path)


def load_text(text: str) -> Any:
    """Return the plain data that YAML text describes.

    Raises:
        yaml.YAMLError: As for `read_document`.
    """
    root = _root(text)
    return None if root is None else _constructed(root)


def check_aliases(path: Path) -> None:
    """Refuse a file whose aliases contain themselves or add more than `_MOST_ALIASED` values.

    Raises:
        yaml.YAMLError: As for `read_document`.
    """
    text = _text_of(path)
    if "*" in text and "&" in text:
        _root(text)


def _text_of(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise NotText(error) from error


def _root(text: str) -> Optional[yaml.Node]:
    try:
        root: Optional[yaml.Node] = yaml.compose(text, Loader=yaml.SafeLoader)
        sizes: Dict[int, int] = {}
        if root is not None and _expanded_size(root, sizes, set()) - len(sizes) > _MOST_ALIASED:
            what = f"aliases (*name) add more than {_MOST_ALIASED:,} values"
            raise Unfit(what, "write the values out, or remove the aliases")
    except RecursionError:
        raise _too_deep() from None
    return root


def _too_deep(mark: Optional[yaml.Mark] = None) -> Unfit:
    return Unfit("values are nested too deeply", f"use at most {_MOST_LEVELS} levels of lists and mappings", mark)


def _expanded_size(node: yaml.Node, sizes: Dict[int, int], open_nodes: Set[int]) -> int:
    """Return the number of values in a node with every alias replaced by a copy; `sizes` keeps those of each node."""
    if id(node) in open_nodes:
        what = "an anchor (&name) contains an alias (*name) of itself"
        raise Unfit(what, "remove the alias, or move it out of the value that it names", node.start_mark)
    if len(open_nodes) > _MOST_LEVELS:
        raise _too_deep(node.start_mark)
    if id(node) not in sizes:
        open_nodes.add(id(node))
        inner: List[yaml.Node] = []
        if isinstance(node, yaml.MappingNode):
            inner = [part for pair in node.value for part in pair]
        elif isinstance(node, yaml.SequenceNode):
            inner = node.value
        sizes[id(node)] = 1 + sum(_expanded_size(part, sizes, open_nodes) for part in inner)
        open_nodes.remove(id(node))
    return sizes[id(node)]


def _choices(entries: Sequence[Entry]) -> Iterator[Entry]:
    defaults = next((entry.node for entry in entries if entry.key.split(".")[-1] == "defaults"), None)
    for item in defaults.value if isinstance(defaults, yaml.SequenceNode) else ():
        for key_node, value_node in item.value if isinstance(item, yaml.MappingNode) else ():
            group = str(key_node.value).replace("override ", "").strip().lstrip("/")
            yield Entry(group, value_node, key_node.start_mark.line + 1)


def _entries(node: yaml.MappingNode, prefix: str) -> Iterator[Entry]:
    for key_node, value_node in node.value:
        key = f"{prefix}.{key_node.value}" if prefix else str(key_node.value)
        yield Entry(key, value_node, key_node.start_mark.line + 1)
        if isinstance(value_node, yaml.MappingNode):
            yield from _entries(value_node, key)


def yaml_problem(path: Path, error: yaml.YAMLError) -> Problem:
    """Describe a YAML syntax error with its file, line and column."""
    mark = getattr(error, "problem_mark", None)
    where = display(path)
    seen = ""
    if mark is not None:
        where += f":{mark.line + 1}:{mark.column + 1}"
        lines: List[str] = path.read_text(encoding="utf-8", errors="replace").splitlines()
        if mark.line < len(lines):
            seen = lines[mark.line].strip()[:100]
    reason = getattr(error, "problem", None) or str(error).splitlines()[0]
    fix = "check indentation, colons and quotes there"
    if isinstance(error, NotText):
        fix = "save it as UTF-8 text, or name another file"
    if isinstance(error, Unfit):
        return Problem(f"the file cannot be used: {reason}", where, seen=seen, fix=error.fix)
    return Problem(f"malformed YAML: {reason}", where, seen=seen, fix=fix)


def display(path: Path) -> str:
    """Return a path as a user knows it: relative, or below ``ipurun/conf``."""
    try:
        return "ipurun/conf/" + path.resolve().relative_to(builtin_folder().resolve()).as_posix()
    except ValueError:
        relative = os.path.relpath(path)
        return relative if not relative.startswith("..") else str(path)


def without_keys(document: Document) -> Problem:
    """Describe a file that is a list or a single value."""
    what = "a config file must contain keys, such as `epochs: 4`"
    fix = "write keys and values: `epochs: 4`, one in each line"
    return Problem(what, document.where(1), seen="a list or a single value", fix=fix)


def check_document(document: Document, groups: Mapping[str, Sequence[str]]) -> List[Problem]:
    """Check one file for unknown keys and values of a wrong type."""
    if document.package == "recipe" and document.has_byte_order_mark:
        return [
            Problem(
                "a byte order mark hides the first line of a recipe",
                document.where(1),
                seen="the bytes EF BB BF at the beginning of the file, which editors do not show",
                fix="save it as UTF-8 without a byte order mark",
            )
        ]
    if document.package == "recipe":
        return [
            Problem(
                "a recipe must declare the package `_global_` in its first line",
                document.where(1),
                fix="make `# @package _global_` the first line of the file",
            )
        ]
    if not document.holds_keys:
        return [without_keys(document)]
    problems = [
        several_choices(entry.key, entry.value, document.where(entry.line))
        for entry in document.choices
        if entry.key in ONE_CHOICE and isinstance(entry.node, yaml.SequenceNode) and len(entry.node.value) > 1
    ]
    unknown: List[str] = []
    for entry in document.entries:
        if entry.key.split(".")[0] == "hydra" or any(entry.key.startswith(above + ".") for above in unknown):
            continue
        if not keys.is_known(entry.key):
            value = entry.value
            if _is_section_of_another_tool(entry.key, value):
                continue  # what is in it is reported key by key
            unknown.append(entry.key)
            suggestion = keys.suggest(entry.key, value)
            known = ", ".join(suggestion.keys) if suggestion.keys else "run `ipurun ls keys` to see every key"
            fix = _advice(suggestion, value, groups) or explain(entry.key)
            if entry.key in groups:
                known, fix = "", _choose(entry.key, "NAME")
            problems.append(
                Problem(f"unknown key `{entry.key}`", document.where(entry.line), known=known, fix=fix, key=entry.key)
            )
            continue
        wrong = keys.type_problem(entry.key, entry.value)
        if wrong is not None:
            problems.append(
                Problem(f"`{entry.key}` takes {wrong[0]}", document.where(entry.line), seen=wrong[1], key=entry.key)
            )
    return problems


def _advice(suggestion: keys.Suggestion, value: Any, groups: Mapping[str, Sequence[str]]) -> str:
    suggested = suggestion.value
    if not suggestion.keys or (value is not None and suggested is None):
        return ""
    key = suggestion.keys[0]
    if key in groups and isinstance(suggested, str):
        return _choose(key, suggested)
    if suggested is None or isinstance(suggested, (dict, list)):
        return f"write {key}"
    text = str(suggested).lower() if isinstance(suggested, bool) else str(suggested)
    *nodes, last = key.split(".")
    return "write " + "".join(f"{node}: {{" for node in nodes) + f"{last}: {text}" + "}" * len(nodes)


def _is_section_of_another_tool(key: str, value: Any) -> bool:
    """Return whether a mapping is one such as Lightning's ``trainer``, with keys that ipurun has by other names."""
    if not isinstance(value, dict) or keys.suggest(key, value).keys:
        return False
    return any(translate(f"{key}.{name}") is not None or explain(str(name)) for name in value)


def _choose(group: str, name: str) -> str:
    return f"choose it in the defaults list: - override /{group}: {name}"


def _constructed(node: yaml.Node) -> Any:
    loader = yaml.SafeLoader("")
    try:
        return loader.construct_document(node)
    finally:
        loader.dispose()
