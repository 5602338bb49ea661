"""Any manifest gives the state or an error in words: nothing that it names is imported or called."""

from __future__ import annotations

import contextlib
import copy
import json
import random
import shutil
import sys
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tensorflow as tf
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from tests.fault_tolerance.test_earlier_backup import EARLIER, fit
from tests.fault_tolerance.test_store_read_errors import fields_of, text_of
from tfdist.checkpoint.callback_state import MISSING, NO_OBJECTS, NotRestoredError, decode
from tfdist.checkpoint.manifest import DamagedCheckpointError, UnknownFormatError, decode_manifest
from tfdist.checkpoint.store import CheckpointStore
from tfdist.checkpoint.training_state import check_meta, fault_of_meta

few = settings(max_examples=150, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
REFERENCES = [
    "os:system",
    "builtins:eval",
    "builtins:exec",
    "subprocess:Popen",
    "pathlib:Path",
    "pathlib:Path.touch",
    "antigravity:fly",
    "this:s",
    "",
    ":",
    "os",
    "os:system:id",
]
KINDS = [
    *("float", "complex", "bytes", "bytearray", "path", "timedelta", "datetime", "date", "time", "array", "tensor"),
    *("buffer", "enum", "namedtuple", "dataclass", "OrderedDict", "Counter", "dict", "defaultdict", "list", "tuple"),
    *("set", "frozenset", "deque", "generator", "random", "variable", "variables", "state", "elsewhere", "scalar", "x"),
]
WORDS = [
    *REFERENCES,
    *KINDS,
    "value",
    "PCG64",
    "mtrand",
    "BitGenerator",
    "seed",
    "0x1.8p+1",
    "inf",
    "|O",
    "<U2",
    "i4,O",
    "best",
]
leaves = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-3, 8),
    st.sampled_from([2**31, 2**63, 2**64, 10**40, -(2**63)]),
    st.floats(),
    st.sampled_from(WORDS),
    st.text(max_size=6),
)
values = st.recursive(
    leaves,
    lambda inner: st.one_of(
        st.lists(inner, max_size=4),
        st.dictionaries(st.sampled_from(KINDS), inner, max_size=2),
        st.tuples(st.sampled_from(KINDS), st.lists(inner, min_size=1, max_size=3)).map(lambda pair: dict([pair])),
        st.tuples(st.sampled_from(["enum", "namedtuple", "dataclass"]), st.sampled_from(REFERENCES), inner).map(
            lambda parts: {parts[0]: [parts[1], parts[2]]}
        ),
    ),
    max_leaves=12,
)
ARRAYS = {"x": np.ones(2), "best": np.array([b"a"], object), "": np.zeros((0, 3))}

# An audit hook cannot be taken away: it looks only while it is told to.
watched: list[list[str]] = []
FORBIDDEN = (
    "open",
    "import",
    "exec",
    "compile",
    "os.",
    "subprocess.",
    "socket.",
    "ctypes.",
    "shutil.",
    "pickle.",
    "marshal.",
)


def audit(event: str, arguments: tuple) -> None:
    if watched and event.startswith(FORBIDDEN):
        watched[-1].append(f"{event} {str(arguments)[:100]}")


@pytest.fixture(scope="module", autouse=True)
def hook() -> None:
    sys.addaudithook(audit)
    with contextlib.suppress(NotRestoredError):  # imports what TensorFlow imports late
        decode({"list": [{"tensor": "x"}, {"variable": "x"}, {"tensor": "best"}]}, ARRAYS, [None, tf.Variable([1.0])])
    for name in ("MT19937", "PCG64", "Philox"):
        with contextlib.suppress(NotRestoredError):
            decode({"generator": [name, {"dict": []}]}, ARRAYS)


@contextlib.contextmanager
def nothing_is_called() -> Iterator[None]:
    modules = set(sys.modules)
    watched.append([])
    try:
        yield
    finally:
        events = watched.pop()
    assert (events, set(sys.modules) - modules) == ([], set())


def presents() -> list[Any]:
    return [
        NO_OBJECTS,
        MISSING,
        None,
        [1, {}],
        {"best": random.Random(1)},
        np.random.default_rng(1),
        tf.Variable(1.0),
    ]


