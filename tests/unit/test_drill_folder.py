from __future__ import annotations

import pytest

from tfdist.checkpoint.folder_lock import drill_folder


@pytest.mark.parametrize(
    ("backup_dir", "expected"),
    [
        ("backup", "/drill/backup"),
        ("runs/7/backup/", "/drill/backup"),
        ("/home/me/.states", "/drill/.states"),
        ("gs://bucket/run/backup", "/drill/backup"),
    ],
)
def test_the_folder_in_a_drill(backup_dir: str, expected: str) -> None:
    assert drill_folder(backup_dir, {"TFDIST_DRILL_DIR": "/drill"}) == expected


@pytest.mark.parametrize("env", [{}, {"TFDIST_DRILL_DIR": ""}])
def test_no_drill(env: dict[str, str]) -> None:
    assert drill_folder("backup", env) is None
