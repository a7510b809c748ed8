"""Hooks of `make site`: add the README of every recipe, the changelog and a search that works without a server.

Links to other files of the repository become their paths: the site does not know where the repository is.
"""

from __future__ import annotations

import posixpath
import re
from pathlib import Path

from mkdocs.exceptions import PluginError
from mkdocs.structure.files import File

ROOT = Path(__file__).parents[2]
_LINK = re.compile(r"\[([^\]]*)\]\(((?:\.\./)+[^)#\s]+)(#[^)\s]*)?\)")

# Narrow screens scroll a wide table sideways; names of keys stay whole.
_STYLE = "<style>.md-typeset table:not([class]) td:first-child code{white-space:nowrap}</style></head>"
_SHIM = re.compile(r'<script src="?https://unpkg\.com/iframe-worker/shim"?></script>')


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


def on_post_page(output, page, config):
    """Let the search of a page work from a file."""
    return _with_own_worker(output, page.file.src_uri)


def on_post_template(output_content, template_name, config):
    """Let the search of the page for missing addresses work from a file."""
    return _with_own_worker(output_content, template_name) if template_name.endswith(".html") else output_content


def _with_own_worker(output, name):
    """Put our script in place of the one that the plugin `offline` loads from the network."""
    script = (Path(__file__).parent / "file_worker.js").read_text(encoding="utf-8")
    output, count = _SHIM.subn(lambda match: f"<script>{script}</script>", output)
    if count != 1 or re.search(r"<(?:script|link|img|iframe)\b[^>]*(?:src|href)=[\"']?https?://", output):
        raise PluginError(f"{name}: the page loads something from the network")
    return output.replace("</head>", _STYLE, 1)


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
