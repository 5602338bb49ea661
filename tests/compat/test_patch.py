"""How tfdist replaces a function: once, within tested versions, and never at import."""

from __future__ import annotations

import logging
import re
import subprocess
import sys
import types

import keras
import pytest

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


def test_replaces_a_method(owner):
    Patch(TARGET, plus_one, "keras", "none").install()
    assert owner().method() == 2


def test_replaces_a_function_of_a_module(owner):
    patch = Patch("patched_module:function", plus_one, "keras", "none")
    patch.install()
    assert sys.modules["patched_module"].function() == 11
    assert patch.original()() == 10


def test_is_idempotent(owner):
    for _ in range(3):
        Patch(TARGET, plus_one, "keras", "none").install()
    assert owner().method() == 2


def test_original(owner):
    patch = Patch(TARGET, plus_one, "keras", "none")
    before = patch.original()
    patch.install()
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
    [("3.11.9", True), ("3.12.0", False), ("3.15.1", False), ("3.16.0", True), ("4.0.0", True), ("3.2.0", True)],
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
        # A function or class; of Keras' files, the module with the functions.
        assert (original is None) if patch.is_new else callable(original) or hasattr(original, "GFile")
    targets = [patch.target for patch in patches()]
    assert len(targets) == len(set(targets))


def installed_after(*statements: str) -> str:
    """How many patches a fresh interpreter has installed after some statements."""
    code = "\n".join(
        [
            *statements,
            "from tfdist.compat import patches",
            "import importlib",
            "def there(patch):",
            "    module, _, path = patch.target.partition(':')",
            "    found = importlib.import_module(module)",
            "    for name in path.split('.'): found = getattr(found, name, None)",
            "    return found",
            "print('installed', sum(hasattr(there(p), '_tfdist_original') for p in patches()))",
        ]
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=90)
    assert result.returncode == 0, result.stderr
    return result.stdout.strip()


def test_import_installs_nothing():
    assert installed_after("import tfdist, tfdist.compat, tfdist.strategies, tfdist.testing") == "installed 0"


def test_a_strategy_installs_everything():
    count = len(patches())
    assert installed_after("import tfdist", "tfdist.MirroredStrategy()") == f"installed {count}"


def test_another_backend_of_keras_is_refused(monkeypatch):
    monkeypatch.setattr(keras.backend, "backend", lambda: "jax")
    with pytest.raises(RuntimeError, match=r"Received: Keras with the backend 'jax'\. Expected: 'tensorflow'"):
        install(None)
