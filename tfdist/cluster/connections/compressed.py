"""Large messages, compressed: what all processes are told about all of them grows with the square of their number."""

from __future__ import annotations

import base64
import binascii
import json
import zlib


def pack(value: object) -> str:
    """JSON, compressed, as text."""
    return base64.b64encode(zlib.compress(json.dumps(value).encode())).decode()


def unpack(text: object, most: int) -> dict:
    """The JSON object that `pack` has packed.

    Args:
        text: What has come.
        most: The most bytes that it may stand for: a few could stand for gigabytes.

    Raises:
        OSError: If it is something else; without errno.

    Example:
        >>> unpack(pack({"a": 1}), 100)
        {'a': 1}
    """
    try:
        reader = zlib.decompressobj()
        value = json.loads(reader.decompress(base64.b64decode(str(text)), most))
    except (ValueError, RecursionError, binascii.Error, zlib.error):
        value = None
    if not isinstance(value, dict):
        raise OSError("it sends no compressed JSON object")
    return value
