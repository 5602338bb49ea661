"""Programs that measure memory, each in a process of its own: what a device holds depends on what was there before."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from typing import Any

from tests.launcher.conftest import SOURCE


def printed_by(program: str, *arguments: str, deadline: float) -> Any:
    """What a module of this package prints last, as JSON.

    Args:
        program: its name.
        arguments: of its command line.
        deadline: seconds that it may take.
    """
    command = [sys.executable, "-m", f"{__package__}.{program}", *arguments]
    environment = {**os.environ, "PYTHONPATH": str(SOURCE), "TF_CPP_MIN_LOG_LEVEL": "2"}
    result = subprocess.run(command, cwd=SOURCE, env=environment, capture_output=True, text=True, timeout=deadline)
    assert result.returncode == 0, result.stderr[-3000:]
    return json.loads(result.stdout.splitlines()[-1])
