"""`python -m tfdist`: the same as the `tfdist` command."""

from __future__ import annotations

from tfdist.launcher.command import main

if __name__ == "__main__":
    main(prog_name="python -m tfdist")
