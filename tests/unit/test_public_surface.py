"""What users see of tfdist is what is written down in tests/unit/surface: it becomes different only on purpose."""

from __future__ import annotations

import ast
import difflib
import re
import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path

import click
import pytest

from tests.unit.pages import PAGES, ROOT, read
from tests.unit.test_documentation import entries
from tools.public_surface import FROZEN
from tools.surface.commands import command_lines
from tools.surface.environment import variables
from tools.surface.events import kinds
from tools.surface.names import class_lines, function_lines

ADVICE = (
    "Users would see this change. If it is intended: python tools/public_surface.py writes it down, and CHANGELOG.md "
    "has to tell them. If not, keep what they know."
)


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What users see now. Signatures need TensorFlow, which the tests here must not find initialised."""
    folder = tmp_path_factory.mktemp("surface")
    command = [sys.executable, str(ROOT / "tools" / "public_surface.py"), str(folder)]
    result = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert result.returncode == 0, result.stderr
    return folder


def parts(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def difference(part: str, before: str, now: str) -> str:
    """What is not the same any more, and what to do; empty if all is."""
    lines = difflib.unified_diff(
        before.splitlines(), now.splitlines(), f"{part}, frozen", f"{part}, now", "", "", 1, ""
    )
    text = "\n".join(lines)
    return text and f"{text}\n\n{ADVICE}"


@pytest.mark.parametrize("part", parts(FROZEN))
def test_users_see_what_is_written_down(part: str, found: Path) -> None:
    changed = difference(part, (FROZEN / part).read_text(), (found / part).read_text())
    if changed:
        pytest.fail(changed, pytrace=False)


def test_all_parts_are_compared(found: Path) -> None:
    assert parts(FROZEN) == parts(found) != []


def test_what_the_documentation_names_is_found(found: Path) -> None:
    names = (found / "names.txt").read_text()
    assert [name for name in entries() if not re.search(rf"^(class )?{re.escape(name)}\W", names, re.MULTILINE)] == []
    pages = "".join(read(page) for page in PAGES if page.startswith(("docs/", "README")))
    own = {*re.findall(r"\bTFDIST_\w+", pages)}
    assert len(own) > 10
    assert own <= {*(found / "environment.txt").read_text().split()}
    (told,) = re.findall(r"for programs: ([^.]*)\.", read("docs/fault-tolerance.md"))
    events = (found / "events.txt").read_text().splitlines()
    assert {*re.findall(r"`([^`]+)`", told)} <= {line.partition(":")[0] for line in events}


def test_a_difference_says_what_to_do() -> None:
    same = "f(x: int)\nf() -> int\n"
    assert difference("names.txt", same, same) == ""
    assert difference("names.txt", same, same.replace("x", "y")).splitlines() == [
        "--- names.txt, frozen",
        "+++ names.txt, now",
        "@@ -1,2 +1,2 @@",
        "-f(x: int)",
        "+f(y: int)",
        " f() -> int",
        "",
        ADVICE,
    ]


class Private:
    """A base that has no public name, and is of the same package."""

    def __init__(self, size: int) -> None:
        self.size = size
        self._hidden = size

    def resized(self, by: float = 2.0) -> Private:
        """Is public in what inherits from it."""
        raise NotImplementedError


class Error(Private, ast.NodeVisitor, KeyError):
    """A class with something of everything."""

    kind = "a"

    def __init__(self, size: int, *, name: str | None = None) -> None:
        super().__init__(size)

    def __len__(self) -> int:
        return 0

    @property
    def title(self) -> str:
        return ""

    @title.setter
    def title(self, value: str) -> None:
        self._hidden = value

    @classmethod
    def made(cls, *parts: str, **options: int) -> Error:
        raise NotImplementedError

    def _helper(self) -> None:
        pass


@dataclass
class Row:
    """Of which most is made by Python."""

    name: str
    cells: list[int] = field(default_factory=list)


def test_a_class_has_what_its_package_defines() -> None:
    assert list(class_lines("m.Error", Error, {id(KeyError): "m.Lost"})) == [
        "class m.Error(ast.NodeVisitor, m.Lost)",
        "m.Error(size: int)",
        "m.Error(*, name: str | None = None)",
        "m.Error.__len__() -> int",
        "m.Error.kind",
        "m.Error.made: classmethod",
        "m.Error.made(*parts: str)",
        "m.Error.made(**options: int)",
        "m.Error.made() -> Error",
        "m.Error.resized(by: float = 2.0)",
        "m.Error.resized() -> Private",
        "m.Error.size",
        "m.Error.title: property -> str",
        "m.Error.title: can be set",
    ]


def test_a_dataclass_has_its_fields() -> None:
    assert list(class_lines("m.Row", Row, {})) == [
        "class m.Row()",
        "m.Row(name: str)",
        "m.Row(cells: list[int] = <factory>)",
        "m.Row.cells: list[int]",
        "m.Row.name: str",
    ]


def test_each_change_of_a_signature_is_seen() -> None:
    def lines(signature: str) -> list[str]:
        space: dict[str, object] = {}
        exec(f"def f{signature}: ...", space)
        return list(function_lines("f", space["f"]))

    same = "(a, b=1, *, c: int = 2) -> int"
    others = [same.replace(*change) for change in (("b=1", "b=2"), ("b=1", "d=1"), ("b=1", "b"), ("*, ", ""))]
    others += [same.replace(*change) for change in (("a,", "a, /,"), ("int =", "str ="), ("> int", "> str"))]
    others += ["(b=1, a=1, *, c: int = 2) -> int"]
    assert lines(same) == ["f(a)", "f(b = 1)", "f(*, c: int = 2)", "f() -> int"]
    assert all(lines(other) != lines(same) for other in others)


def test_a_default_without_a_text_that_stays_is_refused() -> None:
    def function(value: object = object()) -> None:
        pass

    with pytest.raises(ValueError, match="a text that stays"):
        list(function_lines("f", function))


def test_a_command_has_its_options_and_those_below_it() -> None:
    @click.group(context_settings={"help_option_names": ["-h", "--help"]})
    def main() -> None:
        """All of it."""

    @main.command(short_help="Train.")
    @click.argument("script")
    @click.option("-n", "--workers", type=click.IntRange(min=1), default=2, show_default=True, help="How many.")
    @click.option("--mode", type=click.Choice(["a", "b"]), default="a", envvar="MODE")
    @click.option("--name", multiple=True, metavar="NAME")
    @click.option("--ps", type=int, default=0)
    @click.option("--warm/--cold", default=True)
    @click.option("--quiet", is_flag=True)
    def run(**options: object) -> None:
        """Train it.

        At once.
        """

    assert list(command_lines(main, "m")) == [
        "m: usage [OPTIONS] COMMAND [ARGS]...",
        "m: in a list: All of it.",
        "m: All of it.",
        "m -h, --help",
        "m run: usage [OPTIONS] SCRIPT",
        "m run: in a list: Train.",
        "m run: Train it.",
        "m run: At once.",
        "m run -h, --help",
        "m run script text",
        "m run script: required",
        "m run -n, --workers integer range (min 1)",
        "m run -n, --workers: default 2",
        "m run -n, --workers: How many.",
        "m run --mode choice (a, b)",
        "m run --mode: default 'a', which is not shown",
        "m run --mode: by default from MODE",
        "m run --name NAME",
        "m run --name: multiple",
        "m run --ps integer",
        "m run --ps: default 0, which is not shown",
        "m run --warm / --cold",
        "m run --warm / --cold: default True, which is not shown",
        "m run --quiet",
    ]


WRITER = """
class Watcher:
    def __init__(self, events: EventLog):
        self._events = events
        self._where = {"host": "a", "pid": 1}
        self._recovery: Recovery | None = None

    def saved(self, file):
        self._events.write("saved", step=3, **self._where)
        file.write("no event")

    def ended(self, code):
        what = {"task": "a"}
        self._events.write("complete" if code == 0 else "interrupted", **what, owner=asdict(Recovery.made()))

    def back(self):
        outcome = self._recovery.outcome()
        self._events.write("back", **asdict(outcome))
