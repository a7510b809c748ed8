"""`ipurun report`, `compare`, `runs` and `watch`: what runs have left on disk, as tables and as pages."""

from __future__ import annotations

import os
import shutil
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any, Dict, List, Optional, Sequence, Tuple

from ipurun.cli.common import Flags, print_json, split
from ipurun.errors import ConfigError, Problem, nearest, visible

if TYPE_CHECKING:
    from ipurun.pages.data import RunData, SweepData
    from ipurun.pages.listing import Entry

__all__ = ["run_compare", "run_report", "run_runs", "run_watch"]

_REPORT_USAGE = """\
usage: ipurun report RUN | SWEEP [flags]

Writes one page with all that a run left: loss, metrics, learning rate and throughput over steps, where the time went,
its config against its recipe and where each value was set, the estimate of its plan, versions and git state. For a
sweep: the ranking, the metric against each swept key, curves, and failed points with their reasons. The page needs no
network: it can be mailed. It is made from the files of the folder, which may come from another machine.

flags
  --html FILE     where to write the page; default: report.html in the folder
  --open          open it in a browser
  --no-plan       leave the estimate out, which needs the model's code
  --quiet --json --debug

examples
  ipurun report runs/mnist/2024-05-01_12-30-00 --open
  ipurun report runs/mnist/sweeps/2024-05-01_12-30-00 --html sweep.html
"""

_COMPARE_USAGE = """\
usage: ipurun compare RUN RUN ... [flags]

Shows runs side by side: how each ended, its best value, its speed, and the keys that differ. A terminal also shows
their losses on one picture, and --html writes a page with all their curves.

flags
  --html FILE     write the page
  --open          open it in a browser
  --quiet --json --debug

examples
  ipurun compare runs/mnist/2024-05-01_12-30-00 runs/mnist/2024-05-02_09-15-00 --html both.html
"""

_RUNS_USAGE = """\
usage: ipurun runs ls [FOLDER] [key=value ...] [flags]
       ipurun runs show RUN
       ipurun runs rm RUN ... [--yes]

ls lists what ran below a folder (default: runs), the newest first: how it ended, its best value, speed, time and size.
show prints one run in full. rm removes runs after asking; one that is in use is kept.

flags of ls
  --name TEXT       only names with this text in them
  --status STATUS   only running, finished, interrupted, failed or killed ones
  --sort COLUMN     by started (default), best, time, size or name
  --limit N         at most N
  key=value         only runs with this value of a config key
flags of rm
  --yes             do not ask
flags of all
  --quiet --json --debug

examples
  ipurun runs ls --status failed
  ipurun runs ls optimizer.lr=0.002 --sort best
  ipurun runs rm runs/mnist/2024-05-01_12-30-00
"""

_WATCH_USAGE = """\
usage: ipurun watch [RUN | SWEEP | FOLDER] [flags]

Serves the pages of a run, a sweep, or of all below a folder (default: runs) on this machine, and keeps them up to date
during runs. Nothing is written. Only browsers of this machine reach it, with the address that is printed. Ctrl-C
ends it.

flags
  --port N        default: any that is free
  --open          open it in a browser
  --terminal      show the runs in the terminal instead
  --debug

examples
  ipurun watch
  ipurun watch runs/mnist/2024-05-01_12-30-00 --open
  ipurun watch --terminal
"""

_STATUSES = ("running", "finished", "interrupted", "failed", "killed")
_SORTS = ("started", "best", "time", "size", "name")
_REDRAW_SECONDS = 1.0
_WIDEST_PLOT = 100
_NARROW = 60


def run_report(argv: List[str]) -> int:
    """Write the page of a run or a sweep."""
    flags, rest = split(argv, switches=("--open", "--no-plan"), with_value=("--html",))
    if flags.help:
        print(_REPORT_USAGE, end="")
        return 0
    from ipurun.pages.data import find, is_sweep, read_run, read_sweep
    from ipurun.pages.report import sweep_page

    _check_flags(rest, ("--html", "--open", "--no-plan"))
    (path,) = _paths(rest, "report", 1, 1)
    folder = find(path)
    target = Path(str(flags.values.get("html") or folder / "report.html"))
    if is_sweep(folder):
        sweep = read_sweep(folder)
        text = sweep_page(sweep)
        document: Dict[str, Any] = {"kind": "sweep", "points": len(sweep.records), "ranked_by": sweep.ranking.column}
        if not (flags.quiet or flags.json):
            _show_sweep(sweep)
    else:
        run = read_run(folder)
        text = _run_text(run, "no-plan" not in flags.values)
        document = {"kind": "run", "name": run.name, "status": run.status, "best": run.best, "steps": run.step}
        if not (flags.quiet or flags.json):
            _show_run(run)
    _write_page(target, text)
    if flags.json:
        print_json({**document, "folder": str(folder), "page": str(target)})
    else:
        print(target if flags.quiet else f"page: {target}")
    if "open" in flags.values:
        _open(target.absolute().as_uri())
    return 0


