"""Exit codes with a meaning of their own between a training process and whoever started it."""

from __future__ import annotations

# The process was asked to stop, has saved its state and wants to be started again: not a failure.
PREEMPTED = 77
# The program was refused something that it needs, and would be again: nobody is to start it again. EX_CONFIG of
# sysexits.h.
REFUSED = 78
# The launcher ended the run because a process stood still; what timeout(1) returns.
HUNG = 124
