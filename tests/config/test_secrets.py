"""Secrets are found by name and origin, and their values reach neither files nor screens."""

from __future__ import annotations

import pytest

from ipurun.config.compose import one, to_yaml
from ipurun.config.secrets import hidden_values, is_secret_file, mask_text, mask_word
from ipurun.errors import ConfigError


@pytest.mark.parametrize(
    "name",
    [
        "token",
        "api_key",
        "apikey",
        "api-key",
        "hf_token",
        "wandb_api_key",
        "password",
        "db_passwd",
        "client_secret",
        "secrets",
        "apiKey",
        "accessToken",
        "aws_secret_access_key",
        "private_key",
        "ssh_key",
        "credentials",
        "passphrase",
        "authorization",
        "PASSWORD",
    ],
)
def test_names_that_are_secret(name: str) -> None:
    assert hidden_values({"logger": {name: "x"}}, {"logger": {name: "x"}}) == {f"logger.{name}": "***"}


@pytest.mark.parametrize(
    "name",
    [
        "tokenizer",
        "num_tokens",
        "max_tokens",
        "token_size",
        "token_type_vocab_size",
        "pad_token",
        "eos_token",
        "mask_token",
        "cls_token",
        "key",
        "keys",
        "monkey",
        "author",
        "compass_word",
        "password_length",
        "secretary",
        "special_tokens",
        "class_token",
        "key_dim",
    ],
)
def test_names_that_are_not(name: str) -> None:
    assert hidden_values({name: "x"}, {name: "x"}) == {}


def test_a_secret_is_found_in_lists_and_below_a_secret_key_but_not_where_it_has_no_value() -> None:
    tree = {
        "a": [{"token": "x"}],
        "credentials": {"user": "me", "pin": 1234},
        "password": None,
        "secret": "",
        "token": True,
    }
    assert set(hidden_values(tree, tree)) == {"a.0.token", "credentials.user", "credentials.pin"}


@pytest.mark.parametrize(
    ("written", "stored"),
    [
        ("${oc.env:X}", "${oc.env:X}"),
        ("${oc.env:X,null}", "${oc.env:X,null}"),
        ("${oc.env:X, abc123}", "${oc.env:X}"),
        ("Bearer ${oc.env:X,'abc 123'}", "Bearer ${oc.env:X}"),
        ("${other.key}", "${other.key}"),
        ("abc123", "***"),
    ],
)
def test_the_interpolation_is_kept_without_a_default_that_is_a_secret_itself(written: str, stored: str) -> None:
    assert hidden_values({"token": written}, {"token": "value"}) == {"token": stored}


def test_values_from_secret_variables_and_copies_of_secrets_are_secret_too() -> None:
    written = {"root": "${oc.env:MY_TOKEN}", "url": "http://h/${a.token}", "a": {"token": "topsecret"}, "b": "${root}"}
    resolved = {"root": "topsecret", "url": "http://h/topsecret", "a": {"token": "topsecret"}, "b": "topsecret"}
    assert set(hidden_values(written, resolved)) == {"root", "url", "a.token", "b"}


@pytest.mark.parametrize(
    ("word", "shown"),
    [
        ("+logger.x.token=abc", "+logger.x.token=***"),
        ("logger.x.token='${oc.env:T}'", "logger.x.token='${oc.env:T}'"),
        ("logger.x.token=null", "logger.x.token=null"),
        ("+logger.x={token:abc,_target_:m.L}", "+logger.x={token:***,_target_:m.L}"),
        ("+logger.x={a:{api_key:'a, b'},n:1}", "+logger.x={a:{api_key:***},n:1}"),
        ('logger={x:{"password": "p}q"}}', 'logger={x:{"password": ***}}'),
        ("+logger.x={token:${oc.env:T,abc}}", "+logger.x={token:${oc.env:T}}"),
        ("data.tokenizer=abc", "data.tokenizer=abc"),
        ("credentials.user=me", "credentials.user=***"),
    ],
)
def test_words_of_a_command_line_are_masked(word: str, shown: str) -> None:
    assert mask_word(word) == shown


def test_text_is_masked_where_a_value_is_long_enough_to_be_recognised() -> None:
    assert mask_text("a topsecret-2 of topsecret, 1", ["topsecret", "topsecret-2", "1", 123456]) == "a *** of ***, 1"


@pytest.mark.parametrize(
    "path", [".env", ".env.local", "a/prod.env", "b/.netrc", "key.pem", "id_rsa", "secrets.yaml", "a/credentials"]
)
def test_files_that_look_secret(path: str) -> None:
    assert is_secret_file(path)


@pytest.mark.parametrize(
    "path", ["env.py", "environment.yml", "tokenizer.json", "secrets.py", "keys.txt", "monkey.yaml", ".gitignore"]
)
def test_files_that_do_not(path: str) -> None:
    assert not is_secret_file(path)


def test_a_composed_point_shows_no_secret_and_still_has_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MY_TOKEN", "topsecret")
    point = one(["+recipe=mnist", "+data.token=hunter22", "+data.api_key=${oc.env:MY_TOKEN}"])
    assert point.config.data["token"] == "hunter22" and point.config.data["api_key"] == "topsecret"
    text = to_yaml(point.config, point.hidden)
    assert "token: '***'" in text and "api_key: ${oc.env:MY_TOKEN}" in text
    shown = f"{text}{point.overrides}{point.changed}{point.given}{point.swept}{to_yaml(point.config)}"
    assert "hunter22" not in shown and "topsecret" not in shown
    assert point.without_secrets("x hunter22 topsecret") == "x *** ***"


def test_a_mask_is_not_a_value() -> None:
    with pytest.raises(ConfigError) as caught:
        one(["+recipe=mnist", "+data.token=***"])
    (problem,) = caught.value.problems
    assert problem.key == "data.token" and "data.token=VALUE" in problem.fix and problem.where


def test_a_missing_variable_is_named_with_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("NOT_SET", raising=False)
    with pytest.raises(ConfigError) as caught:
        one(["+recipe=mnist", "seed=${oc.env:NOT_SET}"])
    (problem,) = caught.value.problems
    assert (
        "environment variable NOT_SET" in problem.what
        and problem.fix == "export NOT_SET=VALUE, seed=VALUE, or a default: ${oc.env:NOT_SET,DEFAULT}"
    )