def _run_text(run: RunData, with_plan: bool) -> str:
    """Return the page of a run, with the estimate of its plan where its model can be made here."""
    from ipurun.pages.report import recipe_config, run_page

    parts: Sequence[str] = ()
    why = "left out (--no-plan)"
    if with_plan:
        from ipurun.interface import plan_of_run
        from ipurun.pages.plan import measured_against_estimate, plan_sections

        try:
            report = plan_of_run(run.folder)
            why = "" if report.no_estimate is None else report.no_estimate.what
            if report.estimate is not None:
                why = ""
                parts = [measured_against_estimate(run, report.estimate), *plan_sections(report.estimate)]
        except Exception as error:  # the model's code, of the user and of the time of the run, may do anything here
            problems = getattr(error, "problems", ())
            why = problems[0].what if problems else f"{type(error).__name__}: {error}"
    return run_page(run, parts, "" if parts else why, recipe_config(run))


def _write_page(target: Path, text: str) -> None:
    from ipurun.files import write_atomically

    try:
        write_atomically(target, text)
    except OSError as error:
        raise ConfigError(
            "the page cannot be written", seen=f"{target}: {error.strerror}", fix="--html FILE in a folder that exists"
        ) from error


def _open(address: str) -> None:
    import webbrowser

    if not webbrowser.open(address):
        print(f"no browser found; open {address}", file=sys.stderr)


def run_compare(argv: List[str]) -> int:
    """Compare runs in the terminal and as a page."""
    flags, rest = split(argv, switches=("--open",), with_value=("--html",))
    if flags.help:
        print(_COMPARE_USAGE, end="")
        return 0
    from ipurun.log.style import draws_blocks, has_colour, plot, print_table
    from ipurun.pages.compare import compare_page, comparison, differing_keys, labels_of, loss_curves
    from ipurun.pages.data import find, is_sweep, read_run

    _check_flags(rest, ("--html", "--open"))
    folders = [find(path) for path in _paths(rest, "compare", 2, 40)]
    for folder in folders:
        if is_sweep(folder):
            fix = f"ipurun report {folder}, or name its points: {folder}/000"
            raise ConfigError(f"`{folder}` is a sweep, not a run", fix=fix)
    runs = [read_run(folder) for folder in folders]
    if flags.json:
        keys = {key: dict(zip(map(str, folders), texts)) for key, texts in differing_keys(runs)}
        print_json({"runs": [_run_document(run) for run in runs], "differing_keys": keys})
    elif not (flags.quiet and ("html" in flags.values or "open" in flags.values)):
        header, rows = comparison(runs, draws_blocks(sys.stdout))
        styles = {1: _status_style}
        print_table(sys.stdout, header, rows, styles, numeric=(2, 4, 5, 6, 7), droppable=(2, 7, 5, 4, 6))
        print()
        if sys.stdout.isatty():
            width = min(shutil.get_terminal_size().columns, _WIDEST_PLOT)
            picture = plot(
                "train loss",
                loss_curves(runs),
                width,
                blocks=draws_blocks(sys.stdout),
                colour=has_colour(sys.stdout),
            )
            print("\n".join([*picture, ""]) if picture else "")
        differing = [[key, *map(_shortened, texts)] for key, texts in differing_keys(runs)]
        if differing:
            print_table(sys.stdout, ["key", *labels_of(runs)], differing, {0: lambda text: "key"})
        else:
            print("no key differs")
    target = flags.values.get("html")
    if target or "open" in flags.values:
        page = Path(str(target or "comparison.html"))
        _write_page(page, compare_page(runs))
        if not flags.json:
            print(page if flags.quiet else f"\npage: {page}")
        if "open" in flags.values:
            _open(page.absolute().as_uri())
    return 0


