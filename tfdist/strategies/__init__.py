"""tf.distribute strategies that Keras 3's `fit`, `evaluate` and `predict` can use."""

from tfdist.strategies.mirrored import MirroredStrategy
from tfdist.strategies.multi_worker import MultiWorkerMirroredStrategy

__all__ = ["MirroredStrategy", "MultiWorkerMirroredStrategy"]
