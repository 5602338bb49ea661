"""Where a user's programs keep what they can make again."""

from __future__ import annotations

import os
from collections.abc import Mapping


def user_cache(env: Mapping[str, str]) -> str:
    """The folder of tfdist, which may not be there yet (XDG Base Directory Specification).

    Args:
        env: the environment variables.

    Example:
        >>> user_cache({"XDG_CACHE_HOME": "/home/me/.cache"})
        '/home/me/.cache/tfdist'
    """
    return os.path.join(env.get("XDG_CACHE_HOME") or os.path.join(os.path.expanduser("~"), ".cache"), "tfdist")
