"""What is compared: tfdist's modes and their peers, by the names that tables show."""

from __future__ import annotations

PLAIN = "plain Keras"
RECOMPUTE, AUTO = 'tfdist "recompute"', 'tfdist "recompute", blocks="auto"'
PARK, SWAP = 'tfdist "park"', 'tfdist "swap"'
OFFLOAD = "tfdist.HostOffloadStrategy"
REMAT_SCOPE, RECOMPUTE_GRAD = "keras.RematScope", "tf.recompute_grad (keras.remat)"

# Those that need no host beside the device.
ON_DEVICE = (PLAIN, RECOMPUTE, AUTO, REMAT_SCOPE, RECOMPUTE_GRAD)
WITH_HOST = (PARK, SWAP, OFFLOAD)

# The modes of `tfdist.memory.MemoryPolicy`.
MODES = {RECOMPUTE: "recompute", AUTO: "recompute", PARK: "park", SWAP: "swap"}
