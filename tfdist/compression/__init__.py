"""Methods for sending less than whole gradients, for `compression=` of the data-parallel strategies."""

from tfdist.compression.power_sgd import PowerSGD
from tfdist.compression.top_k import TopK

__all__ = ["PowerSGD", "TopK"]
