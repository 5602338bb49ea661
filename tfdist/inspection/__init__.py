"""Reads models, batches and datasets: their parts, values, properties and random state. It imports no strategy."""