def run_runs(argv: List[str]) -> int:
    """List, show or remove runs."""
    flags, rest = split(argv, switches=("--yes",), with_value=("--name", "--status", "--sort", "--limit"))
    if flags.help:
        print(_RUNS_USAGE, end="")
        return 0
    _check_flags(rest, ("--yes", "--name", "--status", "--sort", "--limit"))
    action, *words = rest or ["ls"]
    actions = {"ls": _list_runs, "show": _show_runs, "rm": _remove_runs}
    if action not in actions:
        close = nearest(action, actions, most=1)
        raise ConfigError(
            f"`runs` has no action `{action[:60]}`",
            "command line",
            known="ls, show, rm",
            fix=f"ipurun runs {(close or ['ls'])[0]}",
        )
    return actions[action](words, flags)


def _list_runs(words: List[str], flags: Flags) -> int:
    from ipurun.log.style import print_table
    from ipurun.pages.listing import entries_below, matching, rows_of

    folder = Path(_folder_word(words) or "runs")
    status = str(flags.values.get("status") or "")
    if status and status not in _STATUSES:
        raise ConfigError(f"`--status` cannot be `{status}`", "command line", known=", ".join(_STATUSES))
    if not folder.is_dir():
        fix = "name the folder that runs_dir= was set to, or train something: ipurun train +recipe=mnist"
        raise ConfigError(f"there is no folder `{folder}`", fix=fix)
    found = matching(
        entries_below(folder), str(flags.values.get("name") or ""), status, [word for word in words if "=" in word]
    )
    found = _sorted(found, str(flags.values.get("sort") or "started"))
    found = found[: _limit(flags)]
    if flags.json:
        print_json([entry.to_dict() for entry in found])
    elif flags.quiet:
        for entry in found:
            print(entry.folder)
    elif not found:
        print(f"no run below {folder}" + (" agrees" if words or flags.values else ""))
    else:
        header, rows = rows_of(found)
        styles = {1: _status_style, 4: lambda text: "" if text == "-" else "best"}
        print_table(sys.stdout, header, rows, styles, numeric=(3, 5, 6, 7), droppable=(5, 2, 3, 6, 7, 0))
    return 0


def _sorted(entries: List[Entry], column: str) -> List[Entry]:
    if column not in _SORTS:
        raise ConfigError(f"`--sort` cannot be `{column}`", "command line", known=", ".join(_SORTS))
    if column == "best":
        worst = float("inf")
        return sorted(
            entries,
            key=lambda e: worst if e.best is None or e.best != e.best else -e.best if e.higher_is_better else e.best,
        )
    if column == "name":
        return sorted(entries, key=lambda entry: entry.name)
    if column in ("time", "size"):
        return sorted(entries, key=lambda entry: -((entry.seconds if column == "time" else entry.size) or 0))
    return entries


def _limit(flags: Flags) -> Optional[int]:
    text = flags.values.get("limit")
    if text is None:
        return None
    if not str(text).isdigit():
        raise ConfigError("`--limit` is not a number", "command line", seen=str(text), fix="--limit 20")
    return int(str(text))


def _show_runs(words: List[str], flags: Flags) -> int:
    from ipurun.pages.data import find, is_sweep, read_run, read_sweep

    (path,) = _paths(words, "runs show", 1, 1)
    folder = find(path)
    if is_sweep(folder):
        sweep = read_sweep(folder)
        if flags.json:
            from ipurun.sweep.table import rows_as_data

            print_json({"folder": str(folder), "argv": sweep.argv, "points": rows_as_data(sweep.ranking)})
        else:
            _show_sweep(sweep)
        return 0
    run = read_run(folder)
    if flags.json:
        print_json({**_run_document(run), "summary": run.summary, "env": run.env, "origins": run.origins})
    else:
        _show_run(run)
    return 0


def _remove_runs(words: List[str], flags: Flags) -> int:
    from ipurun.log.format import plural, size_text
    from ipurun.pages.data import find, size_of
    from ipurun.runs.lock import is_held

    folders = list(dict.fromkeys(find(path) for path in _paths(words, "runs rm", 1, 10_000)))
    problems = []
    for folder in folders:
        if is_held(folder) or any(is_held(point.parent) for point in folder.glob("*/lock.json")):
            problems.append(
                Problem(f"`{folder}` is in use by another process", fix="end it first: it shows in `ipurun runs ls`")
            )
        elif folder.is_symlink():
            problems.append(Problem(f"`{folder}` is a link", fix="name the folder that it points to"))
    if problems:
        raise ConfigError(problems)
    sizes = {folder: size_of(folder) for folder in folders}
    if "yes" not in flags.values:
        if not sys.stdin.isatty():
            raise ConfigError("`runs rm` asks before it removes", seen="standard input is not a terminal", fix="--yes")
        for folder, size in sizes.items():
            print(visible(f"{folder}  {size_text(size)}"))
        answer = input(f"remove {plural(len(folders), 'folder')}, {size_text(sum(sizes.values()))}? [y/N] ")
        if answer.strip().lower() not in ("y", "yes"):
            print("nothing removed")
            return 0
    for folder in folders:
        shutil.rmtree(folder)
    if flags.json:
        print_json({"removed": list(map(str, folders)), "bytes": sum(sizes.values())})
    else:
        print(f"removed {plural(len(folders), 'folder')}, {size_text(sum(sizes.values()))}")
    return 0


