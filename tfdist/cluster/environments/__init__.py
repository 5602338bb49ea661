"""The environments that a cluster can be found in, one file each.

A new one is a module with `NAME`, `detect(env) -> bool` and `read(env) -> ClusterConfig`, and a line below.
The first whose `detect` is true is read, so the most specific comes first and `single_process`, always true, last.
"""

from __future__ import annotations

from tfdist.cluster.environments import launcher, single_process, tf_config

ENVIRONMENTS = (launcher, tf_config, single_process)
