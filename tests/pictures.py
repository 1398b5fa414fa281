"""What the figures of a page look like in the tests: drawn where a test is about that, else the words that are in them.

Matplotlib takes longer for the figures of one page than a tiny run does for all of its rounds. Figures are made in any
case, from the run's records; what is left out is their layout and their lines.
"""

from __future__ import annotations

from typing import Any
from xml.etree import ElementTree

from fedjax_sim.report import axes

drawn = axes.to_svg


def described(figure: Any, prefix: str, description: str) -> str:
    """The words of a figure, in the place of what `to_svg` draws."""
    from matplotlib.text import Text

    root = ElementTree.Element("svg", {"role": "img", "aria-label": description})
    for text in figure.findobj(Text):
        ElementTree.SubElement(root, "text").text = text.get_text()
    return ElementTree.tostring(root, encoding="unicode")


def choose(mark: Any) -> None:
    """Draws the figures that a mark `pictures` names, all where it names none, and none without one."""

    def to_svg(figure: Any, prefix: str, description: str) -> str:
        draws = mark is not None and (not mark.args or prefix in mark.args)
        return (drawn if draws else described)(figure, prefix, description)

    axes.to_svg = to_svg
