"""Exit codes with a meaning of their own between a training process and its launcher."""

from __future__ import annotations

# The process was asked to stop, has saved its state and wants to be started again: not a failure.
PREEMPTED = 77
# The process was asked to stop, and could not save its state: what it has done since its last backup is lost, and it
# counts as a failure. EX_IOERR of sysexits.h.
UNSAVED = 74
# The program cannot get what it needs, and starting it again would not help: EX_CONFIG of sysexits.h.
REFUSED = 78
# The launcher ended the run because a process stood still; what timeout(1) returns.
HUNG = 124
# The host of a process is lost; what ssh(1) returns.
HOST_LOST = 255
