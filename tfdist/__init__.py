"""tfdist: distributed training for Keras 3 on TensorFlow, with unchanged Keras code.

The public names are loaded on first use, so that `import tfdist.cluster` and the command line import no TensorFlow.
"""

import lazy_loader

__version__ = "0.1.0"

__getattr__, __dir__, __all__ = lazy_loader.attach(
    __name__,
    submodules=[
        "callbacks",
        "cluster",
        "compression",
        "layers",
        "memory",
        "optimizers",
        "planning",
        "strategies",
        "testing",
    ],
    submod_attrs={
        "cluster": ["ClusterConfig", "ClusterError", "discover"],
        "launcher.function.launch": ["launch"],
        "launcher.local.calls": ["LaunchError"],
        "optimizers": ["ShardedOptimizer"],
        "planning": ["auto", "plan"],
        "reproducibility": ["set_seed"],
        "strategies": [
            "HorovodStrategy",
            "HostOffloadStrategy",
            "MirroredStrategy",
            "MultiWorkerMirroredStrategy",
            "ParameterServerStrategy",
            "PipelineStrategy",
            "stage",
        ],
    },
)
