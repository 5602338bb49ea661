"""tfdist: distributed training for Keras 3 on TensorFlow, with unchanged Keras code.

The public names are loaded on first use, so that `import tfdist.cluster` and the command line import no TensorFlow.
"""

import os

import lazy_loader

__version__ = "0.1.0"

__getattr__, __dir__, __all__ = lazy_loader.attach(
    __name__,
    submodules=[
        "callbacks",
        "cluster",
        "compression",
        "keras_distribution",
        "layers",
        "memory",
        "optimizers",
        "planning",
        "strategies",
        "testing",
    ],
    submod_attrs={
        "cluster": ["ClusterConfig", "ClusterError", "discover"],
        "cluster.first": ["on_chief_first"],
        "launcher.function.launch": ["launch"],
        "launcher.local.calls": ["LaunchError"],
        "optimizers": ["ShardedOptimizer"],
        "planning": ["plan"],
        "reproducibility": ["set_seed"],
        "steps.in_step": ["global_sum"],
        "strategies": [
            "FullyShardedStrategy",
            "HorovodStrategy",
            "HostOffloadStrategy",
            "LocalStepsStrategy",
            "MirroredStrategy",
            "MultiWorkerMirroredStrategy",
            "ParameterServerStrategy",
            "PipelineStrategy",
            "stage",
        ],
    },
)

# The one effect of an import, and only in a process that tfdist has started: scripts load data before they make a
# strategy, and all processes would download the same file at the same time. It imports none of the packages concerned.
if "TFDIST_RUN_ID" in os.environ:
    from tfdist.compat.preparation import prepare_in_turn

    prepare_in_turn()
