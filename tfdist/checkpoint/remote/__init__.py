"""Backups in buckets: what takes the place of a lock, and what is tried before the training begins."""
