"""Reading the JSON text of TF_CONFIG."""

from __future__ import annotations

import json

from tfdist.cluster.errors import ClusterError

EXAMPLE = '{"cluster": {"worker": ["host1:2222", "host2:2222"]}, "task": {"type": "worker", "index": 0}}'
_SHOWN = 200


def parse(text: str, source: str = "TF_CONFIG") -> tuple[dict[str, object], list[str]]:
    """Reads the text as a JSON object.

    Args:
        text: The value of the variable.
        source: The variable's name, for messages.

    Returns:
        The object, and a problem for each key that occurs twice in one object: JSON would silently keep the last.

    Raises:
        ClusterError: If the text is not JSON, or not an object.

    Example:
        >>> parse('{"task": {"index": 0, "index": 1}}')[1]
        ['the key "index" is given twice in one object; JSON keeps only the last, so remove one']
    """
    if not text.strip():
        raise ClusterError(
            f"{source} is set, but blank; unset it to train in this process alone, or write it as {EXAMPLE}"
        )
    problems: list[str] = []

    def unique(pairs: list[tuple[str, object]]) -> dict[str, object]:
        keys = [key for key, _ in pairs]
        for key in dict.fromkeys(key for key in keys if keys.count(key) > 1):
            problems.append(f'the key "{key}" is given twice in one object; JSON keeps only the last, so remove one')
        return dict(pairs)

    try:
        value = json.loads(text, object_pairs_hook=unique)
    except json.JSONDecodeError as error:
        raise ClusterError(_not_json(text, error, source)) from None
    if not isinstance(value, dict):
        raise ClusterError(f"{source} is {_shown(text)}, which is not a JSON object; write it as {EXAMPLE}")
    return value, problems


def _not_json(text: str, error: json.JSONDecodeError, source: str) -> str:
    if "'" in text and '"' not in text:
        cause = "JSON wants double quotes (\"), not single quotes (')"
    elif '"' not in text:
        cause = "the shell probably removed the double quotes, so put single quotes (') around the whole value"
    else:
        cause = "often the shell's quoting is the cause: put single quotes (') around the whole value"
    where = f"line {error.lineno} column {error.colno} (character {error.pos})"
    wrong = f"{source} is not valid JSON: {error.msg} at {where} of {_shown(text)}"
    return f"{wrong}; {cause}. Correct: {source}='{EXAMPLE}'"


def _shown(text: str) -> str:
    return repr(text) if len(text) <= _SHOWN else f"{text[:_SHOWN]!r}... ({len(text)} characters)"