def test_any_data_are_restored_or_refused() -> None:
    @few
    @given(values, st.integers(0, len(presents()) - 1))
    def check(value: Any, which: int) -> None:
        present = presents()[which]
        value = json.loads(json.dumps(value))
        with nothing_is_called(), contextlib.suppress(NotRestoredError):
            decode(value, ARRAYS, present)

    check()


def test_any_bytes_are_a_manifest_or_none() -> None:
    fields = st.fixed_dictionaries(
        {},
        optional={
            "format": st.one_of(st.just(1), leaves),
            "meta": st.one_of(st.just({}), values),
            "files": st.one_of(st.dictionaries(st.text(max_size=4), values, max_size=3), values),
            "tensors": st.one_of(st.dictionaries(st.text(max_size=4), values, max_size=3), values),
        },
    )

    @few
    @example("\0b")  # UTF-16, if one looks at its first bytes
    @given(st.one_of(values.map(json.dumps), fields.map(json.dumps), st.text(max_size=40)))
    def check(text: str) -> None:
        body = text.rstrip("}").encode("utf-8", "replace")
        for content in (text.encode("utf-8", "replace"), b'%s,\n"crc32": "%08x"}\n' % (body, zlib.crc32(body))):
            with nothing_is_called(), contextlib.suppress(ValueError):
                found = decode_manifest(content)
                assert all("/" not in name and name not in ("", ".", "..") for name in found.files)

    check()


MANIFEST = next(EARLIER.glob("backup/checkpoint-*/manifest.json")).read_bytes()


def places(value: Any, path: tuple = ()) -> Iterator[tuple]:
    yield path
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, item in items:
        if len(path) < 7 and not (isinstance(key, int) and key > 8):
            yield from places(item, (*path, key))


PLACES = [path for path in places(fields_of(MANIFEST)) if path]


@st.composite
def mutated(draw: st.DrawFn) -> dict:
    """The manifest of a real backup with up to three parts replaced or taken away."""
    found = fields_of(MANIFEST)
    for path in draw(st.lists(st.sampled_from(PLACES), min_size=1, max_size=3)):
        owner = found
        with contextlib.suppress(LookupError, TypeError):
            for key in path[:-1]:
                owner = owner[key]
            if draw(st.booleans()):
                del owner[path[-1]]
            else:
                owner[path[-1]] = copy.deepcopy(draw(values))
    return found


def test_a_real_manifest_with_other_parts(tmp_path: Path) -> None:
    shutil.copytree(EARLIER / "backup", tmp_path / "backup")
    store = CheckpointStore(tmp_path / "backup", writer=False)
    [name] = store.names()
    store.open(name)
    path = tmp_path / "backup" / name / "manifest.json"

    @few
    @given(mutated())
    def check(found: dict) -> None:
        path.write_bytes(text_of(found))
        with contextlib.suppress(DamagedCheckpointError, UnknownFormatError):
            meta = store.open(name).meta
            if fault_of_meta(meta) is not None:
                with pytest.raises(ValueError, match="is not a backup of a fit"):
                    check_meta(meta, "here")

    check()


CHANGES: dict[str, tuple[tuple, Any]] = {
    "a command in History": (("meta", "callbacks", 0, "state"), {"dict": [["history", {"enum": ["os:system", "id"]}]]}),
    "an epoch of another type": (("meta", "epoch"), "1"),
    "no tensors": (("tensors",), {}),
}


@pytest.mark.parametrize("change", CHANGES)
def test_a_fit_that_begins_with_it(tmp_path: Path, change: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "excepthook", sys.excepthook)  # a final error replaces it
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("os.system", lambda command: pytest.fail(f"it has called {command}"))
    shutil.copytree(EARLIER / "backup", tmp_path / "backup")
    found, (path, value) = fields_of(MANIFEST), CHANGES[change]
    owner = found
    for key in path[:-1]:
        owner = owner[key]
    owner[path[-1]] = value
    [manifest] = tmp_path.glob("backup/checkpoint-*/manifest.json")
    manifest.write_bytes(text_of(found))
    if change == "a command in History":
        with pytest.warns(UserWarning, match=r"\.history is in the backup and cannot be restored"):
            fit(tmp_path / "backup", lambda model, step: None)
    else:
        with pytest.raises(ValueError, match=r"is not a backup of a fit: it|Received: a backup without"):
            fit(tmp_path / "backup", lambda model, step: None)
        assert manifest.exists()
