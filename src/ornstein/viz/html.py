"""HTML that needs nothing but itself: text is escaped, pictures are inside, there is no script.

Figures become SVG whose colours are variables of the page, so that they follow its light or dark
look; large ones become PNG on white paper. A `str` is text and is escaped wherever it is put; only
`Html`, which the functions here return, is markup. `measured` writes a number with its error.
"""

from __future__ import annotations

import base64
import html
import io
import math
import re
import struct
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import matplotlib
from matplotlib.figure import Figure

from ornstein.viz.images import as_png
from ornstein.viz.style import COLOURS, FAINT, GRID, INK, QUIET

LARGE = 400_000  # characters; a figure of more is kept as pixels
PNG = b"\x89PNG\r\n\x1a\n"
SHORT = 32  # characters of a cell that is not broken
WIDE = 8.0  # inches; a figure of more has a row for itself
NONE = "—"
EMPTY = ("meta", "img", "br")
# the names of colours, and what they are in the dark
DARK = {
    INK: ("ink", "#e3e8ee"),
    QUIET: ("quiet", "#9aa4af"),
    FAINT: ("faint", "#5c6570"),
    GRID: ("rule", "#2b323a"),
    "#ffffff": ("paper", "#14181d"),
}
LINES = (
    "#58a9e0", "#f0883e", "#35c29a", "#e0a3c6", "#f2b93b", "#86ccf5", "#aab2bb", "#d8709c",
    "#c9c862", "#9a92ee",
)  # fmt: skip
DARK |= {
    colour: (f"line-{i}", dark) for i, (colour, dark) in enumerate(zip(COLOURS, LINES, strict=True))
}


class Html(str):
    """Markup; any other string is text."""


def tag(name: str, /, *inside: str, **attributes: str | None) -> Html:
    """An element; text in it and in its attributes is escaped. `class_` stands for class."""
    given = {key.rstrip("_").replace("_", "-"): v for key, v in attributes.items()}
    head = "".join(
        f' {key}="{html.escape(value)}"' for key, value in given.items() if value is not None
    )
    if name in EMPTY:
        return Html(f"<{name}{head}>")
    return Html(f"<{name}{head}>{joined(inside)}</{name}>")


def joined(pieces: Iterable[str]) -> Html:
    """Pieces one after the other, text escaped."""
    return Html("".join(p if isinstance(p, Html) else html.escape(p) for p in pieces))


def lines(text: str) -> Html:
    """Text with its line breaks, and none before or after a ±."""
    escaped = html.escape(text).replace(" ± ", "&nbsp;±&nbsp;").replace("± ", "±&nbsp;")
    return Html(escaped.replace("\n", "<br>"))


def paragraphs(text: str, class_: str | None = None) -> Html:
    """Text whose empty lines part paragraphs."""
    found = [part.strip() for part in re.split(r"\n\s*\n", text)]
    return joined(tag("p", part, class_=class_) for part in found if part)


@dataclass(frozen=True)
class Table:
    """Text in rows; the first column names them. Columns of numbers are set to the right."""

    head: Sequence[str]
    rows: Sequence[Sequence[str]]
    cards: bool = False  # many columns: on a narrow screen every row becomes a list


def tabled(table: Table) -> Html:
    """A table as markup."""
    head, rows = table.head, table.rows
    for row in rows:
        if len(row) != len(head):
            raise ValueError(
                f"a row of a table has {len(row)} cells and its head {len(head)}; expected as many."
            )
    looks = [_look([row[i] for row in rows], i) for i in range(len(head))]
    top = (
        tag("th", text, scope="col", class_=look) for text, look in zip(head, looks, strict=True)
    )
    body = []
    for row in rows:
        cells = [tag("th", lines(row[0]), scope="row", class_=looks[0])]
        for text, name, look in list(zip(row, head, looks, strict=True))[1:]:
            cells.append(tag("td", tag("span", lines(text)), class_=look, data_name=name))
        body.append(tag("tr", *cells))
    inner = tag("table", tag("thead", tag("tr", *top)), tag("tbody", *body))
    return tag("div", inner, class_="table cards" if table.cards else "table", tabindex="0")


