"""How tfdist replaces a function: once, within tested versions, and never at import."""

from __future__ import annotations

import logging
import os
import re
import sys
import types

import keras
import pytest

from tests.processes import forked
from tfdist.compat import install, patches
from tfdist.compat import patch as patch_module
from tfdist.compat.patch import TESTED, Patch

TARGET = "patched_module:Owner.method"


@pytest.fixture
def owner(monkeypatch) -> type:
    """A class in a module of its own, whose method returns 1."""

    class Owner:
        def method(self) -> int:
            return 1

    module = types.ModuleType("patched_module")
    module.Owner = Owner
    module.function = lambda: 10
    monkeypatch.setitem(sys.modules, "patched_module", module)
    monkeypatch.setattr(patch_module, "_warned", set())
    return Owner


def plus_one(original):
    return lambda *arguments: original(*arguments) + 1


def test_replaces_a_function_of_a_module(owner):
    patch = Patch("patched_module:function", plus_one, "keras", "none")
    patch.install()
    assert sys.modules["patched_module"].function() == 11
    assert patch.original()() == 10


def test_replaces_a_method_once(owner):
    before = Patch(TARGET, plus_one, "keras", "none").original()
    for _ in range(3):
        patch = Patch(TARGET, plus_one, "keras", "none")
        patch.install()
    assert owner().method() == 2
    assert patch.original() is before
    assert before(owner()) == 1


def test_adds_a_method(owner):
    patch = Patch("patched_module:Owner.added", lambda original: lambda self: original, "keras", "none", is_new=True)
    assert patch.original() is None
    for _ in range(2):
        patch.install()
        assert owner().added() is None


def test_an_added_method_may_be_inherited(owner):
    sys.modules["patched_module"].Heir = type("Heir", (owner,), {})
    Patch("patched_module:Heir.method", lambda original: lambda self: 3, "keras", "none", is_new=True).install()
    assert (owner().method(), sys.modules["patched_module"].Heir().method()) == (1, 3)


@pytest.mark.parametrize("target", ["patched_module:Owner.gone", "patched_module:Gone.method"])
def test_missing_target(owner, target):
    with pytest.raises(RuntimeError) as error:
        Patch(target, plus_one, "keras", "keras issue 1").install()
    first, last = TESTED["keras"]
    assert re.fullmatch(
        rf"tfdist changes {target} \(keras issue 1\), which keras \d+\.\d+\.\S+ does not have\. "
        rf"Expected: keras {first} to {last}\. Install one of these, or a newer tfdist\.",
        str(error.value),
    )


def test_inherited_methods_are_not_replaced(owner):
    """The patch would change a subclass only, and hide that upstream has moved the function."""
    sys.modules["patched_module"].Heir = type("Heir", (owner,), {})
    with pytest.raises(RuntimeError, match="does not have"):
        Patch("patched_module:Heir.method", plus_one, "keras", "none").install()


@pytest.mark.parametrize(
    ("version", "warns"),
    [("3.12.0", False), ("3.15.1", False), ("3.16.0", True), ("3.2.0", True)],
)
def test_warns_of_untested_versions_once(owner, monkeypatch, caplog, version, warns):
    monkeypatch.setitem(TESTED, "keras", ("3.12", "3.15"))
    monkeypatch.setattr(patch_module, "_version", lambda package: version)
    with caplog.at_level(logging.WARNING, "tfdist"):
        Patch(TARGET, plus_one, "keras", "none").install()
        Patch("patched_module:function", plus_one, "keras", "none").install()
    expected = (
        f"tfdist was tested with keras 3.12 to 3.15; this is {version}. "
        "If training misbehaves, install a tested version."
    )
    assert [record.getMessage() for record in caplog.records] == [expected] * warns
    assert owner().method() == 2


def test_every_patch_is_complete():
    for patch in patches():
        assert patch.package in TESTED
        assert patch.upstream
        original = patch.original()
        # A function, class or property; of Keras' files, the module with the functions.
        is_one = callable(original) or isinstance(original, property) or hasattr(original, "GFile")
        assert original is None if patch.is_new else is_one
    targets = [patch.target for patch in patches()]
    assert len(targets) == len(set(targets))


COUNT = """
import importlib
import tfdist, tfdist.compat, tfdist.strategies, tfdist.testing
from tfdist.compat import patches

def installed(patch):
    module, _, path = patch.target.partition(":")
    found = importlib.import_module(module)
    for name in path.split("."):
        found = getattr(found, name, None)
    return hasattr(found, "_tfdist_original")

print("installed", sum(map(installed, patches())))
tfdist.MirroredStrategy()
print("installed", sum(map(installed, patches())))
"""


def test_a_strategy_installs_everything_and_an_import_nothing(tmp_path):
    (tmp_path / "count.py").write_text(COUNT)
    process = forked(["count.py"], tmp_path / "log", tmp_path, os.environ)
    try:
        code, said = process.wait(90), (tmp_path / "log").read_text()
    finally:
        process.kill()
    assert code == 0, said
    assert re.findall("^installed .*", said, re.MULTILINE) == ["installed 0", f"installed {len(patches())}"]


def test_another_backend_of_keras_is_refused(monkeypatch):
    monkeypatch.setattr(keras.backend, "backend", lambda: "jax")
    with pytest.raises(RuntimeError, match=r"Received: Keras with the backend 'jax'\. Expected: 'tensorflow'"):
        install(None, None)
