"""Where backups go while `tfdist drill` tries the script out. Uses no TensorFlow."""

from __future__ import annotations

import os
from collections.abc import Mapping

# Set by `tfdist drill` for the processes that it starts.
VARIABLE = "TFDIST_DRILL_DIR"


def drill_folder(backup_dir: str, env: Mapping[str, str]) -> str | None:
    """The folder to use instead of `backup_dir` in a drill, so that each of its runs has backups of its own.

    Args:
        backup_dir: what the script asked for, local or remote.
        env: the environment of the process.

    Returns:
        A local folder; None if this is no drill.

    Example:
        >>> drill_folder("gs://bucket/backup/", {"TFDIST_DRILL_DIR": "/tmp/drill"})
        '/tmp/drill/backup'
    """
    root = env.get(VARIABLE)
    if not root:
        return None
    return os.path.join(root, os.path.basename(os.path.normpath(backup_dir)))
