"""What a launcher and the processes that it watches tell each other without events: progress and exit codes."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import fields
from pathlib import Path
from unittest import mock


def progress() -> Iterator[str]:
    """The fields of a report, its phases, and the bytes of one in the file."""
    from tfdist.supervision import progress as module

    yield from (f"{field.name}: {field.type}" for field in fields(module.Progress))
    texts = {value for name, value in vars(module).items() if name.isupper() and isinstance(value, str)}
    yield from (f"phase {value}" for value in sorted(texts - {module.VARIABLE}))
    with module.ProgressFile() as file:
        with mock.patch("time.monotonic", return_value=2.5):
            writer = module.ProgressWriter(file.value)
            writer.resumed(5)
            writer.report(module.TRAINING, 7)
        data = Path(file.value.rpartition(":")[0]).read_bytes()
    yield from (f"bytes {data[at : at + 8].hex(' ')}" for at in range(0, len(data), 8))


def exit_codes() -> Iterator[str]:
    """Those with a meaning of their own."""
    from tfdist.supervision import exit_codes as module

    yield from (f"{name} = {value}" for name, value in vars(module).items() if name.isupper())
