"""Jobs: submit, status, logs, cancel and monitor, on this machine, Slurm or Kubernetes.

Each submitted job is kept as one JSON file, beside a folder with what the job needs and writes. Scheduling is left to
the system that runs it. Nothing in this package imports TensorFlow, Keras or NumPy.
"""

from __future__ import annotations

SCHEDULERS = ("local", "slurm", "kubernetes")
