"""Find secrets in configs, and keep their values out of everything that is stored or shown.

A key is secret by its name, a value also by where it comes from: ``${oc.env:API_TOKEN}``. What is stored is the
interpolation, with which the run can be resumed, or `MASK` where the value itself was typed or written.
"""

from __future__ import annotations

import re
from pathlib import PurePosixPath
from typing import Any, Dict, Iterable, Iterator, List, Mapping, Tuple

from ipurun.errors import Problem

__all__ = [
    "MASK",
    "escaped",
    "hidden_values",
    "is_secret_file",
    "is_secret_name",
    "mask_text",
    "mask_word",
    "masked_keys",
    "values_of",
    "with_hidden",
]

MASK = "***"
_SHORTEST = 6  # of a value that is searched for in other text; a shorter one would be found everywhere

_WORDS = (
    "passwords? passwds? passphrases? passcodes? pwd secrets? credentials? authorization bearer "
    "(?:api|access|secret|private|account|auth|signing|encryption|ssh|license|wandb|hf)[_-]?keys? token"
)
# As the last word of a name: `wandb_token` but not `token_size`, and not the tokens of a language model.
_SECRET_NAME = re.compile(rf"(?:^|[_-])(?:{'|'.join(_WORDS.split())})$", re.IGNORECASE)
_OF_LANGUAGE = re.compile(
    r"(?:^|[_-])(?:pad|cls|bos|eos|sep|unk|mask|start|end|begin|stop|class|dist|image|special|next|text|word|sub|"
    r"separator|padding|decoder|register|per|each)[_-]?token$",
    re.IGNORECASE,
)
_CAMEL = re.compile(r"(?<=[a-z0-9])(?=[A-Z])")
_INTERPOLATION = re.compile(r"\$\{")
_ENVIRONMENT = re.compile(r"\$\{\s*oc\.env\s*:\s*([^,{}]+?)\s*(?:,([^{}]*))?\}")
_HARMLESS_DEFAULTS = ("null", "''", '""', "")
_VALUE = r"\"(?:[^\"\\]|\\.)*\"|'(?:[^'\\]|\\.)*'|(?:\$\{[^}]*\}|[^,{}\[\]\s])+"
_PAIR = re.compile(rf"(?P<name>[\w.-]+)(?P<between>['\"]?\s*[:=]\s*)(?P<value>{_VALUE})")

_SECRET_FILE = re.compile(
    r"\.env|\.env\..*|.*\.env|\.envrc|\.netrc|_netrc|\.pgpass|\.npmrc|\.pypirc|\.htpasswd|\.dockercfg|"
    r".*\.(?:pem|key|p12|pfx|pkcs12|jks|keystore|kdbx|gpg|asc|token)|id_(?:rsa|dsa|ecdsa|ed25519)(?:\..*)?",
    re.IGNORECASE,
)
_SECRET_STEM = re.compile(
    r"(?:^|[._-])(?:secrets?|credentials?|passwords?|passwd|tokens?|api[_-]?keys?)(?:$|[._-])", re.IGNORECASE
)
_CODE = (".py", ".pyi", ".c", ".cc", ".cpp", ".h", ".hpp", ".md", ".rst", ".ipynb", ".sh", ".js", ".ts")


def hidden_values(unresolved: Any, resolved: Any) -> Dict[str, str]:
    """Return the keys whose values must not be stored, with what to store in their place.

    Args:
        unresolved: A config as plain containers, with its interpolations.
        resolved: The same without.
    """
    written = dict(_leaves(unresolved))
    values = {key: value for key, value in _leaves(resolved) if _can_be_secret(value)}
    secret = {key for key in values if _is_secret_key(key) or _names_secret(written.get(key))}
    known = {str(values[key]) for key in secret}
    # Other keys may repeat a secret: `${logger.mine.token}`, or an URL with it inside.
    for key, value in values.items():
        text = str(value)
        if _has_interpolation(written.get(key)) and (text in known or any(_is_long(k) and k in text for k in known)):
            secret.add(key)
    return {key: _to_store(written.get(key)) for key in values if key in secret}


def with_hidden(tree: Any, hidden: Mapping[str, Any], path: str = "") -> Any:
    """Return a copy of a config with other values at some keys, such as those of `hidden_values`."""
    if path in hidden:
        return hidden[path]
    if isinstance(tree, dict):
        return {key: with_hidden(inner, hidden, _join(path, key)) for key, inner in tree.items()}
    if isinstance(tree, (list, tuple)):
        return [with_hidden(inner, hidden, _join(path, place)) for place, inner in enumerate(tree)]
    return tree


