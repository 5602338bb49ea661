"""tf.distribute strategies that Keras 3's `fit`, `evaluate` and `predict` can use."""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach(
    __name__,
    submod_attrs={
        "horovod.strategy": ["HorovodStrategy"],
        "host_offload.strategy": ["HostOffloadStrategy"],
        "mirrored": ["MirroredStrategy"],
        "multi_worker": ["MultiWorkerMirroredStrategy"],
        "parameter_server.strategy": ["ParameterServerStrategy"],
        "pipeline.cuts": ["stage"],
        "pipeline.strategy": ["PipelineStrategy"],
    },
)
