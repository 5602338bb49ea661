"""`python -m tfdist.tuning.program SCRIPT ...` runs a script as a process of a search.

It does what `python SCRIPT ...` does, and changes KerasTuner when the script imports it.
"""

from __future__ import annotations

import functools
import os
import runpy
import sys
from collections.abc import Sequence

from tfdist.compat.patch import after_import
from tfdist.launcher.main_program import first_path, run_as_main
from tfdist.tuning.member import Member


def _change(member: Member) -> None:
    from tfdist.tuning.patches import Searches, patches

    for patch in patches(Searches(member)):
        patch.install()


def main(words: Sequence[str]) -> None:
    """Runs `python WORDS`."""
    member = Member.of_process(os.environ)
    if member is None:
        raise SystemExit("tfdist: this program is started by `tfdist tune`")
    after_import("keras_tuner", functools.partial(_change, member))
    sys.path[0] = first_path(words)
    own = [__file__, "<frozen runpy>", str(runpy.__file__)]
    run_as_main(words, (sys.executable, "-u", *words), hidden_files=own)


if __name__ == "__main__":
    main(sys.argv[1:])
