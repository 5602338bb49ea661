from tfdist.strategies.horovod.strategy import HorovodStrategy as HorovodStrategy
from tfdist.strategies.host_offload.strategy import HostOffloadStrategy as HostOffloadStrategy
from tfdist.strategies.mirrored import MirroredStrategy as MirroredStrategy
from tfdist.strategies.multi_worker import MultiWorkerMirroredStrategy as MultiWorkerMirroredStrategy
from tfdist.strategies.parameter_server.strategy import ParameterServerStrategy as ParameterServerStrategy
from tfdist.strategies.pipeline.cuts import stage as stage
from tfdist.strategies.pipeline.strategy import PipelineStrategy as PipelineStrategy
