"""What `make site` adds to the pages of docs/: the README of every recipe, and the changelog.

Links to other files of the repository become their paths: the site does not know where the repository is.
"""

from __future__ import annotations

import posixpath
import re
from pathlib import Path

from mkdocs.structure.files import File

ROOT = Path(__file__).parents[2]
_LINK = re.compile(r"\[([^\]]*)\]\(((?:\.\./)+[^)#\s]+)(#[^)\s]*)?\)")


def _recipes():
    return sorted((ROOT / "recipes").glob("*/README.md"))


def on_config(config):
    """Add a page for each recipe to the menu, and pages that it does not name yet to their section."""
    pages = [f"recipes/{path.parent.name}.md" for path in _recipes()]
    named = str(config["nav"])
    for section in config["nav"]:
        for title, entries in section.items():
            if title == "Recipes":
                entries.extend(pages)
            folder = {"How to": "how-to", "Explanation": "explanation", "Reference": "reference"}.get(title)
            if folder:
                found = sorted((ROOT / "docs" / folder).glob("*.md"))
                entries.extend(f"{folder}/{path.name}" for path in found if f"{folder}/{path.name}" not in named)
    config["nav"].append({"Changelog": "CHANGELOG.md"})
    return config


def on_files(files, config):
    """Add the README of each recipe, and the changelog."""
    for path in _recipes():
        files.append(File.generated(config, f"recipes/{path.parent.name}.md", content=path.read_text(encoding="utf-8")))
    files.append(File.generated(config, "CHANGELOG.md", content=(ROOT / "CHANGELOG.md").read_text(encoding="utf-8")))
    return files


def on_page_markdown(markdown, page, config, files):
    """Point links at the pages that the site has; name other files of the repository by their path."""
    known = {path.parent.name for path in _recipes()}
    source = page.file.src_uri
    inside = {"CHANGELOG.md": ".", **{f"recipes/{name}.md": f"recipes/{name}" for name in known}}
    origin = inside.get(source, posixpath.dirname(f"docs/{source}"))

    def link(match):
        text, target, anchor = match[1], match[2], match[3] or ""
        path = posixpath.normpath(posixpath.join(origin, target))
        return _pointed(text, path, anchor, source, match[0])

    if source in inside:
        markdown = re.sub(
            r"\[([^\]]*)\]\((?!https?:|#)([^)#\s]+)(#[^)\s]*)?\)",
            lambda m: _pointed(m[1], posixpath.normpath(posixpath.join(origin, m[2])), m[3] or "", source, m[0]),
            markdown,
        )
        return markdown
    return _LINK.sub(link, markdown)


def _pointed(text, path, anchor, source, unchanged):
    recipe = re.fullmatch(r"recipes/(\w+)/README\.md", path)
    if path.startswith("docs/"):
        target = path[len("docs/") :]
    elif recipe:
        target = f"recipes/{recipe[1]}.md"
    elif path == "CHANGELOG.md":
        target = path
    else:
        return f"{text} (`{path}`)"
    return f"[{text}]({posixpath.relpath(target, posixpath.dirname(source) or '.')}{anchor})"
