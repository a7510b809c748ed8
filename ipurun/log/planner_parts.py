"""Colours and style of the planner's page."""

from __future__ import annotations

__all__ = ["PARTS", "STYLE", "ipu_colour"]

# Field of a memory estimate, how it is called, and its colour.
PARTS = (
    ("weights", "weights", "#2f5d8a"),
    ("gradients", "gradients and accumulators", "#4f94cd"),
    ("optimizer_state", "optimizer state", "#8fbf6b"),
    ("activations", "activations", "#e3a63b"),
    ("temporary", "temporary", "#d96f4f"),
    ("io", "I/O", "#9a7fb8"),
    ("code", "code", "#8a8a8a"),
    ("imbalance", "uneven tiles", "#c9c9c9"),
)
_GOLDEN_ANGLE = 137.508  # neighbours on the colour wheel stay apart, however many there are


def ipu_colour(ipu: int) -> str:
    """The colour of an IPU."""
    return f"hsl({(210 + ipu * _GOLDEN_ANGLE) % 360:.0f},52%,{44 if ipu % 2 else 52}%)"


STYLE = """
:root{color-scheme:light dark}
body{font:15px/1.5 system-ui,sans-serif;max-width:960px;margin:2rem auto;padding:0 1rem}
h1{font-size:1.5rem;margin-bottom:.2rem}
h2{font-size:1.1rem;margin:2rem 0 .4rem}
.note{color:gray;margin:.2rem 0 1rem}
.tiles{display:flex;flex-wrap:wrap;gap:.6rem}
.tile{border:1px solid #8886;border-radius:8px;padding:.5rem .9rem;display:flex;flex-direction:column}
.tile span{color:gray;font-size:.8rem}
.legend span{margin-right:1rem;font-size:.85rem;white-space:nowrap}
.legend i{display:inline-block;width:.8em;height:.8em;margin-right:.3em;border-radius:2px}
svg{width:100%;height:auto}
svg text{font:12px system-ui,sans-serif;fill:currentColor}
svg text.on{fill:#fff;font-size:10px}
.limit{stroke:#c0392b;stroke-width:1.5;stroke-dasharray:4 3}
.tree,.tree ul{list-style:none;padding-left:1.1rem;margin:.1rem 0}
.tree small{color:gray}
.tree summary{cursor:pointer}
i.ipu{font:600 11px system-ui;color:#fff;border-radius:4px;padding:1px 6px;margin-right:3px}
table{border-collapse:collapse;width:100%}
th,td{border-bottom:1px solid #8884;text-align:left;padding:.3rem .5rem;vertical-align:top}
code{font-size:.85em;overflow-wrap:anywhere}
"""
