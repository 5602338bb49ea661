"""The manual of the Python language that comes with every Python, as bytes to train a language model on.

`help("lambda")` prints its topics, so nothing has to be downloaded, and it is prose by people, with some code in it:
about 400 thousand characters, which differ a little from one version of Python to the next.
"""

from __future__ import annotations

from pydoc_data.topics import topics

import numpy as np

_HELD_OUT = 10


def load() -> tuple[bytes, bytes]:
    """Returns the text to train on and the text that is held out, every tenth topic.

    Topics quote each other: a paragraph that came before is left out, so that nothing that is held out is trained on.

    Example:
        >>> train, test = load()
        >>> b"lambda" in train
        True
    """
    seen: set[str] = set()
    texts: list[str] = []
    for name in sorted(topics):
        paragraphs = [p for p in topics[name].strip().split("\n\n") if p.strip() not in seen]
        seen.update(p.strip() for p in paragraphs)
        texts.append("\n\n".join(paragraphs))
    held_out = texts[_HELD_OUT - 1 :: _HELD_OUT]
    trained = [text for i, text in enumerate(texts) if i % _HELD_OUT != _HELD_OUT - 1]
    return "\n\n".join(trained).encode(), "\n\n".join(held_out).encode()


def windows(text: bytes, length: int) -> tuple[np.ndarray, np.ndarray]:
    """Cuts a text into rows of bytes, each with the bytes that follow them.

    Example:
        >>> inputs, targets = windows(b"spam and eggs", 6)
        >>> [row.tobytes() for row in inputs.astype("uint8")], [row.tobytes() for row in targets.astype("uint8")]
        ([b'spam a', b'nd egg'], [b'pam an', b'd eggs'])
    """
    values = np.frombuffer(text, dtype=np.uint8).astype(np.int32)
    rows = (len(values) - 1) // length
    return values[: rows * length].reshape(rows, length), values[1 : rows * length + 1].reshape(rows, length)
