"""Figures as inline SVG that fill any width.

Along x everything stands in per cent of the figure, along y in pixels: a figure stretches and its text and marks do not.
What lies left of the plot (names, tick labels) is an SVG of its own, so that it can stay while the plot scrolls below it.

Legend: x in per cent of the plot, y in pixels from the top.
"""

from __future__ import annotations

import html
import math
import unicodedata
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

WIDE = 960
"""Pixels that a plot has on a wide screen; a plot that needs more scrolls in its box."""
TOP, BELOW = 12, 40
"""Pixels above the plotted area, and below it for tick labels and the name of the axis."""


# ---- text ------------------------------------------------------------------------------------------------------


def is_hidden(c: str) -> bool:
    """Whether a character leaves no trace on a page, or steers what stands around it: controls, formats (zero width,
    direction), surrogates, private use, line and paragraph separators, noncharacters. A newline is none of them."""
    code = ord(c)
    if code & 0xFFFE == 0xFFFE or 0xFDD0 <= code <= 0xFDEF:
        return True
    return c != "\n" and unicodedata.category(c) in ("Cc", "Cf", "Cs", "Co", "Zl", "Zp")


def spelt(c: str) -> str:
    """A hidden character as Python writes it: \\t, \\x1b, \\u202e, \\U000e0041."""
    return c.encode("unicode_escape").decode()


def text(value: object) -> str:
    """Any text as HTML text or as the value of an attribute, with hidden characters spelt out."""
    return html.escape("".join(spelt(c) if is_hidden(c) else c for c in str(value)))


def number(value: float) -> str:
    """A tick label: 0.05, 20, 1e-5, 1.5e4."""
    if value == 0 or 1e-3 <= abs(value) < 1e4 or math.isinf(value):
        return f"{value:g}"
    mantissa, _, power = f"{value:.6e}".partition("e")
    return f"{float(mantissa):g}e{int(power)}"


# ---- where things stand ----------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Timeline:
    """Updates from left to right: one column a stage, and within it one place an update, in the order in which they ran."""

    at: tuple[float, ...]
    """x of each update."""
    columns: tuple[tuple[int, float], ...]
    """(stage, x of its middle)."""
    column: float
    """Pixels that a column needs."""

    @property
    def width(self) -> float:
        """Pixels below which the plot scrolls."""
        return max(220.0, self.column * len(self.columns))

    @property
    def is_dense(self) -> bool:
        """Whether only small marks fit."""
        return self.column < 12


def timeline(stages: Sequence[int], *, keep_apart: bool = False) -> Timeline:
    """The places of updates whose stages are these, in their order. A column ends where the next update is of another
    stage: an independent schedule, which counts stages for each agent anew, has one column an update.

    Args:
        keep_apart: where columns are narrow, move the places of a column together, so that two marks of one lane, in
            neighbouring columns, never touch.
    """
    groups: list[list[int]] = []
    for index, stage in enumerate(stages):
        if index and stages[index - 1] == stage:
            groups[-1].append(index)
        else:
            groups.append([index])
    n = max(1, len(groups))
    column = min(24.0, max(6.4, WIDE / n))
    mark = 11.0 if column >= 12 else 6.4
    at: list[float] = []
    for c, group in enumerate(groups):
        k = len(group)
        free = (column - mark) / column * k / (k - 1) if keep_apart and k > 1 else 1.0
        spread = min(0.85, max(0.0, free))
        at += [(c + 0.5 + spread * ((r + 0.5) / k - 0.5)) / n * 100 for r in range(k)]
    columns = tuple((stages[group[0]], (c + 0.5) / n * 100) for c, group in enumerate(groups))
    return Timeline(at=tuple(at), columns=columns, column=column)


@dataclass(frozen=True, kw_only=True)
class Scale:
    """From values to pixels. Infinity stands at the upper edge; on a logarithmic scale 0 stands at the lower one."""

    low: float
    high: float
    is_log: bool
    ticks: tuple[float, ...]
    height: int

    def y(self, value: float) -> float:
        """Pixels from the top."""
        if self.is_log:
            if value <= 0:
                return TOP + self.height
            share = (math.log(value) - math.log(self.low)) / (math.log(self.high) - math.log(self.low))
        else:
            share = (value - self.low) / (self.high - self.low)
        return TOP + self.height * (1 - min(1.0, max(0.0, share)))


def scale(values: Iterable[float], *, height: int, floor: float | None = None, log: bool = False) -> Scale:
    """A scale that holds these values (what is not finite is left out), with ticks at round numbers.

    Args:
        floor: a linear scale begins here or below.
        log: be logarithmic if the positive values span more than a factor of 20.
    """
    finite = [v for v in values if math.isfinite(v)]
    positive = [v for v in finite if v > 0]
    if log and positive and max(positive) > 20 * min(positive):
        low, high = math.floor(math.log10(min(positive))), math.ceil(math.log10(max(positive) * 1.2))
        step = max(1, math.ceil((high - low) / 5))
        ticks = tuple(10.0**p for p in range(high, low - 1, -step))
        return Scale(low=10.0**low, high=10.0**high, is_log=True, ticks=ticks, height=height)
    low, high = min(finite, default=0.0), max(finite, default=1.0)
    low = low if floor is None else min(low, floor)
    if high <= low:
        low, high = (low, low + 1.0) if floor is not None else (low - 0.5, low + 0.5)
    rough = (high - low) / 4
    unit = 10.0 ** math.floor(math.log10(rough))
    step = next(m * unit for m in (1, 2, 2.5, 5, 10) if m * unit >= rough * 0.999)
    first, last = math.floor(low / step + 1e-9), math.ceil(high / step - 1e-9)
    ticks = tuple(round(n * step, 12) for n in range(first, last + 1))
    return Scale(low=ticks[0], high=ticks[-1], is_log=False, ticks=ticks, height=height)


