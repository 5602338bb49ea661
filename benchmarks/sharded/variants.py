"""What is compared, as plain numbers and words."""

from __future__ import annotations

from benchmarks.network.shape import Shape

PLAIN, SHARDED, KEPT = "plain", "sharded", "kept"
TITLES = {
    "tfdist": {
        PLAIN: "MultiWorkerMirroredStrategy",
        SHARDED: "FullyShardedStrategy",
        KEPT: "FullyShardedStrategy(reshard_after_forward=False)",
    },
    "torch": {PLAIN: "PyTorch DDP", SHARDED: "PyTorch FSDP2", KEPT: "PyTorch FSDP2, reshard_after_forward=False"},
}
VARIANTS = (PLAIN, SHARDED, KEPT)
SHAPES = {
    # 40 million parameters.
    "full": Shape(vocabulary=8192, length=128, width=640, heads=10, blocks=6),
    # As many layers, and hardly any weights.
    "tiny": Shape(vocabulary=64, length=128, width=20, heads=2, blocks=6),
}
ROWS, MORE_ROWS = 2, 8
