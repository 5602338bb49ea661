"""For tests of tfdist and of its users: run a function on a local cluster, assert that a strategy is transparent."""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach(
    __name__,
    submod_attrs={
        "local_cluster": ["LocalRunError", "run_local"],
        "fork_server": ["preload"],
        "transparency": ["assert_transparent", "differences", "train_and_observe"],
    },
)
