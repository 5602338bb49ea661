"""One interface to what runs jobs: a queue on this machine, Slurm, Kubernetes. Each does its own scheduling.

What has been submitted is kept as one JSON file a job, beside a folder with what the job needs and writes. Nothing in
this package imports TensorFlow, Keras or NumPy.
"""

from __future__ import annotations

BACKENDS = ("local", "slurm", "kubernetes")
