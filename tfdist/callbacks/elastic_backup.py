"""What keeps the state of a fit in the memory of all processes of an elastic job, if the user keeps none on disk."""

from __future__ import annotations

from tfdist.callbacks.backup_and_restore import BackupAndRestore

# Steps that are done again at most when a process is lost; keeping the state costs about a copy of it.
_STEPS = 16


class ElasticBackup(BackupAndRestore):
    """`BackupAndRestore` without a folder on disk; added to a fit by tfdist."""

    def __init__(self) -> None:
        super().__init__("memory", save_freq=_STEPS, asynchronous=False, preemption_signal=None)

    keeps_on_disk = False
