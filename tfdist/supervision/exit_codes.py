"""Exit codes with a meaning of their own between a training process and whoever started it."""

from __future__ import annotations

# The process was asked to stop, has saved its state and wants to be started again: not a failure.
PREEMPTED = 77
# The launcher ended the run because a process stood still; what timeout(1) returns.
HUNG = 124
