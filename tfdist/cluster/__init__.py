"""The cluster: which processes take part, where they are, and which of them this one is.

Nothing in this package imports TensorFlow, Keras or NumPy.
"""

from __future__ import annotations

from tfdist.cluster import preflight
from tfdist.cluster.config import ClusterConfig
from tfdist.cluster.discovery import discover
from tfdist.cluster.errors import ClusterError

__all__ = ["ClusterConfig", "ClusterError", "discover", "preflight"]
