"""Optimizers for large embeddings and large models; importing it lets Keras find them in a saved model."""

from tfdist.optimizers.lazy_adam import LazyAdam
from tfdist.optimizers.sharded_optimizer import ShardedOptimizer

__all__ = ["LazyAdam", "ShardedOptimizer"]
