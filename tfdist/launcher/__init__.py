"""The `tfdist` command: starts a cluster of an unchanged training script on this machine, and reports on it.

Nothing in this package imports TensorFlow, Keras or NumPy: the launcher has to start quickly and to stay small beside
the processes that it watches.
"""
