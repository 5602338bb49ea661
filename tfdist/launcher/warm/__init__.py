"""Restarts without a new import of TensorFlow: processes forked from one that has imported it."""
