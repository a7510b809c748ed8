import hashlib
import http.server
import threading

import pytest

from ipurun.datasets.download import FASHION_MNIST, MNIST, Source, cached_folder, fetch
from ipurun.datasets.idx import FILES
from ipurun.errors import ConfigError

CONTENT = b"digits" * 50_000


@pytest.fixture
def mirror(tmp_path):
    """A mirror on disk: urllib reads file addresses like any other."""
    folder = tmp_path / "mirror"
    folder.mkdir()
    (folder / "a.gz").write_bytes(CONTENT)
    return folder


def source(*folders, digest=None):
    digest = digest or hashlib.sha256(CONTENT).hexdigest()
    return Source("things", tuple(folder.as_uri() + "/" for folder in folders), {"a.gz": digest})


def test_a_file_is_fetched_into_a_folder_that_did_not_exist(tmp_path, mirror):
    target = tmp_path / "deep" / "root"
    assert fetch(source(mirror), target) == target
    assert (target / "a.gz").read_bytes() == CONTENT
    assert [path.name for path in target.iterdir()] == ["a.gz"]


def test_existing_files_are_not_fetched_again(tmp_path):
    (tmp_path / "a.gz").write_bytes(b"mine")
    fetch(source(tmp_path / "no-such-mirror"), tmp_path)
    assert (tmp_path / "a.gz").read_bytes() == b"mine"


def test_an_unpacked_file_is_not_fetched_again(tmp_path):
    (tmp_path / "a").write_bytes(b"mine")
    fetch(source(tmp_path / "no-such-mirror"), tmp_path)
    assert not (tmp_path / "a.gz").exists()


def test_the_next_mirror_is_tried(tmp_path, mirror):
    fetch(source(tmp_path / "gone", mirror), tmp_path / "root")
    assert (tmp_path / "root" / "a.gz").read_bytes() == CONTENT


def test_a_file_with_a_wrong_checksum_is_removed(tmp_path, mirror):
    with pytest.raises(ConfigError, match=r"wrong\s+checksum"):
        fetch(source(mirror, digest="0" * 64), tmp_path / "root")
    assert list((tmp_path / "root").iterdir()) == []


def test_an_unreachable_mirror_is_an_error_with_its_reason_and_leaves_no_folder(tmp_path):
    with pytest.raises(ConfigError) as caught:
        fetch(source(tmp_path / "gone"), tmp_path / "root")
    assert "things cannot be downloaded" in str(caught.value)
    assert "gone/a.gz" in str(caught.value)
    assert not (tmp_path / "root").exists()


class BrokenServer(http.server.BaseHTTPRequestHandler):
    """Answers with something that is not HTTP, or ends in the middle of a piece."""

    def do_GET(self):
        if self.path.startswith("/piece"):
            self.send_response(200)
            self.send_header("Transfer-Encoding", "chunked")
            self.end_headers()
            self.wfile.write(b"ffff\r\nabc")
        else:
            self.wfile.write(b"hello\r\n\r\n")

    def log_message(self, *values):
        pass


def test_the_next_mirror_is_tried_after_a_broken_connection(tmp_path, mirror):
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), BrokenServer) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        address = f"http://127.0.0.1:{server.server_port}/"
        broken = (address, f"{address}piece/")
        whole = source(mirror)
        fetch(Source("things", (*broken, *whole.mirrors), whole.files), tmp_path / "root")
        with pytest.raises(ConfigError, match="things cannot be downloaded"):
            fetch(Source("things", broken, whole.files), tmp_path / "other")
        server.shutdown()
    assert (tmp_path / "root" / "a.gz").read_bytes() == CONTENT and not list((tmp_path / "other").iterdir())


def test_a_folder_that_cannot_be_created_is_a_config_error(tmp_path, mirror):
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(ConfigError, match="cannot be created"):
        fetch(source(mirror), tmp_path / "file" / "root")


def test_the_cache_folder_follows_the_environment(tmp_path, monkeypatch):
    monkeypatch.setenv("IPURUN_DATA_DIR", str(tmp_path))
    assert cached_folder(MNIST) == tmp_path / "mnist"
    monkeypatch.delenv("IPURUN_DATA_DIR")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    assert cached_folder(FASHION_MNIST) == tmp_path / "cache" / "ipurun" / "data" / "fashion_mnist"


@pytest.mark.parametrize("known", [MNIST, FASHION_MNIST])
def test_the_sources_name_the_files_that_the_reader_wants(known):
    assert sorted(known.files) == sorted(name + ".gz" for pair in FILES.values() for name in pair)
    assert all(len(bytes.fromhex(digest)) == 32 for digest in known.files.values())
