"""The error that every wrong cluster description ends in."""

from __future__ import annotations

from collections.abc import Iterable


class ClusterError(ValueError):
    """A cluster that cannot work, with one line per problem; each line says what to do.

    Example:
        >>> error = ClusterError(["no port in 'a'; write host:port", "task index 7; use 0 or 1"])
        >>> error.problems
        ["no port in 'a'; write host:port", 'task index 7; use 0 or 1']
    """

    def __init__(self, problems: str | Iterable[str]) -> None:
        super().__init__(problems if isinstance(problems, str) else "\n".join(problems))

    @property
    def problems(self) -> list[str]:
        """The problems, one line each."""
        return str(self).splitlines()
