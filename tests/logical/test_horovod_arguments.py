"""What `HorovodStrategy` refuses, in a single process as on many."""

from __future__ import annotations

import numpy as np
import pytest

import tfdist
from tfdist.arguments import check_bucket_bytes, check_seconds


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ({"bucket_bytes": 0}, "bucket_bytes=0. Expected: a positive whole number"),
        ({"bucket_bytes": True}, "bucket_bytes=True. Expected: a positive whole number"),
        ({"bucket_bytes": "1 MB"}, "bucket_bytes='1 MB'. Expected: a positive whole number"),
        ({"bucket_bytes": 1.5}, "bucket_bytes=1.5. Expected: a positive whole number"),
        ({"peer_timeout": 0}, "peer_timeout=0. Expected: a positive number of seconds"),
        ({"start_timeout": -5}, "start_timeout=-5. Expected: a positive number of seconds"),
        ({"start_timeout": "soon"}, "start_timeout='soon'. Expected: a positive number of seconds"),
        ({"compression": "fp8"}, "compression='fp8'"),
        ({"compression": "bf16"}, "compression='bf16'. Expected one of [None, 'fp16']"),
    ],
)
def test_wrong_arguments(arguments, text):
    with pytest.raises(ValueError) as error:
        tfdist.HorovodStrategy(**arguments)
    assert str(error.value).startswith("Received: ")
    assert text in str(error.value)


def test_what_numpy_counts_with_is_a_number():
    check_seconds(start_timeout=np.float32(0.5))
    check_bucket_bytes(np.int64(4))
