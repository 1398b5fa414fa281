"""Makes the pieces of a self-contained page: no script, nothing loaded, every string escaped."""

from __future__ import annotations

import html
from collections.abc import Iterable, Sequence
from typing import Any

from fedjax_sim.report import axes
from fedjax_sim.text.printable import printable

STYLE_SHEET = """
:root { color-scheme: light dark; --back: #fff; --text: #1d2329; --soft: #5b6670; --line: #e1e5e9; --raised: #f8f9fa;
  --main: #f0f6fb; --main-line: #c9dfef; --note: #fdf4ee; --accent: #0072b2; }
@media (prefers-color-scheme: dark) { :root { --back: #16191d; --text: #dfe4e8; --soft: #9aa5b1; --line: #343a41;
  --raised: #1e2227; --main: #1b2833; --main-line: #2c4a61; --note: #2c221b; --accent: #56b4e9; }
  /* Colours of figures are turned around: white becomes black, and hues stay. */
  svg { filter: invert(0.92) hue-rotate(180deg); } }
* { box-sizing: border-box; }
body { margin: 0 auto; max-width: 1000px; padding: 40px 28px 64px; background: var(--back); color: var(--text);
  font: 15px/1.55 system-ui, -apple-system, "Segoe UI", Roboto, "Helvetica Neue", Arial, sans-serif; }
h1 { margin: 0; font-size: 30px; line-height: 1.2; letter-spacing: -0.01em; overflow-wrap: anywhere; }
h2 { margin: 44px 0 10px; padding-bottom: 6px; border-bottom: 1px solid var(--line); font-size: 19px; }
h3 { margin: 22px 0 4px; font-size: 14px; color: var(--soft); font-weight: 600; }
p { margin: 6px 0; }
.lead, .muted { color: var(--soft); }
.muted { font-size: 13px; }
.tiles { display: flex; flex-wrap: wrap; gap: 10px; margin: 10px 0; }
.lead + .tiles, .note + .tiles { margin-top: 24px; }
.tile { flex: 1 1 130px; border: 1px solid var(--line); border-radius: 8px; padding: 12px 14px; }
.tile b { display: block; font-size: 22px; line-height: 1.25; font-weight: 650; font-variant-numeric: tabular-nums;
  overflow-wrap: anywhere; }
.tile span { font-size: 13px; color: var(--soft); }
.tile.main { background: var(--main); border-color: var(--main-line); }
.note { margin: 12px 0; padding: 9px 14px; border-left: 4px solid #d55e00; background: var(--note); }
figure { margin: 8px 0 20px; overflow-x: auto; }
svg { display: block; width: 100%; min-width: 620px; height: auto; }
svg text { font-family: inherit !important; }
.choice { margin: 10px 0; padding: 0; border: 0; }
.choice label { display: inline-block; margin: 0 6px 6px 0; padding: 3px 12px; border: 1px solid var(--line);
  border-radius: 14px; font-size: 13px; cursor: pointer; }
.choice input { margin: 0 6px 0 0; accent-color: var(--accent); }
.choice label:has(:checked) { border-color: var(--accent); }
/* One view at a time; a browser that does not know :has shows them all. */
@supports selector(:has(a)) { .choice > .view { display: none; }
  .choice:has(.pick0:checked) > .view0, .choice:has(.pick1:checked) > .view1, .choice:has(.pick2:checked) > .view2,
  .choice:has(.pick3:checked) > .view3, .choice:has(.pick4:checked) > .view4 { display: block; } }
table { border-collapse: collapse; width: 100%; font-size: 14px; }
td, th { padding: 5px 14px 5px 0; border-bottom: 1px solid var(--line); text-align: left; vertical-align: top;
  overflow-wrap: anywhere; }
th { width: 30%; font-weight: 500; color: var(--soft); }
.rows { font-size: 13px; font-variant-numeric: tabular-nums; }
.rows th { width: auto; }
summary { cursor: pointer; font-size: 13px; color: var(--soft); }
pre { margin: 8px 0; padding: 14px 16px; border: 1px solid var(--line); border-radius: 8px; background: var(--raised);
  font: 13px/1.5 ui-monospace, "SF Mono", Menlo, Consolas, "DejaVu Sans Mono", monospace;
  white-space: pre-wrap; overflow-wrap: anywhere; }
@media print { body { padding: 0; font-size: 12px; } h2 { break-after: avoid; }
  figure, .tile, tr { break-inside: avoid; } * { print-color-adjust: exact; -webkit-print-color-adjust: exact; } }
"""
MOST_VIEWS = 5  # of a choice: the style sheet names as many


def escape(text: str) -> str:
    """Returns a text from outside as HTML: its markup, control and invisible characters are shown, and do nothing."""
    return html.escape(printable(text))


def page(title: str, parts: Iterable[str]) -> str:
    """Returns a self-contained page: one style sheet, the parts one after the other, nothing that loads or runs.

    The whole page is printable (`text.printable`), whatever its parts are.

    Args:
      title: plain text, which is escaped.
      parts: HTML; empty ones are left out.
    """
    # The browser then refuses whatever an escaping error might let in.
    policy = "default-src 'none'; style-src 'unsafe-inline'"
    return printable(
        '<!DOCTYPE html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        f'<meta http-equiv="Content-Security-Policy" content="{policy}">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<title>{escape(title)}</title>\n<style>{STYLE_SHEET}</style>\n</head>\n<body>\n"
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


def choice(name: str, views: Sequence[tuple[str, str]]) -> str:
    """Returns views of which a reader sees one at a time, by buttons above them; the first one is shown at first.

    Args:
      name: unique in the page.
      views: (text of the button, HTML of the view), at most five.
    """
    if len(views) > MOST_VIEWS:
        raise ValueError(f"views: expected at most {MOST_VIEWS}, got {len(views)}")
    buttons = [
        f'<label><input type="radio" name="{escape(name)}" class="pick{i}"{" checked" if i == 0 else ""}>'
        f"{escape(text)}</label>"
        for i, (text, _) in enumerate(views)
    ]
    shown = [f'<div class="view view{i}">{view}</div>' for i, (_, view) in enumerate(views)]
    return f'<fieldset class="choice">{"".join(buttons)}{"".join(shown)}</fieldset>'


def html_table(rows: Iterable[tuple[str, str]]) -> str:
    """Returns a table of names and values, escaped; "" without rows."""
    cells = "".join(f"<tr><th>{escape(str(key))}</th><td>{escape(str(value))}</td></tr>" for key, value in rows)
    return f"<table>{cells}</table>" if cells else ""


def table_of_rows(header: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Returns a table with a header, escaped."""
    head = "".join(f"<th>{escape(name)}</th>" for name in header)
    lines = "".join("<tr>" + "".join(f"<td>{escape(cell)}</td>" for cell in row) + "</tr>" for row in rows)
    return f'<table class="rows"><tr>{head}</tr>{lines}</table>'


def absent(words: str) -> str:
    """Returns a muted line about something that is missing, escaped."""
    return f'<p class="muted">{escape(words)}</p>'
