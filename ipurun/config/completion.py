"""Shell completion: commands, options of groups, keys and their choices, without loading Hydra where that is possible.

What open mappings such as `optimizer` hold is read from the files that a config would be composed of. Hydra answers
where those choose further files, and shows values as they are.
"""

from __future__ import annotations

import re
from typing import Any, Dict, Iterable, List, Optional, Sequence, Tuple

from ipurun.config import folders
from ipurun.config.schema import Key, RunConfig, walk_keys

__all__ = ["after_program", "answer"]

_COMPOSING = ("train", "plan", "validate", "compile", "bench", "eval", "predict", "selftest")
_HYDRA = "hydra"  # Hydra's own group and section
_SEPARATORS = {"bash": " ", "zsh": " ", "fish": "\n"}
_PATHS = (".", "/", "\\")  # a value that begins so is the path of a file
_OWN_FLAGS = ("-m", "--multirun", "--quiet", "--json", "--debug")  # they do not change what can follow


def answer(argv: Sequence[str], line: str, commands: Iterable[str]) -> Optional[str]:
    """Return the answer to a query of a shell, or None where Hydra has to answer it.

    Args:
        argv: The arguments after ``-sc``: ``query=bash``.
        line: The command line so far.
        commands: Names of ipurun's commands.
    """
    shell = next((word.partition("=")[2] for word in argv if word.startswith("query=")), "")
    if shell not in _SEPARATORS:
        return None
    command, typed = after_program(line)
    found: Optional[List[str]] = []
    if not typed:
        found = [name for name in commands if name.startswith(command)]
    elif command in _COMPOSING:
        found = _answers(typed)
    return None if found is None else _SEPARATORS[shell].join(found)


def after_program(line: str) -> Tuple[str, str]:
    """Divide what follows ``ipurun`` on a command line: the command, and the rest with the space before it."""
    parts = re.match(r"\s*\S+\s+(\S*)(.*)", line, flags=re.DOTALL)
    return (parts.group(1), parts.group(2)) if parts else ("", "")


def _answers(typed: str) -> Optional[List[str]]:
    """Return the completions of the last word, or None where only Hydra knows them."""
    *before, word = typed.split() if typed[-1:].strip() else [*typed.split(), ""]
    if any(flag.startswith("-") and flag not in _OWN_FLAGS for flag in [*before, word]):
        return None
    sign, name = (word[0], word[1:]) if word.startswith(("+", "~")) else ("", word)
    if name.startswith(_HYDRA[: max(len(name), 1)]):
        return None
    key, equals, value = name.partition("=")
    if value.startswith(_PATHS):
        return None
    groups = folders.groups()
    if equals and key in groups:
        return sorted({f"{sign}{key}={option}" for option in groups[key] if option.startswith(value)})
    keys = {known.path: known for known in walk_keys(RunConfig)}
    if equals:
        values = _values(keys.get(key)) if not sign else []
        return (
            None if values is None and not value else [f"{key}={one}" for one in values or [] if one.startswith(value)]
        )
    inside = _keys_inside(keys, name, before, groups) if not sign else []
    return None if inside is None else sorted({*(sign + group for group in _groups(groups, name, sign)), *inside})


def _values(key: Optional[Key]) -> Optional[List[str]]:
    """Return the values between which a key chooses, or None if it takes others."""
    if key is not None and key.choices:
        return key.type_name.split(" | ")
    return ["true", "false"] if key is not None and key.type_name == "bool" else None


def _groups(groups: Dict[str, List[str]], name: str, sign: str) -> List[str]:
    """Return the groups that a word begins: ``optimizer=``, ``parts/`` with only groups inside."""
    depth = name.count("/") + 1
    found = {"/".join(group.split("/")[:depth]) for group in groups if group.startswith(name)}
    found |= {_HYDRA} if not name else set()
    return [group + _group_ending(groups, group, sign) for group in found]


def _group_ending(groups: Dict[str, List[str]], group: str, sign: str) -> str:
    has_groups = group == _HYDRA or any(other.startswith(group + "/") for other in groups)
    if has_groups:
        return "" if group in groups or group == _HYDRA else "/"
    return "" if sign == "~" else "="


def _keys_inside(
    keys: Dict[str, Key], word: str, before: Sequence[str], groups: Dict[str, List[str]]
) -> Optional[List[str]]:
    """Return the keys and sections one level down that a word begins, or None where only Hydra can say."""
    above = word.rpartition(".")[0]
    section = above + "." if above else ""
    has_schema = not above or any(path.startswith(section) for path in keys)
    known = {path: _is_container(key) for path, key in keys.items()} if has_schema else _keys_of_files(before, groups)
    if known is None:
        return None
    found = {f"{_HYDRA}."} if not word else set()
    for path, is_container in known.items():
        if path.startswith(word) and path.startswith(section):
            first, deeper, _ = path[len(section) :].partition(".")
            found.add(f"{section}{first}{'.' if deeper or is_container else '='}")
    return sorted(found)


def _is_container(key: Key) -> bool:
    return isinstance(key.default, (dict, list)) or key.type_name.startswith(("list", "mapping"))


def _keys_of_files(before: Sequence[str], groups: Dict[str, List[str]]) -> Optional[Dict[str, bool]]:
    """Return the keys in the files that some words choose, and whether each is a container.

    None if this takes more than to read files: words add or remove keys, a file chooses further ones or cannot be read.
    """
    import yaml

    from ipurun.config import catalog
    from ipurun.config.documents import read_document
    from ipurun.errors import ConfigError

    typed = dict(word.lstrip("+").partition("=")[::2] for word in before if "=" in word)
    if any(word.startswith(("+", "~")) and word.lstrip("+~").partition("=")[0] not in groups for word in before):
        return None
    try:
        recipe = read_document(catalog.find(typed["recipe"]).path, "") if "recipe" in typed else None
        chosen = {}
        for document in (read_document(folders.builtin_folder() / "train.yaml", ""), recipe):
            chosen.update({entry.key: entry.node.value for entry in (document.choices if document else ())})
        chosen.update({group: option for group, option in typed.items() if group in groups and group != "recipe"})
        found = {}
        for group, option in chosen.items():
            if option == "null":
                continue
            path = catalog.find(f"{group}/{option}").path
            is_global = "@package _global_" in path.read_text(encoding="utf-8").partition("\n")[0]
            document = read_document(path, "" if is_global else group)
            if document.choices:
                return None
            found.update({entry.key: _holds_values(entry.node) for entry in document.entries})
    except (ConfigError, OSError, ValueError, yaml.YAMLError):
        return None
    # A run drops what a recipe gives a group that the command line chooses.
    own = [entry for entry in (recipe.entries if recipe else ()) if entry.key.split(".")[0] not in typed]
    return {**found, **{entry.key: _holds_values(entry.node) for entry in own}}


def _holds_values(node: Any) -> bool:
    return isinstance(node.value, list)
