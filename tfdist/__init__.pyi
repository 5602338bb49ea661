from tfdist import callbacks as callbacks
from tfdist import cluster as cluster
from tfdist import compression as compression
from tfdist import layers as layers
from tfdist import memory as memory
from tfdist import optimizers as optimizers
from tfdist import planning as planning
from tfdist import strategies as strategies
from tfdist import testing as testing
from tfdist.cluster import ClusterConfig as ClusterConfig
from tfdist.cluster import ClusterError as ClusterError
from tfdist.cluster import discover as discover
from tfdist.launcher.function.launch import launch as launch
from tfdist.launcher.local.calls import LaunchError as LaunchError
from tfdist.optimizers import ShardedOptimizer as ShardedOptimizer
from tfdist.planning import auto as auto
from tfdist.planning import plan as plan
from tfdist.reproducibility import set_seed as set_seed
from tfdist.strategies import HorovodStrategy as HorovodStrategy
from tfdist.strategies import HostOffloadStrategy as HostOffloadStrategy
from tfdist.strategies import MirroredStrategy as MirroredStrategy
from tfdist.strategies import MultiWorkerMirroredStrategy as MultiWorkerMirroredStrategy
from tfdist.strategies import ParameterServerStrategy as ParameterServerStrategy
from tfdist.strategies import PipelineStrategy as PipelineStrategy
from tfdist.strategies import stage as stage

__version__: str
