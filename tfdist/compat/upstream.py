"""Every private name of Keras and TensorFlow that tfdist uses; no other file imports one.

Keras' backends are about to move into packages of their own (keras issue 23523), and with them what is below
`keras.src`: then this file is what has to be changed. Names without a version are in all versions that tfdist was tested
with (`tfdist.compat.patch.TESTED`); "-" means that nothing public is planned.

Keras' nightly of 27 October 2026 (3.16) has all of these names, and needs all patches. What it has moved are the classes
of its trainers and of TensorFlow's variables, which `tfdist.compat.patch.inherited` finds. Two things are new in it: the
masks of a functional model are no calls any more, and the first step is traced with the static shapes of its batch, in
which a number of rows from `tf.shape` is a constant: replicas do not add it up. `make test-matrix MATRIX=2.21-nightly`
tries the next one.

| Names | What for | Public, or what would replace them |
|---|---|---|
| TFEpochIterator, pythonify_logs | `fit` step by step: parameter servers, and which step a strategy is given | hooks for strategies in Keras' trainer, keras issue 20585 |
| ArrayDataAdapter, PyDatasetAdapter, TFDatasetAdapter, data_adapter_utils | what kind of data `fit` was given, and how it is shuffled | - |
| model_supports_jit | what `jit_compile="auto"` means | - |
| Functional, unpack_singleton, Node | layers of a model as a graph: pipelines, memory | `keras.models.clone_model(call_function=)` does a part |
| CallContext | calls of layers that are run again | - |
| get_stateless_scope, in_stateless_scope, global_state | whether a variable is assigned, or only noted | `keras.StatelessScope` |
| AutocastScope, get_autocast_scope | dtypes in layers that are run again | - |
| get_keras_mask, set_keras_mask | masks of tensors that cross a cut | - |
| global_seed_generator, get_random_seed | seeds that nobody has given | - |
| is_default | whether a method is Keras' own | - |
| ask_to_proceed_with_overwrite | what `save(overwrite=False)` asks | - |
| no_automatic_dependency_tracking | attributes that are no state of a model | - |
| losses | which functions are Keras' own | - |
| current_path | which layer a message is about | - |
| compute_output_spec | shapes, without computing | `keras.KerasTensor` calls |
| mirrored_strategy, collective_strategy, one_device_strategy, parameter_server_strategy | the extended classes that strategies subclass | `tf.distribute.StrategyExtended` is public, its subclasses are not |
| cross_device_ops | sums over the processes without TensorFlow's servers | `tf.distribute.CrossDeviceOps` is public, that of several processes is not |
| distribute_lib, distribute_utils, device_util, mirrored_run | contexts and threads of replicas | `tf.distribute.ReplicaContext` is public in parts |
| values, DistributedValues, DistributedVariable, SyncOnReadVariable, PerReplicaSpec | what a replica has of a variable or a batch | `Strategy.experimental_local_results` reads them |
| input_lib, input_util, data_distribute, IteratorSpec, NoneTensorSpec | distributed datasets | `tf.distribute.DistributedDataset` is public without its constructor |
| coordinator_context, coordinator_values | what a worker of parameter servers is sent; a dataset from its graph | `tf.distribute.coordinator` is public in parts |
| _DefaultDistributionStrategy | whether there is no strategy | `tf.distribute.has_strategy()` for the current one |
| context, executor, framework_config | devices, the eager context of this process | `tf.config`, in parts |
| record | gradients of blocks that are run again | `tf.custom_gradient` traces more |
| func_graph, FuncGraph, ControlFlowFuncGraph, CondBranchFuncGraph, atomic_function, get_read_write_resource_inputs | what is in a traced function | `tf.__internal__.FuncGraph` |
| ops, op_def_registry, gradients_util | operations and their gradients | `tf.GradientTape`, in parts |
| trackable, CheckpointInitialValue | variables whose first value is in a checkpoint | - |
| attr_value_pb2, config_pb2, dataset_options_pb2, graph_pb2 | messages | `tf.compat.v1.ConfigProto` |
| device_lib, flops_registry, deprecation, nest | memory of devices; counting operations; quiet warnings; paths | - |
"""  # noqa: E501

