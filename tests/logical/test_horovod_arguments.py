"""What `HorovodStrategy` refuses, in a single process as on many."""

from __future__ import annotations

import numpy as np
import pytest

import tfdist
from tfdist.arguments import check_bucket_bytes
from tfdist.strategies.horovod.validation import check_arguments


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ({"bucket_bytes": 0}, "bucket_bytes=0. Expected: a positive whole number"),
        ({"bucket_bytes": True}, "bucket_bytes=True. Expected: a positive whole number"),
        ({"bucket_bytes": "1 MB"}, "bucket_bytes='1 MB'. Expected: a positive whole number"),
        ({"bucket_bytes": 1.5}, "bucket_bytes=1.5. Expected: a positive whole number"),
        ({"process_set": 1}, "process_set=1. Expected: the ranks of the group as a list"),
        ({"process_set": "01"}, "process_set='01'. Expected: the ranks of the group as a list"),
        ({"process_set": []}, "process_set=[]. Expected: the ranks of the group as a list"),
        ({"process_set": [0, 0]}, "process_set=[0, 0], in which 0 stands 2 times. Expected"),
        ({"process_set": [0, -1]}, "process_set=[0, -1], in which -1 is no rank. Expected"),
        ({"process_set": [0, "1"]}, "process_set=[0, '1'], in which '1' is no rank. Expected"),
        ({"process_set": [True]}, "process_set=[True], in which True is no rank. Expected"),
        ({"peer_timeout": 0}, "peer_timeout=0. Expected: a positive number of seconds"),
        ({"start_timeout": -5}, "start_timeout=-5. Expected: a positive number of seconds"),
        ({"start_timeout": "soon"}, "start_timeout='soon'. Expected: a positive number of seconds"),
        ({"compression": "fp8"}, "compression='fp8'"),
        ({"compression": "bf16"}, "Horovod has no sums of bfloat16"),
    ],
)
def test_wrong_arguments(arguments, text):
    with pytest.raises(ValueError) as error:
        tfdist.HorovodStrategy(**arguments)
    assert str(error.value).startswith("Received: ")
    assert text in str(error.value)


def test_what_numpy_counts_with_is_a_number():
    check_arguments("fp16", np.arange(2), start_timeout=np.float32(0.5))
    check_bucket_bytes(np.int64(4))


@pytest.mark.parametrize(("ranks", "missing"), [([0, 1], "1"), ([1, 3], "1, 3")])
def test_a_rank_that_does_not_exist_is_named(ranks, missing):
    with pytest.raises(tfdist.ClusterError) as error:
        tfdist.HorovodStrategy(process_set=ranks)
    assert f"process_set={ranks}, but there is no rank {missing} (of 1). Expected: ranks from 0 to 0" in str(
        error.value
    )
