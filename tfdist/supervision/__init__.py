"""What the launcher and the processes that it watches have in common: progress, events and exit codes.

Nothing in this package imports TensorFlow, Keras or NumPy.
"""
