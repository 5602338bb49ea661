"""Sums over the processes of a job that need no TensorFlow server: shared memory on a host, sockets between hosts."""