# ---- drawing ---------------------------------------------------------------------------------------------------


def mark(x: float, y: float, shape: str, title: str, extra: str = "") -> str:
    """A shape (an id of the page's `defs`) with its tooltip; `extra` are further attributes."""
    return (
        f'<svg x="{x:.2f}%" y="{y:.1f}" class="mark"{extra}><title>{text(title)}</title>'
        f'<use href="#{shape}"/><circle r="5.5" class="touch"/></svg>'
    )


def upright(x: float, y1: float, y2: float, style: str) -> str:
    """A vertical line."""
    return f'<line x1="{x:.2f}%" x2="{x:.2f}%" y1="{y1:.1f}" y2="{y2:.1f}" class="{style}"/>'


def across(y: float, style: str, label: str = "") -> str:
    """A horizontal line over the whole plot, with a label at its right end, above it or (at the upper edge) below it."""
    line = f'<line x1="0" x2="100%" y1="{y:.1f}" y2="{y:.1f}" class="{style}"/>'
    beside = y - 5 if y > TOP + 12 else y + 14
    return line + (f'<text x="100%" dx="-4" y="{beside:.1f}" class="note end">{text(label)}</text>' if label else "")


def path(points: Sequence[tuple[float, float]], *, height: int, style: str) -> str:
    """A line through points."""
    if len(points) < 2:
        return ""
    drawn = " ".join(f"{x * 10:.1f},{y:.1f}" for x, y in points)
    tall = TOP + height + BELOW
    return (
        f'<svg x="0" y="0" width="100%" height="{tall}" viewBox="0 0 1000 {tall}" preserveAspectRatio="none">'
        f'<polyline points="{drawn}" class="{style}" vector-effect="non-scaling-stroke"/></svg>'
    )


def stage_axis(line: Timeline, *, height: int, width: float) -> str:
    """Ticks at every column and as many stage numbers as a plot of `width` pixels can hold."""
    bottom = TOP + height
    out = [across(bottom, "axis")]
    pixels = width / max(1, len(line.columns))
    needed = 10 + 7 * max((len(str(stage)) for stage, _ in line.columns), default=1)
    step = next((s for s in (1, 2, 5, 10, 20, 50, 100, 200, 500) if s * pixels >= needed), 1000)
    for place, (stage, x) in enumerate(line.columns):
        is_told = stage % step == 0 or (place == 0 and step >= 5)
        if pixels >= 4 or is_told:
            out.append(upright(x, bottom, bottom + (5 if is_told else 3), "axis"))
        if is_told:
            out.append(f'<text x="{x:.2f}%" y="{bottom + 18}" class="tick mid">{stage}</text>')
    out.append(f'<text x="50%" y="{bottom + 34}" class="name mid">stage</text>')
    return "".join(out)


def frame(*, key: str, title: str, height: int, width: float, left: float, axis: str, plot: str) -> str:
    """A figure in its own scrolling box: `axis` is what stays at the left, `plot` what moves.

    Args:
        key: an id that no other figure of the page has.
        width: pixels below which the plot scrolls.
        left: pixels of the part that stays.
    """
    tall = TOP + height + BELOW
    return (
        f'<div class="scroll" tabindex="0" role="group" aria-label="{text(title)}"><div class="chart">'
        f'<svg class="left" width="{left:.0f}" height="{tall}" aria-hidden="true">{axis}</svg>'
        f'<svg class="plot" height="{tall}" style="min-width:{width:.0f}px" role="img" aria-labelledby="{key}">'
        f'<title id="{key}">{text(title)}</title>{plot}</svg></div></div>'
    )


def graph(*, key: str, title: str, y: Scale, x: Timeline, width: float, plot: str, unit: str = "") -> str:
    """A figure of values over updates: grid, both axes, and `plot`."""
    labels = [number(tick) + unit for tick in y.ticks]
    left = 14 + 7 * max(map(len, labels))
    axis = "".join(
        f'<text x="{left - 8}" y="{y.y(tick) + 4:.1f}" class="tick end">{label}</text>'
        for tick, label in zip(y.ticks, labels, strict=True)
    )
    grid = "".join(across(y.y(tick), "grid") for tick in y.ticks)
    body = f"{grid}{stage_axis(x, height=y.height, width=width)}{plot}"
    return frame(key=key, title=title, height=y.height, width=width, left=left, axis=axis, plot=body)
