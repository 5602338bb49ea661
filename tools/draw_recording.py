"""Draws a recorded run as an animated picture of a terminal; without animation it shows the last state.

A line of the recording is a second, a tab and what the terminal shows from then on. A line that begins with "\r"
(two characters) replaces the one before it, as progress bars do; one that begins with "<" is put beside it.

Example:
    python tools/draw_recording.py docs/pictures/killed_run.txt
"""

from __future__ import annotations

import re
import sys
from dataclasses import dataclass
from pathlib import Path
from xml.sax.saxutils import escape

# Pixels: the widest that a character of 12 pixels is, and the height of a line.
_ADVANCE, _LINE = 7.6, 17
# Seconds for which the last state stands.
_STILL = 8
# What a progress bar has done is heavy and green, the rest is thin.
_BAR, _GREEN = re.compile("(\N{BOX DRAWINGS HEAVY HORIZONTAL}+)"), r'<tspan fill="#56d364">\1</tspan>'
_COLOURS = {"tfdist:": "notice", "<": "action", "$": "command"}

_PICTURE = """<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" role="img">
<style>
text{{font:12px ui-monospace,Menlo,Consolas,'DejaVu Sans Mono',monospace;white-space:pre}}
text{{animation:{length}s step-end infinite}}
.output{{fill:#c9d1d9}} .command{{fill:#ffffff;font-weight:bold}}
.notice{{fill:#f2cc60}} .action{{fill:#ff7b72;font-weight:bold}}
{styles}
@media (prefers-reduced-motion:reduce){{text{{animation:none}}}}
</style>
<rect width="100%" height="100%" rx="8" fill="#0d1117"/>
<rect width="100%" height="28" rx="8" fill="#30363d"/>
<circle cx="18" cy="14" r="5" fill="#ff7b72"/>
<circle cx="36" cy="14" r="5" fill="#f2cc60"/>
<circle cx="54" cy="14" r="5" fill="#56d364"/>
{lines}
</svg>
"""


@dataclass
class Shown:
    """What stands in a line of the terminal, and from when to when."""

    text: str
    row: int
    begins: float
    ends: float | None = None
    column: int = 0


def shown(recording: str) -> list[Shown]:
    """The texts of a recording with their places and times.

    Example:
        >>> [(text.text, text.row, text.ends) for text in shown("0\\t$ a\\n1\\tb\\n2\\t\\\\rc\\n")]
        [('$ a', 0, None), ('b', 1, 2.0), ('c', 1, None)]
    """
    found: list[Shown] = []
    for line in recording.splitlines():
        second, text = line.split("\t")
        begins = float(second)
        if text.startswith("\\r"):
            found[-1].ends = begins
            found.append(Shown(text[2:], found[-1].row, begins))
        elif text.startswith("<"):
            found.append(Shown(text, found[-1].row, begins, column=len(found[-1].text) + 2))
        else:
            found.append(Shown(text, found[-1].row + 1 if found else 0, begins))
    return found


def drawn(recording: str) -> str:
    """The picture, as SVG."""
    texts = shown(recording)
    length = texts[-1].begins + _STILL
    styles, lines = [], []
    for number, one in enumerate(texts):
        begins, ends = 100 * one.begins / length, 100 if one.ends is None else 100 * one.ends / length
        after = "" if one.ends is None else f"{ends:.2f}%,to{{opacity:0}}"
        styles.append(f"@keyframes t{number}{{0%{{opacity:0}}{begins:.2f}%{{opacity:1}}{after}}}")
        kind = next((name for start, name in _COLOURS.items() if one.text.startswith(start)), "output")
        still = ";opacity:0" if one.ends is not None else ""
        lines.append(
            f'<text class="{kind}" x="{14 + one.column * _ADVANCE:.0f}" y="{52 + one.row * _LINE}" '
            f'style="animation-name:t{number}{still}">{_BAR.sub(_GREEN, escape(one.text))}</text>'
        )
    return _PICTURE.format(
        width=round(28 + max(len(one.text) + one.column for one in texts) * _ADVANCE),
        height=64 + max(one.row for one in texts) * _LINE,
        length=round(length),
        styles="\n".join(styles),
        lines="\n".join(lines),
    )


if __name__ == "__main__":
    for path in map(Path, sys.argv[1:]):
        path.with_suffix(".svg").write_text(drawn(path.read_text(encoding="utf-8")), encoding="utf-8")
