"""The example of `make demo`."""

from __future__ import annotations

import re

import pytest

from tests.examples.conftest import values

pytestmark = [pytest.mark.cluster, pytest.mark.slow]


@pytest.mark.nightly
def test_two_workers_learn_what_one_learns(example, tmp_path) -> None:
    pytest.importorskip("sklearn", reason="needs the extra `examples`")
    two = example("train_digits.py", "--epochs=2", run=["-n", "2"])
    ((accuracy,),) = [re.findall(r"^test accuracy: (0\.\d+); saved as digits\.keras$", two, re.MULTILINE)]
    assert float(accuracy) > 0.8
    assert (tmp_path / "digits.keras").stat().st_size > 100_000
    # It has finished: there is nothing to go on with.
    assert not list((tmp_path / "digits.backup").glob("*[0-9]*"))
    one = example("train_digits.py", "--epochs=2", "--model-path=alone.keras")
    # Dropout draws another mask on each replica.
    assert values(one, "val_loss") == pytest.approx(values(two, "val_loss"), abs=0.1)
