"""What is compared: tfdist's modes and their peers, by the names that tables show."""

from __future__ import annotations

PLAIN = "plain Keras"
RECOMPUTE, AUTO = 'tfdist "recompute"', 'tfdist "recompute", blocks="auto"'
RECOMPUTE_SWAP, SWAP = 'tfdist "recompute+swap"', 'tfdist "swap"'
OFFLOAD = "tfdist.HostOffloadStrategy"
REMAT_SCOPE, RECOMPUTE_GRAD = "keras.RematScope", "tf.recompute_grad (keras.remat)"

# Those that need no host beside the device.
ON_DEVICE = (PLAIN, RECOMPUTE, AUTO, REMAT_SCOPE, RECOMPUTE_GRAD)
WITH_HOST = (RECOMPUTE_SWAP, SWAP, OFFLOAD)

# The modes of `tfdist.memory.MemoryPolicy`.
MODES = {RECOMPUTE: "recompute", AUTO: "recompute", RECOMPUTE_SWAP: "recompute+swap", SWAP: "swap"}
