"""`AutoShardPolicy.FILE` with Horovod's transport: every worker reads its own files."""

from __future__ import annotations

import pytest

from tests.cluster.test_sharding import assert_every_row_is_seen

pytestmark = pytest.mark.cluster


@pytest.mark.exhaustive
def test_every_row_is_seen_once_an_epoch(tmp_path):
    assert_every_row_is_seen(tmp_path, TFDIST_TRANSPORT="horovod")