def _look(column: Sequence[str], index: int) -> str | None:
    """Numbers go to the right; what is short is kept in one line."""
    if index and all(_numeric(text) for text in column):
        return "number"
    longest = max((len(line) for text in column for line in text.split("\n")), default=0)
    return "short" if longest <= SHORT else None


def _numeric(text: str) -> bool:
    return re.fullmatch(r"(?:[\d.,±−+× ]|of|min|days|[sh])*|—", text) is not None


# ---------------------------------------------------------------- numbers


def measured(value: Any, error: Any = None) -> str:
    """'1.284 ± 0.012': two digits of the error, and as many places of the value."""
    number, spread = finite(value), finite(error)
    if number is None:
        return "not a number"
    if spread is None or spread <= 0:
        return decimal(number, 4)
    digits = _places(spread)
    return f"{decimal(number, digits)} ± {decimal(spread, digits)}"


def deviation(error: Any) -> str:
    """'± 0.012'."""
    spread = finite(error)
    return NONE if spread is None or spread <= 0 else f"± {spread:.{_places(spread)}f}"


def _places(spread: float) -> int:
    """Decimal places that show two digits; rounded first, since 0.0996 is 0.10."""
    return min(max(1 - math.floor(math.log10(float(f"{spread:.1e}"))), 0), 12)


def finite(value: Any) -> float | None:
    """A number that is one, else None."""
    good = isinstance(value, (int, float)) and not isinstance(value, bool)
    return float(value) if good and math.isfinite(value) else None


def counted(value: Any) -> str:
    """12,345."""
    return f"{value:,}" if isinstance(value, int) else NONE


def decimal(value: float, digits: int) -> str:
    """With so many decimal places and a minus sign that is one; no minus before zero."""
    return f"{round(value, digits) + 0.0:.{digits}f}".replace("-", "−")


def lasting(seconds: float) -> str:
    """3 min 05 s."""
    whole = max(0, round(seconds))
    if whole < 120:
        return f"{whole} s"
    if whole < 2 * 3600:
        return f"{whole // 60} min {whole % 60:02d} s"
    if whole < 48 * 3600:
        return f"{whole // 3600} h {whole % 3600 // 60:02d} min"
    return f"{whole / 86400:.1f} days"


# ---------------------------------------------------------------- pictures


def drawing(figure: Figure, caption: str, prefix: str) -> Html:
    """A figure with its caption; `prefix` keeps names inside it apart from those of others."""
    picture = svg(figure, caption, prefix)
    if len(picture) > LARGE:
        picture = image(as_png(figure), caption, "paper")
    wide = figure.get_figwidth() > WIDE
    inner = tag("div", picture, class_="scroll", tabindex="0") if wide else picture
    return tag("figure", inner, tag("figcaption", caption), class_="wide" if wide else None)


def svg(figure: Figure, label: str, prefix: str) -> Html:
    """A figure as inline SVG in the colours of the page."""
    content = io.StringIO()
    nothing = dict.fromkeys(("Date", "Creator", "Format", "Type"))
    with matplotlib.rc_context({"svg.hashsalt": "ornstein", "svg.fonttype": "path"}):
        figure.savefig(content, format="svg", facecolor="white", metadata=nothing)
    text = content.getvalue()
    text = text[text.index("<svg") :]
    for unneeded in (r"<!--.*?-->", r"<style.*?</style>", r"<metadata>.*?</metadata>"):
        text = re.sub(unneeded, "", text, flags=re.DOTALL)
    width, height = figure.get_size_inches() * 72
    head = (
        f'<svg viewBox="0 0 {width:g} {height:g}" role="img" aria-label="{html.escape(label)}" '
        f'style="max-width: {width / 72 * 6.2:.4g}rem">'
    )
    body = text[text.index(">") + 1 :]
    body = body.replace("xlink:href=", "href=")
    body = re.sub(r'(\bid="|\bhref="#|url\(#)', rf"\g<1>{prefix}-", body)
    body = re.sub(r"\s*\n\s*", " ", body)
    body = re.sub(r"(?<=: )#[0-9a-f]{6}\b", _variable, body)
    return Html(head + body.strip())


