"""What another process has answered: anybody's bytes until they are checked, though it has proved that it belongs here.

It may be of another version, or broken; what it says is printed on the terminal of whoever asks.
"""

from __future__ import annotations

import json
from typing import NoReturn

from tfdist.cluster.errors import ClusterError
from tfdist.cluster.foreign_text import cleaned

_SHOWN = 100


class Answer:
    """A JSON object, whose values are read by name; each method refuses a value of another kind.

    Args:
        found: What has come.
        sender: Who has sent it, for messages.
        topic: What it is about, for messages.

    Raises:
        ClusterError: If it is no object; every method raises it as well. It names the sender.

    Example:
        >>> answer = Answer({"host": "node-1\\x1b[2J", "cores": 4}, "worker 1", "introduction")
        >>> answer.text("host", 20), answer.whole("cores", 0, 1000)
        ('node-1\\\\x1b[2J', 4)
    """

    def __init__(self, found: object, sender: str, topic: str):
        self._sender, self._topic = sender, topic
        if not isinstance(found, dict):
            self._refuse(found, "a JSON object")
        self._found: dict[str, object] = found

    @classmethod
    def parsed(cls, text: str, sender: str, topic: str, most: int) -> Answer:
        """The object that a JSON text, of so many characters at most, is."""
        try:
            found = json.loads(text) if len(text) <= most else text
        except (ValueError, RecursionError):
            found = text
        return cls(found, sender, topic)

    def __contains__(self, name: str) -> bool:
        return self._found.get(name) is not None

    def names(self, allowed: set[str]) -> list[str]:
        """The names of all values, each of which has to be one of those that are allowed."""
        for name in self._found:
            if name not in allowed:
                self._refuse(name, "another name")
        return list(self._found)

    def part(self, name: str) -> Answer:
        """An object in it."""
        return Answer(self._found.get(name), self._sender, f"{self._topic} {name}")

    def text(self, name: str, most: int) -> str:
        """A text, fit to be printed, of so many characters at most; what is more is cut."""
        value = self._found.get(name)
        return cleaned(value, most) if isinstance(value, str) else self._refuse(value, "a text", name)

    def texts(self, name: str, most: int) -> list[str]:
        """A list of texts, fit to be printed, each of so many characters at most, and so many of them."""
        value = self._found.get(name)
        if not isinstance(value, list | tuple) or not all(isinstance(one, str) for one in value):
            self._refuse(value, "a list of texts", name)
        return [cleaned(one, most) for one in value[:most]]

    def whole(self, name: str, least: int, most: int) -> int:
        """A whole number."""
        value = self._found.get(name)
        if type(value) is not int or not least <= value <= most:
            self._refuse(value, f"a whole number from {least} to {most}", name)
        return value

    def real(self, name: str) -> float:
        """A number that is not whole."""
        value = self._found.get(name)
        return value if isinstance(value, float) else self._refuse(value, "a number with a point", name)

    def truth(self, name: str) -> bool:
        """Yes or no."""
        value = self._found.get(name)
        return value if isinstance(value, bool) else self._refuse(value, "true or false", name)

    def _refuse(self, value: object, expected: str, name: str = "") -> NoReturn:
        where = f"{name + ', in ' if name else ''}the {self._topic} of {self._sender}"
        raise ClusterError(
            f"Received: {cleaned(repr(value), _SHOWN)} as {where}. Expected: {expected}; install the same version of "
            "tfdist there, and see what it has printed"
        )
