"""What pictures are drawn with, as SVG: elements, axes with round ticks, legends, and the whole picture.

Colors and lines are in ``page/chart.css``, which the page has, too. SVG 1.1, second edition, W3C 2011.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Sequence
from html import escape
from importlib.resources import files
from math import ceil, floor, log10
from typing import NamedTuple
from unicodedata import east_asian_width

from torchprof.errors import printable
from torchprof.run.formats import short_time

WIDTH = 1160
"""The width of a chart in pixels."""
CLASSES = 7
"""So many classes of layers have a color of their own: more colors would be too similar."""

_FAMILY = "system-ui, 'Segoe UI', Roboto, 'Helvetica Neue', Arial, sans-serif"
_MARGIN = 16
_LETTER = 6.4  # pixels of a letter of 12 pixels, in the mean


def tag(name: str, *inside: str, **attributes: object) -> str:
    """An element of SVG. ``inside`` is markup, values of attributes are escaped; a ``_`` in their names is a ``-``, or
    at the end nothing: ``class_``."""
    values = (
        f' {key.rstrip("_").replace("_", "-")}="{escape(printable(_text_of(value)))}"'
        for key, value in attributes.items()
        if value is not None
    )
    return f"<{name}{''.join(values)}>{''.join(inside)}</{name}>" if inside else f"<{name}{''.join(values)}/>"


def _text_of(value: object) -> str:
    """A number with a tenth of a pixel; anything else as it is."""
    return f"{value:.1f}".removesuffix(".0") if isinstance(value, float) else str(value)


def text(words: str, x: float, y: float, more: str = "", **attributes: object) -> str:
    """A text, and ``more`` after it in a lighter color."""
    lighter = [tag("tspan", escape(printable(more)), dx=6, class_="lighter")] if more else []
    return tag("text", escape(printable(words)), *lighter, x=float(x), y=float(y), **attributes)


def hint(words: Iterable[str]) -> str:
    """What is shown under the mouse, a line for each text."""
    return tag("title", escape("\n".join(map(printable, words))))


def width_of(words: str) -> float:
    """About how wide a text is, in pixels: East Asian letters are twice as wide as others."""
    return sum(_LETTER * (1 + (east_asian_width(letter) in "WF")) for letter in printable(words))


def fitted(words: str, width: float) -> str:
    """A text that is shortened to a width in pixels, without unprintable characters; "" if hardly any of it fits."""
    words = printable(words)
    if width_of(words) <= width:
        return words
    while words and width_of(words) > width - _LETTER:
        words = words[:-1]
    return f"{words}…" if len(words) > 2 else ""


class Axis:
    """The scale from the values between ``least`` and ``most`` to the pixels between ``first`` and ``last``; linear, or
    ``log`` (base 10), which begins and ends at a power of ten."""

    def __init__(self, least: float, most: float, first: float, last: float, *, log: bool = False) -> None:
        if log:
            least = floor(log10(least))
            most = max(ceil(log10(most)), least + 1)
        self.least, self.most = least, most if most > least else least + 1
        self.first, self.last, self.log = first, last, log

    def __call__(self, value: float) -> float:
        """The pixel of a value; outside of the axis, that of its end."""
        at = log10(value) if self.log else value
        share = (min(max(at, self.least), self.most) - self.least) / (self.most - self.least)
        return self.first + share * (self.last - self.first)

    def ticks(self, count: int, *, binary: bool = False) -> list[float]:
        """Round values, about ``count``: 1, 2 or 5 times a power of ten, or powers of two for bytes."""
        if self.log:
            every = ceil((self.most - self.least) / count)
            return [10.0**power for power in range(int(self.least), int(self.most) + 1, every)]
        least_step = (self.most - self.least) / max(count, 1)
        if binary:
            step = 2.0 ** max(ceil(_log2(least_step)), 0)
        else:
            power = 10.0 ** floor(log10(least_step))
            step = next(power * times for times in (1, 2, 5, 10) if power * times >= least_step * 0.999)
        first = ceil(self.least / step - 1e-9)
        return [number * step for number in range(first, floor(self.most / step + 1e-9) + 1)]


def _log2(value: float) -> float:
    return log10(value) / log10(2)


def axis_x(axis: Axis, top: float, bottom: float, words: Callable[[float], str], title: str = "") -> str:
    """An axis at the bottom, with grid lines up to ``top``."""
    parts = []
    for value in axis.ticks(max(int(abs(axis.last - axis.first) / 90), 2)):
        at = axis(value)
        parts.append(tag("line", x1=at, x2=at, y1=float(top), y2=float(bottom), class_="grid"))
        is_last = at + width_of(words(value)) / 2 > axis.last + _MARGIN  # it would leave the picture
        parts.append(text(words(value), at, bottom + 14, text_anchor="end" if is_last else "middle"))
    if title:
        parts.append(text(title, (axis.first + axis.last) / 2, bottom + 30, text_anchor="middle"))
    return "".join(parts)


def axis_y(
    axis: Axis, left: float, right: float, words: Callable[[float], str], title: str = "", *, binary: bool = False
) -> str:
    """An axis on the left, with grid lines to ``right``."""
    parts = []
    for value in axis.ticks(max(int(abs(axis.last - axis.first) / 40), 2), binary=binary):
        at = axis(value)
        parts.append(tag("line", x1=float(left), x2=float(right), y1=at, y2=at, class_="grid"))
        parts.append(text(words(value), left - 6, at + 4, text_anchor="end"))
    if title:
        middle = (axis.first + axis.last) / 2
        parts.append(text(title, 12, middle, text_anchor="middle", transform=f"rotate(-90 12 {middle:.1f})"))
    return "".join(parts)


def plot(x: Axis, y: Axis, units: str) -> str:
    """The area between two axes, unseen: on the page, their values are shown at the mouse in it. ``units``: of x and of
    y, as in ``page/charts.js``."""
    scales = " ".join(f"{axis.least} {axis.most} {axis.log:d}" for axis in (x, y))
    left, top = min(x.first, x.last), min(y.first, y.last)
    size = {"width": abs(x.last - x.first), "height": abs(y.last - y.first)}
    return tag("rect", x=float(left), y=float(top), **size, class_="plot", data_scales=scales, data_units=units)


def time_words(ns: float) -> str:
    """A round time on an axis."""
    return short_time(ns) if ns else "0"


class Sign(NamedTuple):
    """A sign of a legend: the class of its color, and what it means."""

    class_: str
    words: str


def drawn_legend(signs: Sequence[Sign], width: float, top: float) -> tuple[str, float]:
    """The signs in lines of a width, from ``top`` down; and the height of these."""
    parts: list[str] = []
    x, y = 0.0, top
    for sign in signs:
        room = 30 + width_of(sign.words)
        if x and x + room > width:
            x, y = 0.0, y + 18
        parts.append(tag("rect", x=x, y=y, width=11, height=11, class_=sign.class_))
        parts.append(text(sign.words, x + 16, y + 10))
        x += room
    return "".join(parts), (y - top + 18 if signs else 0)


def picture(
    title: str,
    caption: str,
    body: Sequence[str],
    size: tuple[float, float],
    signs: Sequence[Sign] = (),
) -> str:
    """A chart of this size in pixels, with its title and a caption above it and its legend below it."""
    width, height = size
    lines = _lines(caption, width)
    head = 20 + 15 * len(lines)
    below, height_below = drawn_legend(signs, width, head + height + 8)
    parts = [
        text(title, 0, 13, class_="title"),
        *(text(line, 0, 31 + 15 * number, class_="caption") for number, line in enumerate(lines)),
        tag("g", *body, transform=f"translate(0 {head})"),
        below,
    ]
    whole = head + height + 8 + height_below
    box = f"{-_MARGIN} {-_MARGIN} {width + 2 * _MARGIN:.0f} {whole + 2 * _MARGIN:.0f}"
    return tag(
        "svg",
        *parts,
        xmlns="http://www.w3.org/2000/svg",
        viewBox=box,
        class_="chart",
        role="img",
        aria_label=title,
        font_size=12,
        font_family=_FAMILY,
    )


def _lines(words: str, width: float) -> list[str]:
    """A text in lines of a width."""
    lines = [""]
    for word in printable(words).split():
        longer = f"{lines[-1]} {word}".strip()
        lines = [*lines[:-1], longer] if width_of(longer) <= width else [*lines, word]
    return [line for line in lines if line]


def standalone(svg: str) -> str:
    """The picture as a file of its own: with its size, its style and a white ground. Programs other than browsers do
    not read variables of CSS, so their values in the light colors are written out."""
    css = files("torchprof.reports").joinpath("page").joinpath("chart.css").read_text(encoding="utf-8")
    css = re.sub(r"var\(--[\w-]+, ([^()]+)\)", r"\1", css).replace(".chart ", "")
    box = re.search(r'viewBox="(\S+) (\S+) (\S+) (\S+)"', svg)
    assert box is not None
    left, top, width, height = box.groups()
    head = tag("style", css) + tag("rect", x=left, y=top, width=width, height=height, fill="#ffffff")
    start = svg.index(">") + 1
    sized = svg[: start - 1] + f' width="{width}" height="{height}">'
    return f'<?xml version="1.0" encoding="UTF-8"?>\n{sized}{head}{svg[start:]}\n'
