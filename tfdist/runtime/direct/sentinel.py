"""Whether TensorFlow knows of a lost process, asked while another one is waited for.

TensorFlow's coordination service hears from each process every few seconds, also from one that waits, and not from one
that is stopped or cut off. Then it lets all collectives fail, and that is how it is asked: by one of a single member,
which needs nobody else. (Its own calls would wait for a first process that is stopped, and hold Python's lock.)
"""

from __future__ import annotations

import re

import tensorflow as tf

# Beyond those of all strategies.
_FIRST_GROUP_KEY = 500_000_000
# What TensorFlow says of every error.
_ADDED = re.compile(r"\{\{.*?\}\} |\[Op:.*?\]|The error could be from a previous operation\..*$", re.MULTILINE)


class Sentinel:
    """Asks TensorFlow, at once and without a message to any other process.

    Args:
        rank: of this process. The service must run; the first process is asked for once.
    """

    def __init__(self, rank: int) -> None:
        self._key = _FIRST_GROUP_KEY + rank
        self._ask()

    def problem(self) -> str:
        """What TensorFlow says of lost processes; empty if nothing."""
        try:
            self._ask()
        except tf.errors.OpError as error:
            return " ".join(_ADDED.sub("", error.message).split())
        return ""

    def _ask(self) -> None:
        with tf.init_scope(), tf.device("CPU:0"):
            tf.raw_ops.CollectiveReduceV2(
                input=[0.0],
                group_size=1,
                group_key=self._key,
                instance_key=1,
                ordering_token=[],
                merge_op="Add",
                final_op="Id",
            )
