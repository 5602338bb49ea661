"""tf.distribute strategies that Keras 3's `fit`, `evaluate` and `predict` can use.

A new strategy begins with hooks.py: `StrategyHooks` is the interface of all. mirrored.py is the smallest one whose
replicas share the rows of a batch (data_parallel/), host_offload.py the smallest one of another kind.
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach(
    __name__,
    submod_attrs={
        "fully_sharded": ["FullyShardedStrategy"],
        "horovod.strategy": ["HorovodStrategy"],
        "host_offload": ["HostOffloadStrategy"],
        "local_steps.strategy": ["LocalStepsStrategy"],
        "mirrored": ["MirroredStrategy"],
        "multi_worker": ["MultiWorkerMirroredStrategy"],
        "parameter_server.strategy": ["ParameterServerStrategy"],
        "pipeline.plan": ["stage"],
        "pipeline.strategy": ["PipelineStrategy"],
    },
)