def run_watch(argv: List[str]) -> int:
    """Serve the pages of runs until Ctrl-C, or show them in the terminal."""
    flags, rest = split(argv, switches=("--open", "--terminal"), with_value=("--port",))
    if flags.help:
        print(_WATCH_USAGE, end="")
        return 0
    _check_flags(rest, ("--open", "--terminal", "--port"))
    folder = Path((_paths(rest, "watch", 0, 1) or ["runs"])[0])
    if not folder.is_dir():
        raise ConfigError(f"there is no folder `{folder}`", fix="ipurun watch FOLDER, or the folder of a run")
    if "terminal" in flags.values:
        return _watch_in_terminal(folder)
    from ipurun.pages.serve import Watcher, make_server

    port = str(flags.values.get("port", "0"))
    if not port.isdigit() or int(port) > 65535:
        raise ConfigError(
            "`--port` is not a port", "command line", seen=port, fix="--port 8080, or 0 for any that is free"
        )
    watcher = Watcher(folder)
    server = make_server(watcher, int(port))
    address = f"http://127.0.0.1:{server.server_address[1]}/{watcher.token}/"
    print(f"watching {folder} at {address}  (Ctrl-C ends it)", flush=True)
    if "open" in flags.values:
        _open(address)
    try:
        server.serve_forever()
    except KeyboardInterrupt:
        print()
    finally:
        server.server_close()
    return 0


