"""What is predicted for published figures: the table of benchmarks/planning/README.md is the one that is computed."""

from __future__ import annotations

import pytest

from benchmarks.planning import published
from benchmarks.planning.published import exposed_seconds
from tfdist.planning.hardware import Link


@pytest.fixture(scope="module")
def figures() -> list[published.Figure]:
    return published.figures()


@pytest.mark.nightly
def test_the_table_of_the_page(figures):
    assert published.render(figures) in published.README.read_text()


@pytest.mark.nightly
def test_what_the_model_knows_is_near(figures):
    by_source: dict[str, list[float]] = {}
    for each in figures:
        by_source.setdefault(each.source, []).append(abs(each.error))
    # Hardware and model stand in the publication.
    overlapped = [each for each in figures if "Horovod" in each.source and "no overlap" not in each.what]
    assert len(overlapped) == 3 and max(abs(each.error) for each in overlapped) < 0.1
    assert max(by_source["torchgpipe, ResNet-101"][:3]) < 0.1
    # Many micro-batches of a model that can be cut evenly.
    assert [abs(each.error) < 0.1 for each in figures if "Transformer" in each.source and "M=32" in each.what] == [
        True
    ] * 3


def test_gradients_that_are_sent_during_the_backward_pass():
    link = Link(0.0, 1.0)
    # Ready after 1, 2, 3 s; sent until 5, 7, 8 s: 5 s after the backward pass.
    assert exposed_seconds([1, 2, 4], [1, 1, 1], 2, link) == pytest.approx(5.0)
    # All but the first layer's is sent in time.
    assert exposed_seconds([1, 1, 1], [2, 2, 2], 2, link) == pytest.approx(1.0)
    assert exposed_seconds([0, 0, 0], [2, 2, 2], 2, link) == 0.0
