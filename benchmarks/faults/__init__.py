"""What each kind of fault costs a training, under `tfdist run` and without it."""

from __future__ import annotations

# Of training.py: how many steps an epoch has, and from backup to backup.
STEPS_PER_EPOCH, SAVE_EVERY = 16, 8
