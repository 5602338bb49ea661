"""Callbacks for Keras' `fit`, with or without a strategy."""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach(
    __name__,
    submod_attrs={
        "backup_and_restore": ["BackupAndRestore"],
        "folder_lock": ["FolderInUse"],
        "pipeline_timeline": ["PipelineTimeline"],
        "tensorboard": ["TensorBoard"],
        "store": ["CheckpointStore", "DamagedBackups"],
    },
)
