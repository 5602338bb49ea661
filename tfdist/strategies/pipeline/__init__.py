"""Pipelines: a model cut into stages, one a device, trained with micro-batches."""
