"""Completion of command lines in bash, zsh and fish: the Tab key shows commands, options, choices and files."""

from __future__ import annotations

SHELLS = ("bash", "zsh", "fish")
# The shell that the user types in.
THIS_SHELL = "auto"