from keras.src.backend import compute_output_spec
from keras.src.backend.common import global_state
from keras.src.backend.common.masking import get_keras_mask, set_keras_mask
from keras.src.backend.common.name_scope import current_path
from keras.src.backend.common.stateless_scope import get_stateless_scope, in_stateless_scope
from keras.src.backend.common.variables import AutocastScope, get_autocast_scope
from keras.src.backend.tensorflow.trainer import TFEpochIterator
from keras.src.layers.layer import CallContext
from keras.src.losses import losses
from keras.src.models.functional import Functional, unpack_singleton
from keras.src.ops.node import Node
from keras.src.random.seed_generator import global_seed_generator
from keras.src.trainers.data_adapters import data_adapter_utils
from keras.src.trainers.data_adapters.array_data_adapter import ArrayDataAdapter
from keras.src.trainers.data_adapters.py_dataset_adapter import PyDatasetAdapter
from keras.src.trainers.data_adapters.tf_dataset_adapter import TFDatasetAdapter
from keras.src.trainers.trainer import model_supports_jit
from keras.src.utils import is_default
from keras.src.utils.io_utils import ask_to_proceed_with_overwrite
from keras.src.utils.python_utils import pythonify_logs
from keras.src.utils.rng_utils import get_random_seed
from keras.src.utils.tracking import no_automatic_dependency_tracking
from tensorflow.core.framework import attr_value_pb2, dataset_options_pb2, graph_pb2
from tensorflow.core.protobuf import config_pb2
from tensorflow.python.client import device_lib
from tensorflow.python.data.experimental.ops import distribute as data_distribute
from tensorflow.python.data.ops.iterator_ops import IteratorSpec
from tensorflow.python.distribute import collective_all_reduce_strategy as collective_strategy
from tensorflow.python.distribute import (
    cross_device_ops,
    device_util,
    distribute_lib,
    distribute_utils,
    input_lib,
    input_util,
    mirrored_run,
    mirrored_strategy,
    one_device_strategy,
    values,
)
from tensorflow.python.distribute import parameter_server_strategy_v2 as parameter_server_strategy
from tensorflow.python.distribute.coordinator import coordinator_context
from tensorflow.python.distribute.coordinator import values as coordinator_values
from tensorflow.python.distribute.distribute_lib import _DefaultDistributionStrategy
from tensorflow.python.distribute.values import (
    DistributedValues,
    DistributedVariable,
    PerReplicaSpec,
    SyncOnReadVariable,
)
from tensorflow.python.eager import context, executor, record
from tensorflow.python.eager.polymorphic_function import atomic_function
from tensorflow.python.framework import config as framework_config
from tensorflow.python.framework import func_graph, op_def_registry, ops
from tensorflow.python.framework.auto_control_deps_utils import get_read_write_resource_inputs
from tensorflow.python.framework.func_graph import FuncGraph
from tensorflow.python.framework.none_tensor import NoneTensorSpec
from tensorflow.python.ops import gradients_util
from tensorflow.python.ops.control_flow_v2_func_graphs import CondBranchFuncGraph, ControlFlowFuncGraph
from tensorflow.python.profiler.internal import flops_registry
from tensorflow.python.trackable import base as trackable
from tensorflow.python.trackable.base import CheckpointInitialValue
from tensorflow.python.util import deprecation, nest

__all__ = [
    "ArrayDataAdapter",
    "AutocastScope",
    "CallContext",
    "CheckpointInitialValue",
    "CondBranchFuncGraph",
    "ControlFlowFuncGraph",
    "DistributedValues",
    "DistributedVariable",
    "FuncGraph",
    "Functional",
    "IteratorSpec",
    "Node",
    "NoneTensorSpec",
    "PerReplicaSpec",
    "PyDatasetAdapter",
    "SyncOnReadVariable",
    "TFDatasetAdapter",
    "TFEpochIterator",
    "_DefaultDistributionStrategy",
    "ask_to_proceed_with_overwrite",
    "atomic_function",
    "attr_value_pb2",
    "collective_strategy",
    "compute_output_spec",
    "config_pb2",
    "context",
    "coordinator_context",
    "coordinator_values",
    "cross_device_ops",
    "current_path",
    "data_adapter_utils",
    "data_distribute",
    "dataset_options_pb2",
    "deprecation",
    "device_lib",
    "device_util",
    "distribute_lib",
    "distribute_utils",
    "executor",
    "flops_registry",
    "framework_config",
    "func_graph",
    "get_autocast_scope",
    "get_keras_mask",
    "get_random_seed",
    "get_read_write_resource_inputs",
    "get_stateless_scope",
    "global_seed_generator",
    "global_state",
    "gradients_util",
    "graph_pb2",
    "in_stateless_scope",
    "input_lib",
    "input_util",
    "is_default",
    "losses",
    "mirrored_run",
    "mirrored_strategy",
    "model_supports_jit",
    "nest",
    "no_automatic_dependency_tracking",
    "one_device_strategy",
    "op_def_registry",
    "ops",
    "parameter_server_strategy",
    "pythonify_logs",
    "record",
    "set_keras_mask",
    "trackable",
    "unpack_singleton",
    "values",
]
