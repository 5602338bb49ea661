"""Layers for models whose weights live on several machines; importing it lets Keras find them in a saved model."""

from tfdist.layers.sharded_embedding import ShardedEmbedding

__all__ = ["ShardedEmbedding"]
