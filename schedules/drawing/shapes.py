# SPDX-License-Identifier: Apache-2.0
"""A picture as a list of shapes, and its forms: SVG for screens, PDF and TikZ for print.

Each form draws the shapes in order, in points from the upper left corner. What is not ASCII is a `?` in PDF, whose
fonts have no more; TikZ pictures need `\\usepackage{tikz}`.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from typing import Final, Literal, NamedTuple, TypeAlias

Size: TypeAlias = float
Point: TypeAlias = tuple[Size, Size]
INK: Final = "#202020"
GLYPH: Final = 0.62
"""The width of a character, relative to the size of the font."""
COURIER: Final = 0.6
"""The same, of the font in PDF."""


class Box(NamedTuple):
    """A rectangle, filled unless `fill` is empty, and framed if `thick`; `hint` says what it is."""

    x: Size
    y: Size
    wide: Size
    high: Size
    fill: str
    frame: str = ""
    thick: Size = 0
    hint: str = ""


class Words(NamedTuple):
    """A line of text that begins, ends, or is centered at a point on its base line; `inside`: the label of a box."""

    x: Size
    y: Size
    text: str
    size: Size = 11
    anchor: Literal["start", "middle", "end"] = "start"
    color: str = INK
    bold: bool = False
    inside: bool = False


class Curve(NamedTuple):
    """A line through points, or the area that they enclose."""

    points: Sequence[Point]
    color: str
    filled: bool = False


Drawn: TypeAlias = Box | Words | Curve


class Picture(NamedTuple):
    """Shapes on a white page, and the forms of it."""

    wide: Size
    high: Size
    shapes: Sequence[Drawn]

    def svg(self) -> str:
        """Return the picture as SVG."""
        return write_svg(self)

    def pdf(self) -> bytes:
        """Return the picture as a PDF of one page of its size, in points, in the fonts that every viewer has."""
        return write_pdf(self)

    def tikz(self) -> str:
        r"""Return the picture as a `tikzpicture`, for `\input` into a paper; sizes are in points."""
        return write_tikz(self)


# ----------------------------------------------------------------------------------------------------------------- SVG


def write_svg(picture: Picture) -> str:
    """Return a picture as SVG.

    >>> print(write_svg(Picture(8, 4, [Box(1, 2, 3, 1, "#ff0000")])).splitlines()[2])
    <rect x="1.00" y="2.00" width="3.00" height="1.00" fill="#ff0000"/>
    """
    w, h = f"{picture.wide:.2f}", f"{picture.high:.2f}"
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{w}" height="{h}" viewBox="0 0 {w} {h}" '
        f'font-family="DejaVu Sans Mono, Menlo, Consolas, monospace" fill="{INK}">\n'
        f'<rect width="100%" height="100%" fill="#ffffff"/>\n{"".join(map(_svg, picture.shapes))}</svg>\n'
    )


def _svg(shape: Drawn) -> str:
    if isinstance(shape, Box):
        frame = f' stroke="{shape.frame}" stroke-width="{shape.thick:.2g}"' if shape.thick else ""
        end = f"><title>{_escape(shape.hint)}</title></rect>\n" if shape.hint else "/>\n"
        place = f'x="{shape.x:.2f}" y="{shape.y:.2f}" width="{shape.wide:.2f}" height="{shape.high:.2f}"'
        return f'<rect {place} fill="{shape.fill or "none"}"{frame}{end}'
    if isinstance(shape, Words):
        style = "" if shape.color == INK else f' fill="{shape.color}"'
        style += "" if shape.anchor == "start" else f' text-anchor="{shape.anchor}"'
        style += ' font-weight="bold"' * shape.bold + ' pointer-events="none"' * shape.inside  # the box's hint shows
        place = f'x="{shape.x:.2f}" y="{shape.y:.2f}" font-size="{shape.size:g}"'
        return f"<text {place}{style}>{_escape(shape.text)}</text>\n"
    path = "L".join(f"{x:.2f},{y:.2f}" for x, y in shape.points)
    return f'<path d="M{path}{"Z" * shape.filled}" {"fill" if shape.filled else "stroke"}="{shape.color}"/>\n'


def _escape(words: str) -> str:
    """Return `words` escaped, with characters that XML does not allow replaced."""
    from html import escape  # rarely needed, and slow to import

    return escape(re.sub("[^\t\n\r\x20-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]", "\ufffd", words))


# ----------------------------------------------------------------------------------------------------------------- PDF


def write_pdf(picture: Picture) -> bytes:
    """Return a picture as a PDF of one page of its size, in the fonts that every viewer has.

    >>> write_pdf(Picture(8, 4, []))[:8]
    b'%PDF-1.4'
    """
    content = "\n".join(line for shape in picture.shapes for line in _pdf(shape, picture.high)).encode("ascii")
    fonts = " ".join(f"/F{k} {4 + k} 0 R" for k in (1, 2))
    objects = [
        b"<</Type/Catalog/Pages 2 0 R>>",
        b"<</Type/Pages/Kids[3 0 R]/Count 1>>",
        f"<</Type/Page/Parent 2 0 R/MediaBox[0 0 {picture.wide:.2f} {picture.high:.2f}]/Contents 4 0 R"
        f"/Resources<</Font<<{fonts}>>>>>>".encode(),
        b"<</Length %d>>\nstream\n%s\nendstream" % (len(content), content),
        b"<</Type/Font/Subtype/Type1/BaseFont/Courier>>",
        b"<</Type/Font/Subtype/Type1/BaseFont/Courier-Bold>>",
    ]
    file, places = b"%PDF-1.4\n", list[int]()
    for number, one in enumerate(objects, 1):
        places.append(len(file))
        file += b"%d 0 obj\n%s\nendobj\n" % (number, one)
    table = b"".join(b"%010d 00000 n \n" % place for place in places)
    count = len(objects) + 1
    head = b"xref\n0 %d\n0000000000 65535 f \n" % count
    return file + head + table + b"trailer<</Size %d/Root 1 0 R>>\nstartxref\n%d\n%%%%EOF\n" % (count, len(file))


def _pdf(shape: Drawn, high: Size) -> Iterator[str]:
    """Yield the operators that draw a shape; y counts from below."""
    if isinstance(shape, Box):
        place = f"{shape.x:.2f} {high - shape.y - shape.high:.2f} {shape.wide:.2f} {shape.high:.2f} re"
        if shape.fill:
            yield f"{_rgb(shape.fill)} rg {place} f"
        if shape.thick:
            yield f"{_rgb(shape.frame)} RG {shape.thick:.2g} w {place} S"
    elif isinstance(shape, Words):
        text = re.sub(r"([\\()])", r"\\\1", _printable(shape.text).encode("ascii", "replace").decode())
        shift = {"start": 0.0, "middle": 0.5, "end": 1.0}[shape.anchor] * len(shape.text) * COURIER * shape.size
        font = f"/F{1 + shape.bold} {shape.size:g} Tf"
        yield f"BT {_rgb(shape.color)} rg {font} {shape.x - shift:.2f} {high - shape.y:.2f} Td ({text}) Tj ET"
    elif shape.points:
        first, *others = (f"{x:.2f} {high - y:.2f}" for x, y in shape.points)
        path = f"{first} m {' '.join(f'{one} l' for one in others)}"
        color = f"{_rgb(shape.color)} {'rg' if shape.filled else 'RG 1 w'}"
        yield f"{color} {path} {'f' if shape.filled else 'S'}"


def _printable(words: str) -> str:
    """Return `words` without control characters and ends of lines."""
    return "".join(letter if letter.isprintable() else "?" for letter in words)


def _rgb(color: str) -> str:
    return " ".join(f"{part / 255:.3f}" for part in bytes.fromhex(color[1:]))


# ---------------------------------------------------------------------------------------------------------------- TikZ


BOLD: Final = r"\bfseries"
SPECIAL: Final = {
    **{letter: f"\\{letter}" for letter in "#$%&_{}"},
    "\\": r"\textbackslash{}",
    "~": r"\textasciitilde{}",
    "^": r"\textasciicircum{}",
}


def write_tikz(picture: Picture) -> str:
    r"""Return a picture as a `tikzpicture`, for `\input` into a paper.

    >>> print(write_tikz(Picture(8, 4, [Words(1, 2, "50 %", bold=True)])), end="")
    \begin{tikzpicture}[x=1bp, y=-1bp, every node/.style={inner sep=0, outer sep=0, font=\ttfamily}]
    \definecolor{c0}{HTML}{202020}
    \path (0,0) rectangle (8.00,4.00);
    \node[c0, anchor=base west] at (1.00,2.00) {\fontsize{11}{11}\selectfont\bfseries{}50 \%};
    \end{tikzpicture}
    """
    colors: dict[str, str] = {}
    lines = "".join([f"{_tikz(shape, colors)};\n" for shape in picture.shapes])
    defined = "".join([f"\\definecolor{{{name}}}{{HTML}}{{{color[1:].upper()}}}\n" for color, name in colors.items()])
    return (
        "\\begin{tikzpicture}[x=1bp, y=-1bp, every node/.style={inner sep=0, outer sep=0, font=\\ttfamily}]\n"
        f"{defined}\\path (0,0) rectangle ({picture.wide:.2f},{picture.high:.2f});\n{lines}\\end{{tikzpicture}}\n"
    )


def _tikz(shape: Drawn, colors: dict[str, str]) -> str:
    """Return the command that draws a shape, and give new colors names."""

    def mix(color: str) -> str:
        return colors.setdefault(color, f"c{len(colors)}")

    if isinstance(shape, Box):
        fill = f"fill={mix(shape.fill)}" if shape.fill else ""
        frame = f"draw={mix(shape.frame)}, line width={shape.thick:.2g}bp" if shape.thick else ""
        corner = f"({shape.x + shape.wide:.2f},{shape.y + shape.high:.2f})"
        return f"\\path[{', '.join(filter(None, (fill, frame)))}] ({shape.x:.2f},{shape.y:.2f}) rectangle {corner}"
    if isinstance(shape, Words):
        anchor = {"start": "base west", "middle": "base", "end": "base east"}[shape.anchor]
        font = f"\\fontsize{{{shape.size:g}}}{{{shape.size:g}}}\\selectfont{BOLD * shape.bold}{{}}"
        text = "".join(SPECIAL.get(letter, letter) for letter in _printable(shape.text))
        return f"\\node[{mix(shape.color)}, anchor={anchor}] at ({shape.x:.2f},{shape.y:.2f}) {{{font}{text}}}"
    path = " -- ".join(f"({x:.2f},{y:.2f})" for x, y in shape.points)
    return f"\\path[{'fill' if shape.filled else 'draw'}={mix(shape.color)}] {path}{' -- cycle' * shape.filled}"
