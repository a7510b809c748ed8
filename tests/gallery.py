"""Make the pictures of docs/gallery.md and README.md from real runs: `make gallery`.

Terminals are drawn from what tmux shows, as SVG; pages from what Chromium shows, as PNG. Both have to be installed.
"""

from __future__ import annotations

import io
import os
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import List

sys.path.insert(0, str(Path(__file__).parent / "helpers"))
from browser import CHROMIUM, WHY_SKIPPED

ROOT = Path(__file__).parents[1]
IMAGES = ROOT / "docs" / "images"
IPURUN = Path(sys.executable).parent / "ipurun"
BERT = "+recipe=bert model=bert_large pipeline=bert_large_4ipu devices=16"

# rich's own format, without its fonts, which would come from the network.
_SVG = """<svg class="rich-terminal" viewBox="0 0 {width} {height}" xmlns="http://www.w3.org/2000/svg">
<style>
.{unique_id}-matrix {{ font-family: ui-monospace, Menlo, Consolas, "DejaVu Sans Mono", monospace;
  font-size: {char_height}px; line-height: {line_height}px; font-variant-east-asian: full-width; }}
.{unique_id}-title {{ font-size: 18px; font-weight: bold; font-family: sans-serif; }}
{styles}
</style>
<defs>
<clipPath id="{unique_id}-clip-terminal">
<rect x="0" y="0" width="{terminal_width}" height="{terminal_height}" /></clipPath>
{lines}
</defs>
{chrome}
<g transform="translate({terminal_x}, {terminal_y})" clip-path="url(#{unique_id}-clip-terminal)">
{backgrounds}
<g class="{unique_id}-matrix">{matrix}</g>
</g>
</svg>
"""


def terminal(
    command: str, file: str, folder: Path, size: str = "88x30", until: str = "", seconds: float = 90.0
) -> None:
    """Run a command in a terminal and draw it as soon as it shows a text, else at its end."""
    columns, rows = size.split("x")
    socket = str(folder / "tmux")
    ended = f"tmux -S {socket} wait-for -S done"
    inside = f"cd {folder}; PATH={IPURUN.parent}:$PATH; clear; {command}; sleep 1; {ended}; sleep 60"
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "LANG": "C.UTF-8", "HOME": str(folder / "home")}
    environment.pop("NO_COLOR", None)
    tmux = ["tmux", "-S", socket, "-f", "/dev/null"]
    subprocess.run(
        [*tmux, "new-session", "-d", "-x", columns, "-y", rows, "bash", "-c", inside], env=environment, check=True
    )
    shown = ""
    try:
        if until:
            for _ in range(int(seconds * 10)):
                time.sleep(0.1)
                shown = subprocess.run(
                    [*tmux, "capture-pane", "-e", "-p"], stdout=subprocess.PIPE, check=True
                ).stdout.decode()
                if until in shown:
                    break
        else:
            subprocess.run([*tmux, "wait-for", "done"], timeout=seconds, check=True)
            shown = subprocess.run(
                [*tmux, "capture-pane", "-e", "-p"], stdout=subprocess.PIPE, check=True
            ).stdout.decode()
    finally:
        subprocess.run([*tmux, "kill-server"], check=False)
    draw(f"$ {command}\n{shown.rstrip()}", IMAGES / file, int(columns), command.split(";")[-1].strip())


def draw(text: str, file: Path, columns: int, title: str) -> None:
    """Draw text with ANSI colours as SVG."""
    from rich.console import Console
    from rich.text import Text

    console = Console(record=True, width=columns, file=io.StringIO(), force_terminal=True, color_system="standard")
    console.print(Text.from_ansi(f"{text}\n"), soft_wrap=False)
    title = " ".join(title.split()[:2])  # the first line has the whole command
    file.write_text(console.export_svg(title=title, code_format=_SVG, unique_id=file.stem), encoding="utf-8")


