"""What a zygote runs: `python -u zygote_program.py DESCRIPTOR TARGET…`, by its path like the guardian.

The worker's own interpreter settings and module path apply, so that it may import another tfdist than the launcher's,
or none: what this file needs of tfdist is forgotten again before anything else is imported.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence


def _main(descriptor: int, words: list[str]) -> None:
    launch_folder = os.path.dirname(os.path.abspath(__file__))
    if not getattr(sys.flags, "safe_path", False):
        del sys.path[0]  # the folder of this file
    sys.path.insert(0, os.path.dirname(os.path.dirname(launch_folder)))
    from tfdist.launch import main_module, zygote_server

    del sys.path[0]
    for name in [name for name in sys.modules if name.partition(".")[0] == "tfdist"]:
        del sys.modules[name]

    def put_first(words: Sequence[str]) -> None:
        if not getattr(sys.flags, "safe_path", False):
            sys.path.insert(0, main_module.first_path(words))

    if words:
        put_first(words)
    # Returns in each worker, never in the zygote.
    command = zygote_server.serve(descriptor, (sys.executable, "-u", *words))
    if not words:
        put_first(command[2:])
    main_module.run(command[2:], command, hidden_files=[__file__])


if __name__ == "__main__":
    _main(int(sys.argv[1]), sys.argv[2:])