def _watch_in_terminal(folder: Path) -> int:
    """Show the runs below a folder in a table, drawn again every second; once where there is no terminal."""
    from ipurun.log.style import draws_blocks, is_drawn_on, print_table, rich_table

    blocks = draws_blocks(sys.stdout)  # rich stands in for the stream later
    header, rows = _watched(folder, blocks)
    if not is_drawn_on(sys.stdout):
        print_table(sys.stdout, header, rows)
        return 0
    from rich.console import Console, Group
    from rich.live import Live
    from rich.text import Text

    console = Console(highlight=False)

    def drawn() -> Any:
        lines = 1 if console.width >= _NARROW else 2  # of a row, whose name is folded
        shown, most = _watched(folder, blocks)[1], max(1, (console.height - 5) // lines)
        table = rich_table(
            header,
            shown[:most],
            {1: _status_style, 4: lambda text: "best"},
            (2, 3, 6),
            (6, 5, 3, 4),
            console.width,
            blocks,
        )
        more = f"and {len(shown) - most} more; " if len(shown) > most else ""
        return Group(table, Text(f"{more}{time.strftime('%H:%M:%S')}, Ctrl-C ends this, not the runs", style="dim"))

    try:
        with Live(drawn(), console=console, auto_refresh=False) as live:
            while True:
                time.sleep(_REDRAW_SECONDS)
                live.update(drawn(), refresh=True)
    except KeyboardInterrupt:
        return 0


def _watched(folder: Path, blocks: bool) -> Tuple[List[str], List[List[str]]]:
    """Return the newest runs below a folder with their loss curves."""
    from ipurun.log.format import count, metric
    from ipurun.log.style import sparkline
    from ipurun.pages.data import curves_of, is_sweep, read_run
    from ipurun.pages.listing import entries_below, entry_of

    is_one = is_sweep(folder) or (folder / "config.yaml").is_file()
    entries = [entry_of(folder, with_size=False)] if is_one else entries_below(folder, with_size=False)[:30]
    rows = []
    for entry in entries:
        losses: Sequence[float] = ()
        if entry.kind == "run":
            curves = curves_of(read_run(entry.folder))
            losses = next((curve.values for curve in curves if (curve.split, curve.name) == ("train", "loss")), ())
        best = "-" if entry.best is None else f"{entry.monitor} {metric(entry.best)}"
        last = metric(losses[-1]) if losses else "-"
        spark = sparkline(losses, 20, blocks)
        done = entry.steps.replace("/", " of ").replace(" points", "")
        row = [f"{entry.name} {entry.folder.name}", entry.status, done, last, best, spark]
        rows.append([*row, count(entry.samples_per_second)])
    return ["run or sweep", "status", "steps", "loss", "best", "loss curve", "samples/s"], rows


def _status_style(text: str) -> str:
    return {"finished": "good", "running": "label", "interrupted": "warning"}.get(text, "bad")


def _run_document(run: RunData) -> Dict[str, Any]:
    import math

    best = run.best if run.best is None or math.isfinite(run.best) else str(run.best)
    return {
        "folder": str(run.folder),
        "name": run.name,
        "status": run.status,
        "reason": run.reason,
        "steps": run.step,
        "monitor": run.monitor,
        "best": best,
        "samples_per_second": run.samples_per_second,
        "seconds": run.total_seconds,
    }


def _show_run(run: RunData) -> None:
    """Show a run as a panel of facts."""
    from ipurun.log.format import count, duration, metric, rate, size_text
    from ipurun.log.screen import make_screen
    from ipurun.log.style import draws_blocks, sparkline
    from ipurun.pages.data import age_text, curves_of, size_of

    losses = next((c.values for c in curves_of(run) if (c.split, c.name) == ("train", "loss")), ())
    rows = [("status", run.status + (f": {run.reason}" if run.reason else ""))]
    rows.append(("started", age_text(run.started)))
    rows.append(("steps", count(run.step)))
    if run.best is not None:
        at = run.summary.get("best_step")
        rows.append(
            ("best", f"{run.monitor or 'loss'} {metric(run.best)}" + (f" at step {at}" if at is not None else ""))
        )
    if losses:
        width = max(8, min(40, shutil.get_terminal_size().columns - 30))
        rows.append(("loss", f"{metric(losses[-1])}  {sparkline(losses, width, draws_blocks(sys.stdout))}"))
    if run.samples_per_second is not None:
        rows.append(("speed", f"{rate(run.samples_per_second)} samples/s"))
    rows.append(("time", duration(run.total_seconds)))
    if run.resumes:
        rows.append(("resumed", "after step " + ", ".join(map(count, run.resumes))))
    rows.append(("typed", " ".join(run.overrides) or "nothing"))
    versions = run.env.get("versions")
    if isinstance(versions, dict):
        rows.append(
            (
                "versions",
                ", ".join(f"{name} {versions[name]}" for name in ("ipurun", "python", "torch") if name in versions),
            )
        )
    for fault in run.faults:
        rows.append(("fault", fault))
    rows.append(("size", size_text(size_of(run.folder))))
    rows.append(("run folder", str(run.folder)))
    screen = make_screen(sys.stdout)
    screen.panel(f"{run.name}: {run.status}", rows)
    screen.close()


def _show_sweep(sweep: SweepData) -> None:
    from ipurun.log.screen import make_screen
    from ipurun.sweep.table import show_table

    screen = make_screen(sys.stdout)
    show_table(sweep.ranking, screen)
    screen.close()


def _shortened(text: str, most: int = 40) -> str:
    return text if len(text) <= most else f"{text[: most - 3]}..."


def _folder_word(words: Sequence[str]) -> str:
    folders = [word for word in words if "=" not in word]
    if len(folders) > 1:
        raise ConfigError(
            "`runs ls` lists one folder", "command line", seen=" ".join(folders), fix=f"ipurun runs ls {folders[0]}"
        )
    return folders[0] if folders else ""


def _paths(words: Sequence[str], command: str, least: int, most: int) -> List[str]:
    """Return the words of a command line that are paths."""
    if least <= len(words) <= most:
        return [os.fspath(word) for word in words]
    wanted = {(1, 1): "the folder of a run or a sweep", (0, 1): "at most one folder"}.get(
        (least, most), "folders of runs"
    )
    raise ConfigError(
        f"`{command}` needs {wanted}",
        "command line",
        seen=" ".join(words)[:200] or "nothing",
        fix=f"ipurun {command} runs/NAME/TIME",
    )


def _check_flags(words: Sequence[str], known: Sequence[str]) -> None:
    for word in words:
        if word.startswith("-") and not Path(word).exists():
            close = nearest(word, known, most=1)
            raise ConfigError(
                f"unknown flag `{word[:60]}`",
                "command line",
                known=", ".join(known),
                fix=close[0] if close else "--help",
            )
