"""A Keras step that replicas trace, and what they exchange in it: known to optimizers, compression and strategies."""
