"""Runs a soak; its last line is the outcome. Everything that it writes stays if it fails."""

from __future__ import annotations

import argparse
import secrets
import shutil
import sys
import tempfile
from pathlib import Path

from tests.soak.soak import Soak, SoakError
from tfdist.launcher.drill.faults import TrialError
from tfdist.launcher.guardian import Guardian
from tfdist.launcher.operating_system import Interrupted, SignalInbox

# 200 an hour.
_PAUSE = 18.0
_INTERRUPTED = 130


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.soak", description=__doc__)
    parser.add_argument("--seconds", type=float, default=3600.0, help="how long faults strike (default: %(default)g)")
    parser.add_argument("--seed", type=int, default=None, help="of the faults; default: another one each time")
    parser.add_argument(
        "--pause", type=float, default=_PAUSE, help="seconds from fault to fault (default: %(default)g)"
    )
    parser.add_argument("--folder", type=Path, help="for all that it writes; default: a temporary one")
    options = parser.parse_args()
    seed = secrets.randbelow(10**6) if options.seed is None else options.seed
    folder = (options.folder or Path(tempfile.mkdtemp(prefix="tfdist-soak-"))).absolute()
    folder.mkdir(parents=True, exist_ok=True)
    print(f"seed {seed}, {options.seconds:g} s, {folder}", flush=True)
    with SignalInbox() as inbox, Guardian() as guardian:
        soak = Soak(folder, seed, guardian, inbox, lambda text: print(text, flush=True))
        try:
            with soak:
                soak.run(options.seconds, options.pause)
        except (SoakError, TrialError) as error:
            print("\n".join(["all faults:", *soak.report.lines]))
            print(f"failed: {error}. What it has written is in {folder}.")
            print(f"again: python -m tests.soak --seed {seed} --seconds {options.seconds:g} --pause {options.pause:g}")
            return 1
        except Interrupted as error:
            print(f"{error}: ended")
            return _INTERRUPTED
    found = soak.report
    kinds = ", ".join(f"{kind} {count}" for kind, count in sorted(found.faults.items()))
    print(
        f"identical: {found.faults.total()} faults ({kinds}); {found.restarts} restarts, {found.starts} starts of the "
        f"launcher, {found.steps} steps, {found.redone} redone, at most {found.most_redone} after one fault"
    )
    if options.folder is None:
        shutil.rmtree(folder)
    return 0


if __name__ == "__main__":
    sys.exit(main())