def escaped(tree: Any) -> Any:
    """Return a copy of a stored config whose interpolations are plain text for OmegaConf."""
    if isinstance(tree, dict):
        return {key: escaped(inner) for key, inner in tree.items()}
    if isinstance(tree, (list, tuple)):
        return [escaped(inner) for inner in tree]
    return tree.replace("${", "\\${") if isinstance(tree, str) else tree


def values_of(resolved: Any, hidden: Iterable[str]) -> Dict[str, Any]:
    """Return the values of the hidden keys."""
    values = dict(_leaves(resolved))
    return {key: values[key] for key in hidden if key in values}


def masked_keys(resolved: Any, origin: Any) -> List[Problem]:
    """Return a problem for each key whose value was masked when a run was stored and is needed again.

    Args:
        resolved: The config as plain containers.
        origin: Returns where a key was set.
    """
    return [
        Problem(
            f"`{key}` is a secret that was not stored with the run",
            where=origin(key),
            seen=f"{MASK}, which takes its place in files and logs",
            fix=f"{key}=VALUE gives it again; {key}='${{oc.env:NAME}}' reads it from the environment at every start",
            key=key,
        )
        for key, value in _leaves(resolved)
        if value == MASK and _is_secret_key(key)
    ]


def mask_word(word: str) -> str:
    """Return an override without the secrets in it; interpolations stay."""
    key, equals, value = word.partition("=")
    if equals and _is_secret_key(key.lstrip("+~")):
        return f"{key}={_to_store(value)}" if value not in ("", "null", "''", '""') else word
    return _PAIR.sub(_mask_pair, word)


def mask_text(text: str, values: Iterable[Any]) -> str:
    """Return text without the values of secrets, wherever they occur in it."""
    for value in sorted({str(value) for value in values}, key=len, reverse=True):
        if _is_long(value):
            text = text.replace(value, MASK)
    return text


def is_secret_file(path: str) -> bool:
    """Return whether a file looks like one with secrets, by its name."""
    name = PurePosixPath(path).name
    if _SECRET_FILE.fullmatch(name):
        return True
    return bool(_SECRET_STEM.search(name)) and not name.lower().endswith(_CODE)


def _mask_pair(match: Any) -> str:
    if not _is_secret_key(match["name"]) or match["value"] == "null":
        return str(match[0])
    return f"{match['name']}{match['between']}{_to_store(match['value'])}"


def _leaves(value: Any, path: str = "") -> Iterator[Tuple[str, Any]]:
    if isinstance(value, dict):
        for key, inner in value.items():
            yield from _leaves(inner, _join(path, key))
    elif isinstance(value, (list, tuple)):
        for place, inner in enumerate(value):
            yield from _leaves(inner, _join(path, place))
    else:
        yield path, value


def _join(path: str, key: Any) -> str:
    return f"{path}.{key}" if path else str(key)


def _is_secret_key(key: str) -> bool:
    return any(is_secret_name(part) for part in key.split("."))


def is_secret_name(name: str) -> bool:
    """Return whether the name of a key or a variable says that its value is secret."""
    words = _CAMEL.sub("_", name)
    return bool(_SECRET_NAME.search(words)) and not _OF_LANGUAGE.search(words)


def _can_be_secret(value: Any) -> bool:
    return isinstance(value, (str, bytes, int, float)) and not isinstance(value, bool) and value != ""


def _is_long(value: str) -> bool:
    return len(value) >= _SHORTEST and value != MASK


def _has_interpolation(written: Any) -> bool:
    return isinstance(written, str) and bool(_INTERPOLATION.search(written))


def _names_secret(written: Any) -> bool:
    """Return whether a value comes from a variable of the environment that looks secret."""
    return isinstance(written, str) and any(is_secret_name(name) for name, _ in _ENVIRONMENT.findall(written))


def _to_store(written: Any) -> str:
    """Return an interpolation, without a default that would be a secret itself, or the mask of a literal value."""
    if not _has_interpolation(written):
        return MASK
    return _ENVIRONMENT.sub(_without_default, str(written))


def _without_default(match: Any) -> str:
    if match[2] is None or match[2].strip() in _HARMLESS_DEFAULTS:
        return str(match[0])
    return f"${{oc.env:{match[1]}}}"
