from tfdist.launcher.local.fork_server import preload as preload
from tfdist.launcher.local.local_cluster import LocalRunError as LocalRunError
from tfdist.launcher.local.local_cluster import run_local as run_local
from tfdist.testing.transparency import assert_transparent as assert_transparent
from tfdist.testing.transparency import differences as differences
from tfdist.testing.transparency import train_and_observe as train_and_observe