def page(address: str, file: str, size: str, is_dark: bool = False) -> None:
    """Draw a page as PNG."""
    with tempfile.TemporaryDirectory() as profile:
        flags = ["--headless", "--no-sandbox", "--disable-gpu", "--no-first-run", "--disable-background-networking"]
        flags += ["--hide-scrollbars", "--disable-component-update", "--disable-sync", f"--user-data-dir={profile}"]
        flags += ["--blink-settings=preferredColorScheme=0"] if is_dark else []
        target = [f"--window-size={size}", f"--screenshot={IMAGES / file}", address]
        subprocess.run([CHROMIUM, *flags, *target], stderr=subprocess.DEVNULL, check=True, timeout=120)


def run(folder: Path, *words: str) -> None:
    """Run a command of ipurun."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "HOME": str(folder / "home")}
    subprocess.run([str(IPURUN), *words], cwd=str(folder), env=environment, check=True, stdout=subprocess.DEVNULL)


def newest(folder: Path, pattern: str) -> str:
    """Return the newest folder of a pattern, relative."""
    return str(sorted(folder.glob(pattern))[-1].relative_to(folder))


def main(wanted: List[str]) -> int:
    """Make all pictures, or those whose names contain one of the words."""
    for tool, there in (("tmux", shutil.which("tmux")), ("Chromium", CHROMIUM)):
        if not there:
            print(
                f"{tool} is needed: {WHY_SKIPPED if tool == 'Chromium' else 'it is not on the path'}", file=sys.stderr
            )
            return 1
    IMAGES.mkdir(exist_ok=True)

    def is_wanted(name: str) -> bool:
        return not wanted or any(word in name for word in wanted)

    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        if is_wanted("error.svg"):
            terminal("ipurun train +recipe=mnist device=8 model.hiden=32 precision=8", "error.svg", folder, "88x20")
        if is_wanted("train.svg"):
            command = "ipurun train +recipe=mnist devices=8"
            terminal(command, "train.svg", folder, "88x28", until="step 150  epoch")
        if is_wanted("plan.svg"):
            plan_picture(folder)
        if is_wanted("run.png") or is_wanted("compare") or is_wanted("runs.svg"):
            run(folder, "train", "+recipe=mnist", "devices=8", "name=digits", "--quiet")
            run(folder, "train", "+recipe=mnist", "devices=8", "name=slow", "optimizer.lr=0.0003", "--quiet")
            digits, slow = newest(folder, "runs/digits/*"), newest(folder, "runs/slow/*")
            run(folder, "report", digits, "--html", "run.html", "--quiet")
            page((folder / "run.html").as_uri(), "run.png", "1120,1250")
            terminal(f"ipurun compare {digits} {slow}", "compare.svg", folder, "100x30")
        if is_wanted("sweep.png"):
            words = ["optimizer.lr=0.0005,0.002,0.008", "device_iterations=1,8", "epochs=2"]
            run(folder, "train", "-m", "+recipe=mnist", "devices=8", *words, "--quiet")
            run(folder, "report", newest(folder, "runs/mnist/sweeps/*"), "--html", "sweep.html", "--quiet")
            page((folder / "sweep.html").as_uri(), "sweep.png", "1120,1250", is_dark=True)
        if is_wanted("plan.png"):
            run(folder, "plan", *BERT.split(), "--html", "plan.html", "--quiet")
            page((folder / "plan.html").as_uri(), "plan.png", "1120,1100")
            page((folder / "plan.html").as_uri(), "plan-narrow.png", "500,1200", is_dark=True)
    return 0


def plan_picture(folder: Path) -> None:
    """Draw the estimate of a plan, the end of a long output."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "HOME": str(folder / "home"), "COLUMNS": "100"}
    done = subprocess.run(
        [str(IPURUN), "plan", *BERT.split()], cwd=str(folder), env=environment, stdout=subprocess.PIPE
    )
    from ipurun.log.style import paint_plan

    text = done.stdout.decode()
    estimate = text[text.index("estimate for") : text.index("\nwhat would")]
    draw(f"$ ipurun plan {BERT}\n...\n{paint_plan(estimate.rstrip(), 128)}", IMAGES / "plan.svg", 128, "ipurun plan")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