"""
RESULTS = """
class Outcome:
    seconds: float
    step: int

class Recovery:
    def outcome(self) -> Outcome: ...

    @classmethod
    def made(cls) -> Outcome | None: ...
"""


def test_events_are_read_from_their_writers() -> None:
    assert kinds({"a.py": ast.parse(WRITER), "b.py": ast.parse(RESULTS)}) == [
        "back: seconds, step",
        "complete: owner, owner.seconds, owner.step, task",
        "interrupted: owner, owner.seconds, owner.step, task",
        "saved: host, pid, step",
    ]


@pytest.mark.parametrize(
    "call",
    ["write(kind, step=3)", "write('saved', **fields)", "write('saved', 3)", "write", "write('back', **asdict(what))"],
)
def test_events_that_cannot_be_read_are_refused(call: str) -> None:
    source = f"def note(kind, fields, what):\n    log = EventLog(None, 'me')\n    use(log.{call})\n"
    with pytest.raises(ValueError, match=re.escape("in a.py, line 3. Expected: ")):
        kinds({"a.py": ast.parse(source)})


def test_variables_are_read_from_texts_but_docstrings() -> None:
    source = """
\"\"\"About TFDIST_OLD.\"\"\"
NAME = "TFDIST_HOST"
env[f"TFDIST_{NAME}"] = script("echo $TFDIST_TOKEN", "OTHER")
"""
    assert variables({"a.py": ast.parse(source)}) == [
        "TFDIST_*",
        "TFDIST_HOST",
        "TFDIST_TOKEN (in a longer text only)",
    ]