def _variable(colour: re.Match[str]) -> str:
    known = _NAMES.get(colour[0])
    return colour[0] if known is None else f"var(--{known})"


_NAMES = {colour.lower(): name for colour, (name, _) in DARK.items()}


def photograph(content: bytes, caption: str) -> Html:
    """A picture from a file with its caption."""
    shown = image(content, caption, "paper")
    wide = content[:8] == PNG and struct.unpack(">I", content[16:20])[0] > 96 * WIDE
    return tag("figure", shown, tag("figcaption", caption), class_="wide" if wide else None)


def image(content: bytes, alt: str, class_: str | None = None) -> Html:
    """A PNG inside the page."""
    if content[:8] != PNG or len(content) < 24:
        return tag("p", "This picture can't be shown: it is not a PNG file.", class_="missing")
    width, height = struct.unpack(">II", content[16:24])
    data = base64.b64encode(content).decode("ascii")
    return tag(
        "img",
        src=f"data:image/png;base64,{data}",
        alt=alt,
        width=str(width),
        height=str(height),
        class_=class_,
    )


# ---------------------------------------------------------------- sections


@dataclass(frozen=True)
class Section:
    """A part of a report. Everything in it is text, and escaped."""

    title: str
    text: str = ""  # paragraphs, with empty lines between them
    table: Table | None = None
    note: str = ""  # under the table, in small print
    figures: Sequence[tuple[str, Figure]] = ()  # what each of them shows, and the figure
    images: Sequence[tuple[str, Path]] = ()  # titles and PNG files
    folded: Sequence[tuple[str, Table]] = ()  # tables to be opened by whoever wants them


def rendered(section: Section, name: str) -> Html:
    """A section as markup; `name` is its address in the page."""
    pieces = [tag("h2", section.title), paragraphs(section.text)]
    if section.table is not None:
        pieces.append(tabled(section.table))
    pieces.append(paragraphs(section.note, "note"))
    if section.figures:
        drawn = [drawing(f, c, f"{name}-{i}") for i, (c, f) in enumerate(section.figures)]
        pieces.append(tag("div", *drawn, class_="figures"))
    if section.images:
        shown = [_image(caption, path) for caption, path in section.images]
        pieces.append(tag("div", *shown, class_="images"))
    for heading, table in section.folded:
        pieces.append(tag("details", tag("summary", heading), tabled(table)))
    return tag("section", *pieces, id=name)


def _image(caption: str, path: Path) -> Html:
    try:
        content = Path(path).read_bytes()
    except OSError as error:
        return tag("p", f"{caption} can't be read ({error.strerror}).", class_="missing")
    return photograph(content, caption)


# ---------------------------------------------------------------- the whole


def page(title: str, *body: str) -> str:
    """A whole document."""
    head = tag(
        "head",
        tag("meta", charset="utf-8"),
        tag("meta", name="viewport", content="width=device-width, initial-scale=1"),
        tag("meta", name="color-scheme", content="light dark"),
        tag("title", title),
        tag("style", Html(style_sheet())),
    )
    whole = tag("html", head, tag("body", tag("main", *body)), lang="en")
    return f"<!doctype html>\n{whole}\n"


def style_sheet() -> str:
    """All of the look."""
    light = "; ".join(f"--{name}: {colour}" for colour, (name, _) in DARK.items())
    dark = "; ".join(f"--{name}: {colour}" for name, colour in DARK.values())
    return (
        f":root {{ color-scheme: light dark; {light} }}\n"
        f"@media (prefers-color-scheme: dark) {{ :root {{ {dark} }} }}\n{_RULES}"
    )


