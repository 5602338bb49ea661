"""What other programs know: nvidia-smi, Slurm's scontrol, compilers."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Sequence


def output_of(words: Sequence[str], path: str | None = None, seconds: float | None = None) -> str | None:
    """What a program prints; None if there is none, it fails, or it takes longer.

    Args:
        words: the program and its arguments.
        path: where it is looked for, and what it calls; by default this process' PATH.
        seconds: how long it may take.

    Example:
        >>> output_of(["echo", "hello"]), output_of(["false"]), output_of(["echo"], path="/nowhere")
        ('hello\\n', None, None)
    """
    program = shutil.which(words[0], path=path)
    if program is None:
        return None
    env = os.environ if path is None else {**os.environ, "PATH": path}
    try:
        done = subprocess.run([program, *words[1:]], env=env, capture_output=True, text=True, timeout=seconds)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout if done.returncode == 0 else None
