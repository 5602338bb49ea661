"""A process that measures: `python -m benchmarks.worker MODULE SETTINGS RESULT`.

It calls `main` of the module with the settings, which are JSON, and writes what that returns as JSON; None, as in all
processes of a training but the first one, is not written. It needs nothing but Python.
"""

from __future__ import annotations

import importlib
import json
import sys
from pathlib import Path

if __name__ == "__main__":
    module, settings, result = sys.argv[1:]
    found = importlib.import_module(module).main(json.loads(settings))
    if found is not None:
        Path(result).write_text(json.dumps(found))
