"""What users see of tfdist is what is written down in tests/unit/surface: it becomes different only on purpose."""

from __future__ import annotations

import difflib
import re
from pathlib import Path

import pytest

from tests.unit.pages import PAGES, read
from tests.unit.test_documentation import entries
from tools import public_surface
from tools.public_surface import FROZEN

ADVICE = (
    "Users would see this change. If it is intended: python tools/public_surface.py writes it down, and CHANGELOG.md "
    "has to tell them. If not, keep what they know."
)


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What users see now."""
    folder = tmp_path_factory.mktemp("surface")
    assert public_surface.main([str(folder)]) == 0
    return folder


def parts(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


@pytest.mark.parametrize("part", parts(FROZEN))
def test_users_see_what_is_written_down(part: str, found: Path) -> None:
    before, now = ((folder / part).read_text().splitlines() for folder in (FROZEN, found))
    changed = list(difflib.unified_diff(before, now, f"{part}, frozen", f"{part}, now", lineterm="", n=1))
    if changed:
        pytest.fail("\n".join([*changed, "", ADVICE]), pytrace=False)


def test_what_the_documentation_names_is_found(found: Path) -> None:
    assert parts(FROZEN) == parts(found) != []
    names = (found / "names.txt").read_text()
    assert [name for name in entries() if not re.search(rf"^(class )?{re.escape(name)}\W", names, re.MULTILINE)] == []
    pages = "".join(read(page) for page in PAGES if page.startswith(("docs/", "README")))
    own = {*re.findall(r"\bTFDIST_\w+", pages)}
    assert len(own) > 10
    assert own <= {*(found / "environment.txt").read_text().split()}
    (told,) = re.findall(r"for programs: ([^.]*)\.", read("docs/fault-tolerance.md"))
    events = (found / "events.txt").read_text().splitlines()
    assert {*re.findall(r"`([^`]+)`", told)} <= {line.partition(":")[0] for line in events}
