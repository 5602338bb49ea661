"""Writes down what users see of tfdist, one thing a line, so that a diff shows what becomes different for them.

Example:
    python tools/public_surface.py                 # renews tests/unit/surface
    python tools/public_surface.py /tmp/surface    # writes into another folder
"""

from __future__ import annotations

import sys
from pathlib import Path

_ROOT = Path(__file__).resolve().parent.parent
FROZEN = _ROOT / "tests" / "unit" / "surface"


def main(arguments: list[str]) -> int:
    """Writes all parts into the folder that is named, or into that of the test; returns the exit code."""
    # What is written down is this folder's tfdist, whichever is installed.
    sys.path.insert(0, str(_ROOT))
    from tools.surface.commands import commands
    from tools.surface.environment import environment
    from tools.surface.events import events
    from tools.surface.messages import messages
    from tools.surface.names import names
    from tools.surface.supervision import exit_codes, progress

    folder = Path(arguments[0]) if arguments else FROZEN
    for part in (names, commands, events, messages, progress, environment, exit_codes):
        (folder / f"{part.__name__}.txt").write_text("".join(f"{line}\n" for line in part()), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
