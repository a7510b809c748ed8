"""Download data files, verify their SHA-256 and write them atomically."""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import http.client
import os
import sys
import urllib.request
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Callable, Iterator, List, Mapping, Optional, Tuple

from ipurun.errors import ConfigError

if TYPE_CHECKING:
    from rich.progress import Progress, TaskID

__all__ = ["FASHION_MNIST", "MNIST", "Source", "cached_folder", "counter", "fetch"]

_CHUNK_BYTES = 1 << 16
_TIMEOUT_SECONDS = 30


@dataclass(frozen=True)
class Source:
    """The source of a data set.

    Args:
        name: Name of the data set and of its folder in the cache.
        mirrors: URLs of the folder with the files, tried in this order.
        files: File name -> SHA-256 of its content.
    """

    name: str
    mirrors: Tuple[str, ...]
    files: Mapping[str, str]

    @property
    def advice(self) -> str:
        """Instructions for getting the files."""
        return (
            f"data.download=true fetches the files; or get {', '.join(self.files)} from {self.mirrors[0]} "
            "and pass data.root=FOLDER; or run without them: data=synthetic"
        )


MNIST = Source(
    name="mnist",
    mirrors=(
        "https://ossci-datasets.s3.amazonaws.com/mnist/",
        "https://storage.googleapis.com/cvdf-datasets/mnist/",
    ),
    files={
        "train-images-idx3-ubyte.gz": "440fcabf73cc546fa21475e81ea370265605f56be210a4024d2ca8f203523609",
        "train-labels-idx1-ubyte.gz": "3552534a0a558bbed6aed32b30c495cca23d567ec52cac8be1a0730e8010255c",
        "t10k-images-idx3-ubyte.gz": "8d422c7b0a1c1c79245a5bcf07fe86e33eeafee792b84584aec276f5a2dbc4e6",
        "t10k-labels-idx1-ubyte.gz": "f7ae60f92e00ec6debd23a6088c31dbd2371eca3ffa0defaefb259924204aec6",
    },
)

FASHION_MNIST = Source(
    name="fashion_mnist",
    mirrors=(
        "https://raw.githubusercontent.com/zalandoresearch/fashion-mnist/master/data/fashion/",
        "http://fashion-mnist.s3-website.eu-central-1.amazonaws.com/",
    ),
    files={
        "train-images-idx3-ubyte.gz": "3aede38d61863908ad78613f6a32ed271626dd12800ba2636569512369268a84",
        "train-labels-idx1-ubyte.gz": "a04f17134ac03560a47e3764e11b92fc97de4d1bfaf8ba1a3aa29af54cc90845",
        "t10k-images-idx3-ubyte.gz": "346e55b948d973a97e58d2351dde16a484bd415d4595297633bb08f03db6a073",
        "t10k-labels-idx1-ubyte.gz": "67da17c76eaffca5446c3361aaab5c3cd6d1c2608764d35dfb1850b086bf8dd5",
    },
)


def cached_folder(source: Source) -> Path:
    """Return the default folder of a data set: below IPURUN_DATA_DIR, else in the user's cache."""
    cache = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    base = os.environ.get("IPURUN_DATA_DIR") or os.path.join(cache, "ipurun", "data")
    return Path(base).expanduser() / source.name


def fetch(source: Source, folder: Path) -> Path:
    """Download missing files to a folder, with a progress bar on standard error.

    Files that exist, packed or unpacked, are not checked.

    Returns:
        The folder.

    Raises:
        ConfigError: If the folder cannot be created, or no mirror has a file with the right checksum.
    """
    if _missing(source, folder):
        with _one_at_a_time(folder), _progress_bar() as progress:
            for name in _missing(source, folder):
                _fetch_file(source, name, folder, progress)
    return folder


def _missing(source: Source, folder: Path) -> List[str]:
    return [
        name for name in source.files if not (folder / name).exists() and not (folder / name[: -len(".gz")]).exists()
    ]


@contextlib.contextmanager
def _one_at_a_time(folder: Path) -> Iterator[None]:
    """Wait while another process downloads to the same folder; without locks in its file system, download as well."""
    with contextlib.ExitStack() as stack:
        with contextlib.suppress(OSError):
            # A lock on a folder that exists leaves no file behind.
            existing = next(place for place in (folder.absolute(), *folder.absolute().parents) if place.is_dir())
            descriptor = os.open(existing, os.O_RDONLY)
            stack.callback(os.close, descriptor)
            fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield


@contextlib.contextmanager
def counter(doing: str, total: Optional[int], unit: str) -> Iterator[Callable[[int], None]]:
    """Show how far a long task is, on standard error; yields the function that counts."""
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

    of_all = "/{task.total:,.0f}" if total is not None else ""
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        TextColumn("{task.completed:,.0f}" + f"{of_all} {unit}"),
        TimeElapsedColumn(),
    )
    with Progress(*columns, console=Console(file=sys.stderr)) as progress:
        task = progress.add_task(doing, total=total)
        yield lambda number: progress.advance(task, number)


def _progress_bar() -> Progress:
    # Deferred: it takes as long to import as all data sets together.
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TransferSpeedColumn

    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TransferSpeedColumn())
    return Progress(*columns, console=Console(file=sys.stderr))


def _fetch_file(source: Source, name: str, folder: Path, progress: Progress) -> None:
    failures = []
    for mirror in source.mirrors:
        task = progress.add_task(name, total=None)
        # With the process id, since another process (a point of a sweep) may download the same file.
        partial = folder / f".{name}.{os.getpid()}.part"
        try:
            digest = _stream(mirror + name, partial, progress, task)
            if digest == source.files[name]:
                os.replace(partial, folder / name)
                return
            failures.append(f"{mirror}{name}: wrong checksum {digest[:12]}...")
        except (OSError, http.client.HTTPException) as error:  # OSError includes what urllib raises
            failures.append(f"{mirror}{name}: {getattr(error, 'reason', error) or type(error).__name__}")
        finally:
            if partial.exists():
                partial.unlink()
        progress.remove_task(task)
    raise ConfigError(
        f"{source.name} cannot be downloaded",
        where="data.download=true",
        seen="\n".join(failures),
        fix=f"download {name} by other means and pass data.root=FOLDER",
    )


def _stream(url: str, target: Path, progress: Progress, task: TaskID) -> str:
    digest = hashlib.sha256()
    with urllib.request.urlopen(url, timeout=_TIMEOUT_SECONDS) as response:
        # Only now, so that nothing is left on a machine without a network.
        try:
            target.parent.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            where = f"data.root={target.parent}"
            raise ConfigError("the data folder cannot be created", where, seen=str(error)) from error
        length = response.headers.get("Content-Length")
        progress.update(task, total=int(length) if length and length.isdigit() else None)
        with open(target, "wb") as out:
            for chunk in iter(lambda: response.read(_CHUNK_BYTES), b""):
                digest.update(chunk)
                out.write(chunk)
                progress.update(task, advance=len(chunk))
    return digest.hexdigest()
