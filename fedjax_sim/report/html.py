"""Makes the pieces of a self-contained page: no script, nothing loaded, every string escaped."""

from __future__ import annotations

from collections.abc import Iterable
from html import escape
from typing import Any

from fedjax_sim.report import axes

__all__ = ["absent", "figure", "html_table", "page"]

STYLE = """
:root { color-scheme: light; }
* { box-sizing: border-box; }
body { margin: 0 auto; max-width: 1000px; padding: 40px 28px 64px; background: #fff; color: #1d2329;
  font: 15px/1.55 system-ui, -apple-system, "Segoe UI", Roboto, "Helvetica Neue", Arial, sans-serif; }
h1 { margin: 0; font-size: 30px; line-height: 1.2; letter-spacing: -0.01em; overflow-wrap: anywhere; }
h2 { margin: 44px 0 10px; padding-bottom: 6px; border-bottom: 1px solid #e1e5e9; font-size: 19px; }
h3 { margin: 22px 0 4px; font-size: 14px; color: #4a545e; font-weight: 600; }
p { margin: 6px 0; }
.lead, .muted { color: #5b6670; }
.muted { font-size: 13px; }
.tiles { display: grid; grid-template-columns: repeat(auto-fit, minmax(165px, 1fr)); gap: 10px; margin: 24px 0 8px; }
.tile { border: 1px solid #e1e5e9; border-radius: 8px; padding: 12px 14px; }
.tile b { display: block; font-size: 22px; line-height: 1.25; font-weight: 650; font-variant-numeric: tabular-nums;
  overflow-wrap: anywhere; }
.tile span { font-size: 13px; color: #5b6670; }
.tile.main { background: #f0f6fb; border-color: #c9dfef; }
.note { margin: 12px 0; padding: 9px 14px; border-left: 4px solid #d55e00; background: #fdf4ee; }
figure { margin: 8px 0 20px; }
svg { display: block; width: 100%; height: auto; }
svg text { font-family: inherit !important; }
table { border-collapse: collapse; width: 100%; font-size: 14px; }
td, th { padding: 5px 14px 5px 0; border-bottom: 1px solid #edf0f2; text-align: left; vertical-align: top;
  overflow-wrap: anywhere; }
th { width: 30%; font-weight: 500; color: #5b6670; }
.rows { font-size: 13px; font-variant-numeric: tabular-nums; }
.rows th { width: auto; }
pre { margin: 8px 0; padding: 14px 16px; border: 1px solid #e1e5e9; border-radius: 8px; background: #f8f9fa;
  font: 13px/1.5 ui-monospace, "SF Mono", Menlo, Consolas, "DejaVu Sans Mono", monospace;
  white-space: pre-wrap; overflow-wrap: anywhere; }
@media print { body { padding: 0; font-size: 12px; } h2 { break-after: avoid; }
  figure, .tile, tr { break-inside: avoid; } * { print-color-adjust: exact; -webkit-print-color-adjust: exact; } }
"""


def page(title: str, parts: Iterable[str]) -> str:
    """Returns a self-contained page: one style sheet, the parts one after the other, nothing that loads or runs."""
    # The browser then refuses whatever an escaping error might let in.
    policy = "default-src 'none'; style-src 'unsafe-inline'"
    return (
        '<!DOCTYPE html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        f'<meta http-equiv="Content-Security-Policy" content="{policy}">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<title>{escape(title)}</title>\n<style>{STYLE}</style>\n</head>\n<body>\n"
        + "\n".join(filter(None, parts))
        + "\n</body>\n</html>\n"
    )


def figure(name: str, draw: Any, caption: str, *arguments: Any) -> str:
    """Returns the figure that `draw(*arguments)` draws, as SVG; or a note why it could not be drawn.

    Args:
      name: unique in the page; the figure's ids begin with it.
      draw: returns a matplotlib Figure.
      caption: the text that a screen reader reads in place of the picture.
      arguments: of `draw`.
    """
    try:
        picture = axes.to_svg(draw(*arguments), name, caption)
    except ImportError:
        return absent("Figures need matplotlib: pip install fedjax_sim[plot], then write the report again.")
    except (AttributeError, KeyError, TypeError, ValueError, IndexError) as error:
        return f'<p class="note">This figure could not be drawn from the run&rsquo;s files: {escape(str(error))}</p>'
    return f"<figure>{picture}</figure>"


def html_table(rows: Iterable[tuple[str, str]]) -> str:
    """Returns a table of names and values, escaped; "" without rows."""
    cells = "".join(f"<tr><th>{escape(str(key))}</th><td>{escape(str(value))}</td></tr>" for key, value in rows)
    return f"<table>{cells}</table>" if cells else ""


def absent(words: str) -> str:
    """Returns a muted line about something that is missing, escaped."""
    return f'<p class="muted">{escape(words)}</p>'
