"""For tests of tfdist and of its users: run a function on a local cluster, assert that a strategy is transparent."""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach(
    "tfdist",
    submod_attrs={
        "launcher.local.local_cluster": ["LocalRunError", "run_local"],
        "launcher.local.fork_server": ["preload"],
        "testing.transparency": ["assert_transparent", "differences", "train_and_observe"],
    },
)
