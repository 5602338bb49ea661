"""Callbacks for Keras' `fit`, with or without a strategy."""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach(
    "tfdist",
    submod_attrs={
        "callbacks.chief_only": ["on_chief"],
        "callbacks.tensorboard": ["TensorBoard"],
        "checkpoint.backup_and_restore": ["BackupAndRestore"],
        "checkpoint.lock": ["FolderInUseError"],
        "checkpoint.store": ["CheckpointStore", "DamagedBackupsError"],
    },
)
