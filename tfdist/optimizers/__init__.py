"""Optimizers for models with large embeddings; importing it lets Keras find them in a saved model."""

from tfdist.optimizers.lazy_adam import LazyAdam

__all__ = ["LazyAdam"]
