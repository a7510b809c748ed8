"""The server of `ipurun watch`: only for this machine, only for reading, only runs that are there."""

from __future__ import annotations

import http.client
import threading
from pathlib import Path
from typing import Dict, Iterator, Tuple

import pytest
from stored_runs import HOSTILE, write_run, write_sweep

from ipurun.errors import ConfigError
from ipurun.pages.serve import Watcher, make_server


class _Client:
    def __init__(self, port: int) -> None:
        self.port = port

    def ask(self, path: str, method: str = "GET", **headers: str) -> Tuple[int, str, Dict[str, str]]:
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=10)
        connection.request(method, path, headers=headers)
        answer = connection.getresponse()
        text = answer.read().decode()
        connection.close()
        return answer.status, text, dict(answer.getheaders())


@pytest.fixture(name="runs")
def fixture_runs(tmp_path: Path) -> Path:
    write_run(tmp_path / "runs/digits/1")
    write_run(tmp_path / "runs" / "<img src=x>&" / "2", HOSTILE)
    write_sweep(tmp_path / "runs/digits/sweeps/3", with_runs=True)
    return tmp_path / "runs"


@pytest.fixture(name="client")
def fixture_client(runs: Path) -> Iterator[_Client]:
    server = make_server(Watcher(runs, "token"))
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    yield _Client(server.server_address[1])
    server.shutdown()
    server.server_close()
    thread.join()


def _links(page: str) -> Dict[str, str]:
    import re

    return {name: link for link, name in re.findall(r'<a href="(/token/\w+)">([^<]*)</a>', page)}


def test_every_run_and_every_point_has_a_page(client: _Client) -> None:
    status, page, headers = client.ask("/token/")
    assert status == 200 and "<img" not in page
    assert headers["Cache-Control"] == "no-store" and headers["X-Frame-Options"] == "DENY"
    links = _links(page)
    assert len(links) == 2  # two of the three have the same name
    for link in links.values():
        status, inner, _ = client.ask(link)
        assert status == 200 and "all runs" in inner
        for point in _links(inner).values():
            assert client.ask(point)[0] == 200


def test_a_page_is_sent_again_only_when_its_files_have_changed(client: _Client, runs: Path) -> None:
    import re

    page = client.ask("/token/")[1]
    version = re.search(r'data-version="(\w+)"', page)
    assert version is not None
    assert client.ask(f"/token/?version={version[1]}")[0] == 204
    with (runs / "digits/1/metrics.jsonl").open("a") as stream:
        stream.write('{"split": "train", "step": 121, "loss": 0.01}\n')
    assert client.ask(f"/token/?version={version[1]}")[0] == 200


@pytest.mark.parametrize("host", ["evil.example", "evil.example:80", "127.0.0.1", "localhost", ""])
def test_a_page_of_the_web_cannot_reach_it_by_another_name(client: _Client, host: str) -> None:
    assert client.ask("/token/", Host=host)[0] == 421


def test_only_the_printed_address_is_answered(client: _Client) -> None:
    for path in (
        "/",
        "/other/",
        "/token2/",
        "//token/x/y",
        "/token/../../etc/passwd",
        "/token/%2e%2e/%2e%2e/etc/passwd",
    ):
        status, text, _ = client.ask(path)
        assert status in (403, 404) and "root:" not in text
    assert client.ask("/token/", Host=f"localhost:{client.port}")[0] == 200


@pytest.mark.parametrize("method", ["POST", "PUT", "DELETE", "OPTIONS"])
def test_nothing_can_be_changed(client: _Client, method: str) -> None:
    assert client.ask("/token/", method)[0] == 501


def test_one_run_alone_is_served_at_once(runs: Path) -> None:
    watcher = Watcher(runs / "digits/1", "token")
    status, page = watcher.answer("/token/")
    assert status == 200 and "<h2>Curves</h2>" in page


def test_a_port_in_use_is_reported(client: _Client, runs: Path) -> None:
    with pytest.raises(ConfigError, match="cannot be used"):
        make_server(Watcher(runs), client.port)