_RULES = """
* { box-sizing: border-box }
body { margin: 0; background: var(--paper); color: var(--ink); -webkit-text-size-adjust: 100%;
  font: 16px/1.55 system-ui, -apple-system, "Segoe UI", Roboto, "Helvetica Neue", sans-serif }
main { max-width: 72rem; margin: 0 auto; padding: 2.5rem 1.25rem 4rem }
h1 { font-size: 1.75rem; line-height: 1.2; margin: 0 0 .75rem; letter-spacing: -.015em }
h2 { font-size: 1.2rem; margin: 0 0 .5rem; letter-spacing: -.01em }
p { max-width: 44rem; margin: 0 0 .75rem; overflow-wrap: break-word }
p.missing, p.note { color: var(--quiet); font-size: .875rem }
section { border-top: 1px solid var(--rule); margin-top: 2.25rem; padding-top: 1.5rem }
nav { display: flex; flex-wrap: wrap; gap: .25rem 1.25rem; margin-top: 1rem; font-size: .875rem }
nav a { color: var(--quiet); text-decoration: none; border-bottom: 1px solid var(--rule) }
nav a:hover, nav a:focus { color: var(--ink); border-color: currentColor }
.table { overflow-x: auto; margin: .75rem 0 1rem }
.cards table { font-size: .8125rem }
table { border-collapse: collapse; font-size: .875rem; line-height: 1.4;
  font-variant-numeric: tabular-nums; border-bottom: 1px solid var(--quiet) }
th, td { padding: .4rem 1rem .4rem 0; text-align: left; vertical-align: top }
th:last-child, td:last-child { padding-right: 0 }
thead th { color: var(--quiet); font-weight: 500; vertical-align: bottom; white-space: nowrap;
  border-top: 1px solid var(--quiet); border-bottom: 1px solid var(--quiet) }
tbody tr + tr > * { border-top: 1px solid var(--rule) }
tbody th { font-weight: 600; overflow-wrap: anywhere; min-width: 7rem }
td { overflow-wrap: break-word; max-width: 24rem }
.number { text-align: right }
.number, .short { white-space: nowrap }
.figures, .images { display: grid; gap: 1.5rem 2rem; align-items: start; margin: 1rem 0;
  grid-template-columns: repeat(auto-fit, minmax(min(100%, 27rem), 1fr)) }
.images { grid-template-columns: repeat(auto-fill, minmax(min(100%, 16rem), 1fr)) }
.figures .wide { grid-column: 1 / -1 }
.scroll { overflow-x: auto }
.scroll > * { min-width: 44rem }
figure { margin: 0; min-width: 0 }
figcaption { color: var(--quiet); font-size: .8125rem; line-height: 1.45; margin-top: .4rem;
  overflow-wrap: break-word }
svg { display: block; width: 100%; height: auto; fill: var(--ink) }
svg * { stroke-linejoin: round; stroke-linecap: butt }
img { display: block; max-width: 100%; height: auto }
img.paper { background: #fff; border-radius: 4px }
details { margin: .5rem 0; font-size: .875rem }
summary { cursor: pointer; color: var(--quiet) }
summary:hover { color: var(--ink) }
@media (min-width: 40rem) { .images .wide { grid-column: span 2 } }
@media (max-width: 40rem) {
  main { padding: 1.5rem 1rem 3rem }
  h1 { font-size: 1.45rem }
  tbody th { min-width: 5rem }
  .cards table, .cards tbody, .cards tr, .cards td, .cards tbody th { display: block }
  .cards table { border-bottom: 0; font-size: .875rem }
  .cards thead { display: none }
  .cards tr { border-top: 1px solid var(--quiet); padding: .5rem 0 }
  .cards tbody th { padding: 0 0 .15rem; font-size: 1rem }
  .cards tbody tr > td { display: flex; justify-content: space-between; gap: 1rem;
    padding: .15rem 0; text-align: right; white-space: normal; border-top: 0; max-width: none }
  .cards tbody tr > th { border-top: 0 }
  .cards td::before { content: attr(data-name); color: var(--quiet); text-align: left; flex: none }
}
@media print { .table { overflow: visible } section { break-inside: avoid } }
"""
