"""The kinds of block calls: what one keeps for its backward pass, and where. A new kind is a `BlockCall` in this file.

A kind says what a block does in the forward pass and in the backward pass. The tapes outside see one operation:

    call_block:  weights, state, inputs -> kind.forward() -> outputs        as one operation, "TfdistBlock"
                 dL/d outputs -> kind.backward() -> dL/d weights, dL/d inputs

    kind             weights                       inputs, until the backward pass   backward pass
    Recomputed       on the device                 on the device                     runs again
    SwappedInputs    on the device                 on the host                       fetches inputs, runs again
    Swapped          on the device                 with all results, on the host     fetches what it reads
    Streamed         on the host, fetched twice    on the host                       fetches both, runs again
    Fetched          on the host, fetched once     (nothing is trained)
    Gathered         in parts, gathered twice      with all results, on the device   reads the second copy
    GatheredAgain    in parts, gathered twice      on the device                     runs again
    GatheredOnce     in parts, gathered once       (nothing is trained)

`KINDS`, at the end, gives each mode of a policy its kind.

Running again. Source: "Training Deep Nets with Sublinear Memory Cost" (Chen et al., arXiv 1604.06174). Unlike
`keras.remat` and `tf.recompute_grad`, the second run sees the seeds and the statistics of the first one, and changes
nothing. The graph of one block, for a loss L:

    forward:   inputs -> first run -> outputs                 no tape records it: what it makes is given back at once
    backward:  dL/d outputs ready
               -> identity of inputs, weights and state       control dependencies: not before dL/d outputs
               -> second run, recorded by a tape              makes again what the gradients read
               -> gradients of weights and inputs             leave together, so that nothing of the block stays

Keeping on the host. `Swapped` follows TensorFlow Large Model Support (arXiv 1807.02037): edges of the graph from the
forward to the backward pass are led through the host. `Streamed` follows "Training Large Neural Networks with Constant
Memory using a New Execution Algorithm" (Pudipeddi et al., arXiv 2002.05645: L2L, layer to layer). The way of one tensor
to the host and back:

    device:  tensor                                                                    identity -> backward pass
    host:      identity (the copy, made at once)  ... waits for the gate ...  identity

TensorFlow sends a tensor as soon as it is there. So the gate is on the host, between two identities: it is the gradient
with which the block begins that goes back `prefetch` blocks earlier.
"""

from __future__ import annotations

import contextlib
from collections.abc import Collection, Iterable, Sequence
from typing import Any, ClassVar

import keras
import tensorflow as tf

from tfdist.compat.upstream import AutocastScope, get_autocast_scope, ops, record
from tfdist.inspection.model_state import is_sharded
from tfdist.layer_graph.chunk import (
    CHANGING,
    NOT_DENSE,
    UNSEEDED,
    ImpureError,
    PureResult,
    as_one_operation,
    is_differentiable,
)
from tfdist.layer_graph.costs import NOT_COMPUTED
from tfdist.memory.block import GraphBlock, LayerBlock, RegularizerBlock, labelled, record_operations, upstream
from tfdist.memory.order import Keeping, gated, released_together, waiting_for
from tfdist.steps.keras_step import shadowed
from tfdist.steps.shards import gathered, scattered

Block = GraphBlock | LayerBlock | RegularizerBlock


class BlockCall:
    """One call of a block, and what it leaves for its backward pass: the interface of a kind.

    A kind overrides `forward` and `backward`, and says with `inference` which kind takes its place where nothing is
    trained; without one the block is simply run.

    Attributes:
        block: the block, whose `run` computes with any values of its variables.
        trainable: values of its trainable variables.
        state: values of its other variables.
        tensors: its inputs.
        keeping: how it is called.
        place: its number in the forward pass.
        made: the names of the operations that the block has made in its forward pass, in a graph.
        others: trainable variables of other layers, which it has read.
        used: in the backward pass, the numbers of the outputs and losses that have a gradient.
    """

    inference: ClassVar[type[BlockCall] | None] = None
    made: Collection[str] = ()
    others: Sequence[keras.Variable] = ()
    used: Sequence[int] = ()

    def __init__(self, block: Block, trainable: list, state: list, tensors: list, keeping: Keeping):
        self.block, self.trainable, self.state, self.keeping = block, trainable, state, keeping
        self._autocast = get_autocast_scope()
        self.place = keeping.order.begin_block()
        # The block reads copies of its inputs. The first of them is the operation with which the block begins: other
        # blocks can wait for it, and it waits for them.
        with tf.control_dependencies(keeping.order.to_wait_for(self.place)):
            self.tensors = [tf.identity(tensor) for tensor in tensors]
        if self.tensors and not tf.executing_eagerly():
            keeping.order.first[self.place] = self.tensors[0].op

    def forward(self) -> PureResult:
        """Runs the block."""
        raise NotImplementedError

    def backward(self, cotangents: Sequence[tf.Tensor]) -> list[Any]:
        """The gradients of the trainable variables, of `others` and of the inputs, `None` where there is none.

        Args:
            cotangents: gradients of those outputs, and losses that the layers have added, that have one.
        """
        raise NotImplementedError

    def start_of_an_earlier_block(self) -> list[tf.Operation]:
        """The gate of the weights in the forward pass: the first operation of the block `prefetch` blocks before.

        Without it, the weights of all blocks would be sent, or gathered, at the beginning of the step.
        """
        place = self.place - self.keeping.prefetch
        first = self.keeping.order.first[place] if place >= 0 else None
        return [first] if first is not None else []

    def gradients(
        self, tape: tf.GradientTape, result: PureResult, trainable: list, tensors: list, cotangents: Sequence
    ) -> list[Any]:
        """The gradients of `trainable`, `others` and `tensors`, which the tape has watched."""
        sources = [*trainable, *(variable._value for variable in self.others), *tensors]
        outputs = [*result.result, *result.losses]
        pairs = zip([outputs[i] for i in self.used], cotangents, strict=True)
        pairs = [(o, c) for o, c in pairs if is_differentiable(o)]
        taken = [source for source in sources if is_differentiable(source)]
        found = iter(tape.gradient([o for o, _ in pairs], taken, output_gradients=[c for _, c in pairs]))
        return [next(found) if is_differentiable(source) else None for source in sources]


def watch(tape: tf.GradientTape, tensors: Sequence[tf.Tensor]) -> None:
    """Lets a tape watch the tensors that can have gradients."""
    tape.watch([tensor for tensor in tensors if is_differentiable(tensor)])


def call_block(block: Block, kind: type[BlockCall], keeping: Keeping) -> PureResult:
    """Calls a block, whose variables may change; returns its outputs and the losses that its layers have added."""
    with labelled(block.label):
        with AutocastScope(None):
            trainable, state = ([_stored(v) for v in variables] for variables in (block.trainable, block.state))
        trained = record.should_record_backprop([*trainable, *block.tensors])
        used = kind if trained else kind.inference
        begin = ops.uid()
        call = used and used(block, trainable, state, block.tensors, keeping)
        result = call.forward() if call else block.run(trainable, state, block.tensors)
        if trained:
            _check_reads(call, begin, [*trainable, *block.tensors], state)
            call.others = result.others
        for variable, old, new in zip(block.state, state, result.state, strict=True):
            if new is not old:
                variable.assign(new)
        if not trained:
            return result
        with AutocastScope(None):
            recorded = [*trainable, *map(_stored, result.others), *block.tensors]
        result = _as_one_operation(call, recorded, result)
        block.kept.put(result.result)
        return result


def _check_reads(call: BlockCall, begin: int, sources: Sequence[tf.Tensor], state: Sequence[tf.Tensor]) -> None:
    """Refuses a layer that reads a tensor which it was not passed, an attribute say: its gradient would be lost.

    Args:
        call: of a block that is trained, after its forward pass.
        begin: the number with which tensors begin that were made since.
        sources: the values of its trainable variables, and its inputs.
        state: those of its other variables.
    """
    known, passed = call.keeping.order.sources, {id(tensor) for tensor in (*sources, *state)}
    graph = tf.compat.v1.get_default_graph()

    def before(operation: tf.Operation) -> list[tf.Operation]:
        return [one.op for one in operation.inputs if is_differentiable(one) and operation.type != "StopGradient"]

    for operation in map(graph.get_operation_by_name, call.made):
        for one in operation.inputs:
            if one._id > begin or id(one) in passed or not is_differentiable(one):
                continue
            # No tape sees what is inside of another block.
            hidden = any(op.name in known for op in upstream([one.op], before))
            if hidden or record.should_record_backprop([one]):
                raise ImpureError(
                    f"Received: block '{call.block.label}', in which a layer reads a tensor that it was not passed "
                    f"({one.name}, in operation {operation.name}). Its gradient would be lost. Expected: layers that "
                    "take tensors as arguments of their call; or blocks=[...] with a layer that contains both."
                )
    known.update(one.op.name for one in sources if call.made and record.should_record_backprop([one]))


def _stored(variable: keras.Variable) -> tf.Tensor:
    """The value of a variable, or this replica's part of it."""
    return variable._value.part() if is_sharded(variable) else tf.convert_to_tensor(variable.value)


def _as_one_operation(call: BlockCall, recorded: Sequence[tf.Tensor], result: PureResult) -> PureResult:
    """What the caller gets of a block that is trained."""

    def backward(cotangents: Sequence[Any]) -> list[Any]:
        call.used = [i for i, cotangent in enumerate(cotangents) if cotangent is not None]
        with labelled(call.block.label):
            return call.backward([cotangents[i] for i in call.used])

    if any(isinstance(tensor, NOT_DENSE) for tensor in result.result):
        raise ImpureError(
            f"Received: block '{call.block.label}', which returns a sparse or ragged tensor. Expected: blocks=[...] "
            "with layers that return dense tensors."
        )
    passed = as_one_operation("TfdistBlock", [*result.result, *result.losses], recorded, backward)
    count = len(result.result)
    return PureResult(passed[:count], result.state, passed[count:])


# Their number may differ between the runs: some are made once for a graph, and shared.
_NOT_COMPARED = frozenset({"Placeholder", "Const"})


class Recomputed(BlockCall):
    """Keeps the inputs on the device.

    Attributes:
        hides: whether no tape sees what happens in the first run: what a tape records is kept until the backward pass.
    """

    hides: ClassVar[bool] = True

    # Of the first run; none when executed eagerly.
    _graph: tf.Graph | None = None

    def forward(self) -> PureResult:
        with record.stop_recording() if self.hides else contextlib.nullcontext():
            if tf.executing_eagerly():
                return self.block.run(self.trainable, self.state, self.tensors)
            self._graph = tf.compat.v1.get_default_graph()
            with record_operations(self._graph) as self.made:
                result = self.block.run(self.trainable, self.state, self.tensors)
            _check_effects(self.block.label, map(self._graph.get_operation_by_name, self.made))
            return result

    def inputs(self) -> list[tf.Tensor]:
        """The inputs again, in the backward pass."""
        return self.tensors

    def backward(self, cotangents: Sequence[tf.Tensor]) -> list[Any]:
        compiled = self.keeping.compiled
        self.keeping.order.begun.append(list(cotangents))
        # The second run reads copies that wait for the gradients of the outputs: without that, TensorFlow would run it
        # at once, or merge it with the first run, and everything would be kept after all.
        trainable, state, tensors = gated([self.trainable, self.state, self.inputs()], cotangents, compiled)
        # The two runs are compared only if they are in one graph: a gradient may be made in another one.
        same = self._graph is not None and tf.compat.v1.get_default_graph() is self._graph
        # `waiting_for` is for operations without inputs that could wait, such as random numbers.
        # Layers without a dtype of their own compute in the dtype of the forward pass.
        autocast = AutocastScope(self._autocast and self._autocast.dtype)
        with autocast, waiting_for(cotangents, compiled), tf.GradientTape() as tape, _recorded_if(same) as again:
            watch(tape, [*trainable, *tensors])
            result = self.block.run(trainable, state, tensors)
        with _recorded_if(same) as made:
            gradients = self.gradients(tape, result, trainable, tensors, cotangents)
        if same:
            self._check_functions(again)
            self._check_variables(again)
        if same and not compiled:  # XLA merges operations by rules of its own
            found = [t for t in tf.nest.flatten(gradients, expand_composites=True) if t is not None]
            keep_apart(self._graph, self.made, again, made, found)
        return released_together(gradients, compiled)

    def _check_functions(self, again: Sequence[str]) -> None:
        """Refuses a function that TensorFlow traces once: the second run's weights are not what it has captured."""
        # A function that captures what was read of a variable reads the variable itself.
        weights = {id(one) for value in self.trainable for one in (value, *value.op.inputs)}

        def read(names: Sequence[str]) -> set[int]:
            calls = (op for op in map(self._graph.get_operation_by_name, names) if op.type.endswith("PartitionedCall"))
            inputs = [one for op in calls for one in op.inputs if one.op.type != "Const"]
            return {id(one) for one in inputs if one.dtype.is_floating or id(one) in weights}

        if read(self.made) & read(again):
            raise ImpureError(
                f"Received: block '{self.block.label}', which is to be run again and has a layer that calls a "
                "tf.function, which would read the weights of the first run. Expected: no tf.function, since Keras "
                "compiles the step; or mode 'none' for this block."
            )

    def _check_variables(self, again: Sequence[str]) -> None:
        """Refuses variables of others that have changed between the two runs: the second one reads something else."""
        first = max((self._graph.get_operation_by_name(name)._id for name in self.made), default=0)
        for read in map(self._graph.get_operation_by_name, again):
            if read.type not in ("ReadVariableOp", "ResourceGather"):
                continue
            changes = [one for one in read.inputs[0].consumers() if one.type in CHANGING and first < one._id < read._id]
            if changes:
                raise ImpureError(
                    f"Received: block '{self.block.label}', which is to be run again and reads a variable of another "
                    f"layer ({read.name}), which the step has changed before that ({changes[0].name}). Expected: "
                    "layers that get its value as an argument of their call; or mode 'none' or 'swap' for this block."
                )


def _recorded_if(wanted: bool) -> contextlib.AbstractContextManager[list[str]]:
    return record_operations(tf.compat.v1.get_default_graph()) if wanted else contextlib.nullcontext([])


def _check_effects(block: str, operations: Iterable[tf.Operation]) -> None:
    for operation in operations:
        if operation.type in UNSEEDED | CHANGING:
            random = operation.type in UNSEEDED
            what = "draws random numbers that would be others" if random else "changes a variable of TensorFlow also"
            remedy = "keras.random functions with a SeedGenerator" if random else "variables made by `add_weight`"
            raise ImpureError(
                f"Received: block '{block}', which is to be run again and {what} the second time (operation "
                f"{operation.name}, {operation.type}). Expected: {remedy}; or mode 'none' or 'swap' for this block."
            )


def keep_apart(
    graph: tf.Graph, first: Sequence[str], again: Sequence[str], backward: Sequence[str], gradients: Sequence[tf.Tensor]
) -> None:
    """Lets Grappler merge nothing across a tensor that, in plain training, the backward pass reads as well.

    Grappler makes one kernel of a product, a sum and an activation where nothing else reads what is between them, and
    such a kernel rounds differently. In plain training the backward pass often does read it. Where a block is run
    twice, nothing else reads what is inside of the first run, and nothing reads the end of the second one: each would
    be merged in its own way. Such a tensor gets an `EnsureShape` behind it, in the first run and, where it has to, in
    the second.
    """
    firsts, seconds = _compared(graph, first), _compared(graph, again)
    if [op.type for op in firsts] != [op.type for op in seconds]:
        return  # A layer that does something else the second time: there is nothing to compare.
    in_first, in_second = set(firsts), set(seconds)
    needed = _needed(gradients, {*again, *backward})
    later = needed - in_second
    for one, other in zip(firsts, seconds, strict=True):
        # A loop of which a gradient is computed has more outputs: what it keeps for the gradient.
        for before, after in zip(one.outputs, other.outputs, strict=False):
            readers = after.consumers()
            inside = [op for op in readers if op in in_second]
            outside = [op for op in readers if op in later and not _reads_shape(op, after)]
            if not (after.dtype.is_floating and inside and outside):
                continue
            _part(before, [op for op in before.consumers() if op in in_first])
            if sum(op in needed for op in readers) < 2:
                _part(after, readers)


def _compared(graph: tf.Graph, names: Sequence[str]) -> list[tf.Operation]:
    return [op for op in map(graph.get_operation_by_name, names) if op.type not in _NOT_COMPARED]


def _needed(gradients: Sequence[tf.Tensor], names: set[str]) -> set[tf.Operation]:
    """Those of the named operations from which the gradients are computed: TensorFlow drops the others."""
    named = [tensor.op for tensor in gradients if tensor.op.name in names]
    return upstream(named, lambda op: [tensor.op for tensor in op.inputs if tensor.op.name in names])


def _reads_shape(op: tf.Operation, tensor: tf.Tensor) -> bool:
    """Whether it becomes a constant before anything is merged."""
    return op.type in ("Shape", "ShapeN", "Size", "Rank") and tensor.shape.is_fully_defined()


def _part(tensor: tf.Tensor, readers: Sequence[tf.Operation]) -> None:
    """Lets operations read a tensor through an `EnsureShape`: it copies nothing, and Grappler does not remove it."""
    if tensor.shape.rank is None:
        return
    # No control dependencies: this is made in the backward pass, whose gates must not hold up the forward pass. The
    # name begins with that of the tensor, because Grappler sorts factors and terms by name before it moves constants
    # among them: the order must stay what it was.
    name = f"{tensor.op.name}/apart"
    with tf.control_dependencies(None), tf.device(tensor.op.device or None), tensor.graph.name_scope(None):
        same = tf.raw_ops.EnsureShape(input=tensor, shape=tensor.shape, name=name)
    for op in readers:
        for position, given in enumerate(op.inputs):
            if given is tensor:
                op._update_input(position, same)


_NOT_COPIED = frozenset({tf.resource, tf.variant, tf.string})


def is_data(tensor: tf.Tensor) -> bool:
    """Whether it may go to the host: no resource or text, and no shape.

    Grappler replaces shapes by constants before a step runs; through a copy on the host it could not.
    """
    is_shape = tensor.dtype.is_integer and tensor.shape.rank is not None and tensor.shape.rank < 2
    return not is_shape and tensor.dtype not in _NOT_COPIED


def to_host(tensor: tf.Tensor, place: int, keeping: Keeping) -> tf.Tensor:
    """A copy on the host, made once for each tensor."""
    on_host = keeping.order.on_host
    if id(tensor) not in on_host:
        with tf.device(keeping.host):
            copy = tf.identity(tensor)
        on_host[id(tensor)] = tensor, copy
        if not tf.executing_eagerly():
            keeping.order.copies[place].append(copy.op)
    return on_host[id(tensor)][1]


def from_host(copy: tf.Tensor, device: str, keeping: Keeping, gate: Sequence[Any] | None = None) -> tf.Tensor:
    """Brings a tensor from the host to the device, not before the gate is open.

    By default the gate is what `keeping` says for the backward pass. An empty device leaves that to TensorFlow.
    """
    # The wait must be on the host, before the tensor is sent: a wait on the device would come after the transfer, when
    # the tensor takes memory there already.
    gate = keeping.order.fetch_after(keeping.prefetch) if gate is None else gate
    with tf.device(keeping.host), waiting_for(gate, keeping.compiled):
        sent = tf.identity(copy)
    with tf.device(device or None):
        return tf.identity(sent)


class SwappedInputs(Recomputed):
    """Keeps the inputs on the host: copied in the forward pass, fetched in the backward pass, before the second run."""

    def __init__(self, block: Block, trainable: list, state: list, tensors: list, keeping: Keeping):
        super().__init__(block, trainable, state, tensors, keeping)
        self._devices = [tensor.device for tensor in self.tensors]
        self._copies = [to_host(t, self.place, keeping) if keeping.moves(t) else None for t in tensors]

    def forward(self) -> PureResult:
        result = super().forward()
        self.tensors = [t if copy is None else None for t, copy in zip(self.tensors, self._copies, strict=True)]
        return result

    def inputs(self) -> list[tf.Tensor]:
        kept = zip(self.tensors, self._copies, self._devices, strict=True)
        return [t if copy is None else from_host(copy, device, self.keeping) for t, copy, device in kept]


class Swapped(BlockCall):
    """Keeps everything on the host that its backward pass reads.

    The forward pass runs under a tape, as in plain training, and so makes the operations of the gradients. Then every
    edge from a tensor of the forward pass to an operation of the backward pass is replaced: the operation reads a
    copy that has been on the host. What nothing but the backward pass read is free on the device after its copy.
    """

    def __init__(self, *args: Any):
        if tf.executing_eagerly():
            raise ValueError(
                "Received: mode 'swap' outside of a graph (run_eagerly=True, or a tape without tf.function). What the "
                "backward pass reads is led through the host by changing a graph. Expected: run_eagerly=False; or mode "
                "'recompute' or 'recompute+swap'."
            )
        super().__init__(*args)
        self._graph = tf.compat.v1.get_default_graph()

    def forward(self) -> PureResult:
        with record_operations(self._graph) as made, tf.GradientTape(persistent=True) as self._tape:
            watch(self._tape, [*self.trainable, *self.tensors])
            self._result = self.block.run(self.trainable, self.state, self.tensors)
        self.made = {*made, *(tensor.op.name for tensor in self.tensors)}
        return self._result

    def backward(self, cotangents: Sequence[tf.Tensor]) -> list[Any]:
        self.keeping.order.begun.append(list(cotangents))
        with record_operations(self._graph) as made:
            gradients = self.gradients(self._tape, self._result, self.trainable, self.tensors, cotangents)
        self._reroute(made)
        # Only now there are copies to wait for: which tensors the gradients read was not known in the forward pass.
        self.keeping.order.hold_back(self.place)
        return released_together(gradients, compiled=False)

    def _reroute(self, names: Sequence[str]) -> None:
        """Lets the operations of the backward pass read from the host what the forward pass has made."""
        back: dict[int, tf.Tensor] = {}
        for operation in map(self._graph.get_operation_by_name, names):
            for position, tensor in enumerate(operation.inputs):
                # Only results of computations are kept for the backward pass.
                computed = tensor.op.name in self.made and tensor.op.type not in NOT_COMPUTED
                if not (computed and is_data(tensor) and self.keeping.moves(tensor)):
                    continue
                if id(tensor) not in back:
                    back[id(tensor)] = from_host(to_host(tensor, self.place, self.keeping), tensor.device, self.keeping)
                operation._update_input(position, back[id(tensor)])


class Fetched(Recomputed):
    """Takes the values of its variables from the host; where nothing is trained, this is all there is to do."""

    # A layer may read a weight of another one, which is trained.
    hides = False

    def __init__(self, *args: Any):
        super().__init__(*args)
        # The block computes where its inputs are; its variables are on the host.
        self._device = self.tensors[0].device if self.tensors else ""

    def forward(self) -> PureResult:
        with self._variables_on_device(self.start_of_an_earlier_block()):
            result = super().forward()
            on_device = self.state
        # A state that the block has not changed is still on the host: give that back, not the copy on the device.
        triples = zip(result.state, on_device, self.state, strict=True)
        return result._replace(state=[on_host if new is old else new for new, old, on_host in triples])

    def _variables_on_device(self, gate: Sequence[Any]) -> contextlib.AbstractContextManager[None]:
        """While the block runs, its variables' values are copies on the device, which leave the host after the gate."""
        trainable, state = (
            [from_host(value, self._device, self.keeping, gate) for value in values]
            for values in (self.trainable, self.state)
        )
        return shadowed(self, trainable=trainable, state=state)


class Streamed(Fetched, SwappedInputs):
    """Fetches its inputs and the values of its variables once more in the backward pass, and runs again.

    Nothing that was fetched in the forward pass stays on the device until then.
    """

    inference = Fetched
    hides = True

    def backward(self, cotangents: Sequence[tf.Tensor]) -> list[Any]:
        order = self.keeping.order
        # The second run needs the weights on the device, fetched behind the same gate as the inputs.
        with self._variables_on_device(order.fetch_after(self.keeping.prefetch, [list(cotangents)])):
            gradients = super().backward(cotangents)
        count = len(self.trainable) + len(self.others)
        # Gradients of weights go to the host, where the optimizer updates; those of inputs go on to the next block.
        with tf.device(self.keeping.host):
            on_host = tf.nest.map_structure(
                lambda t: t if t is None else tf.identity(t), gradients[:count], expand_composites=True
            )
        order.sent.append([t for t in tf.nest.flatten(on_host, expand_composites=True) if t is not None])
        # Back-pressure: the next block waits until the gradients of the block before this one are on the host. Without
        # it the device would compute faster than the link can send, and gradients would pile up on it.
        earlier = order.sent[-2] if len(order.sent) > 1 else []
        [passed] = gated([[g for g in gradients[count:] if g is not None]], earlier, self.keeping.compiled)
        rest = iter(passed)
        return [*on_host, *(None if g is None else next(rest) for g in gradients[count:])]


class _Gathering(BlockCall):
    """Takes the values of its variables from all replicas. Those that are not sharded stay as they are.

    Attributes:
        keeps: whether what was gathered for the forward pass stays for the backward pass.
    """

    keeps: ClassVar[bool] = False

    def __init__(self, *args: Any):
        super().__init__(*args)
        self._parts = self.trainable, self.state
        self._layouts = [v._value.layout if is_sharded(v) else None for v in (*self.block.trainable, *self.block.state)]
        self._again: tuple[list, list] | None = None

    def gathered(self, gate: Sequence[Any]) -> tuple[list, list]:
        """The whole values of trainable variables and state, gathered after the gate."""
        values = [*self._parts[0], *self._parts[1]]
        chosen = [i for i, layout in enumerate(self._layouts) if layout is not None]
        [parts] = gated([[values[i] for i in chosen]], gate, self.keeping.compiled)
        # Tapes of the caller record it: a gradient of a gradient comes to the weights this way.
        for i, whole in zip(chosen, gathered(parts, [self._layouts[i] for i in chosen]) if chosen else [], strict=True):
            values[i] = whole
        count = len(self._parts[0])
        return values[:count], values[count:]

    def gather_again(self, gate: Sequence[Any]) -> None:
        """Gathers for the backward pass, unless that is done; later blocks do it ahead for earlier ones."""
        if self._again is None:
            # The backward pass of the last block follows its forward pass at once.
            is_kept = self.keeps or self.place == len(self.keeping.order.first) - 1
            self._again = self._first if is_kept else self.gathered(gate)

    def begin_backward(self, cotangents: Sequence[tf.Tensor]) -> tuple[list, list]:
        """Lets earlier blocks gather, and returns what was gathered for this one.

        Exchanges run in the order in which they are made. So the block before this one gathers its weights first, while
        this one computes, and the gradients of this one are reduced afterwards.
        """
        order = self.keeping.order
        order.begun.append(list(cotangents))
        self.gather_again(cotangents)
        for place in range(self.place - 1, self.place - 1 - self.keeping.prefetch, -1):
            if place in order.gathering:
                order.gathering[place](cotangents)
        return self._again

    def forward_values(self) -> tuple[list, list]:
        """What is gathered for the forward pass, not before an earlier block begins."""
        self.keeping.order.gathering[self.place] = self.gather_again
        self._first = self.gathered(self.start_of_an_earlier_block())
        return self._first

    def state_of(self, result: PureResult, state: list) -> PureResult:
        """A state that the block has not changed is given back as it is stored."""
        triples = zip(result.state, state, self._parts[1], strict=True)
        return result._replace(state=[stored if new is whole else new for new, whole, stored in triples])

    def to_parts(self, gradients: list[Any]) -> list[Any]:
        """The gradients of trainable variables, as parts, and those of inputs as they are."""
        count = len(self._parts[0])
        chosen = [i for i in range(count) if self._layouts[i] is not None]
        own = scattered([gradients[i] for i in chosen], [self._layouts[i] for i in chosen])
        for i, part in zip(chosen, own, strict=True):
            gradients[i] = part
        return gradients


class GatheredOnce(_Gathering):
    """Gathers its weights, and runs."""

    def forward(self) -> PureResult:
        trainable, state = self.forward_values()
        return self.state_of(self.block.run(trainable, state, self.tensors), state)


class Gathered(_Gathering):
    """Keeps all results, but not the weights: its backward pass reads a copy that is gathered again.

    The forward pass runs under a tape, as in plain training. Then every edge from a weight, or from what was computed
    of weights alone (a cast, say), to an operation of the backward pass is replaced: the operation reads what is
    computed from the weights that were gathered again. So nothing keeps those of the forward pass.
    """

    inference = GatheredOnce

    def forward(self) -> PureResult:
        graph = tf.compat.v1.get_default_graph()
        trainable, state = self.forward_values()
        with record_operations(graph) as self.made, tf.GradientTape(persistent=True) as self._tape:
            watch(self._tape, [*trainable, *self.tensors])
            self._result = self.block.run(trainable, state, self.tensors)
        return self.state_of(self._result, state)

    def backward(self, cotangents: Sequence[tf.Tensor]) -> list[Any]:
        again = self.begin_backward(cotangents)
        graph = tf.compat.v1.get_default_graph()
        with record_operations(graph) as made:
            gradients = self.gradients(self._tape, self._result, self._first[0], self.tensors, cotangents)
        if not tf.executing_eagerly():
            self._reroute(graph, made, again)
        return self.to_parts(released_together(gradients, self.keeping.compiled))

    def _reroute(self, graph: tf.Graph, names: Sequence[str], again: tuple[list, list]) -> None:
        copies = {
            id(first): second
            for one, other in zip(self._first, again, strict=True)
            for first, second in zip(one, other, strict=True)
            if first is not second
        }
        # Operations whose results come from weights and constants alone.
        repeatable: set[str] = set()
        for op in map(graph.get_operation_by_name, self.made):
            known = [id(one) in copies or one.op.name in repeatable for one in op.inputs]
            if not any(known) or op.type in UNSEEDED | CHANGING or op._is_stateful:
                continue
            if all(is_known or one.op.type == "Const" for one, is_known in zip(op.inputs, known, strict=True)):
                repeatable.add(op.name)

        def copy(tensor: tf.Tensor) -> tf.Tensor | None:
            """The same, computed from the second copy; `None` if it does not come from weights alone."""
            if id(tensor) in copies or tensor.op.name not in repeatable:
                return copies.get(id(tensor))
            op = tensor.op
            inputs = [one if one.op.type == "Const" else copy(one) for one in op.inputs]
            new = graph._create_op_internal(
                op.type, inputs, [o.dtype for o in op.outputs], attrs=dict(op.node_def.attr), op_def=op.op_def
            )
            copies.update({id(old): one for old, one in zip(op.outputs, new.outputs, strict=True)})
            return copies[id(tensor)]

        for operation in map(graph.get_operation_by_name, names):
            for position, tensor in enumerate(operation.inputs):
                if (second := copy(tensor)) is not None:
                    operation._update_input(position, second)


class GatheredAndKept(Gathered):
    """Keeps the weights for its backward pass, too."""

    keeps = True


class GatheredAgain(_Gathering, Recomputed):
    """Keeps its inputs, and gathers its weights again for the second run."""

    inference = GatheredOnce

    def forward(self) -> PureResult:
        self.trainable, self.state = whole = self.forward_values()
        result = super().forward()
        self.trainable, self.state = self._parts
        return self.state_of(result, whole[1])

    def backward(self, cotangents: Sequence[tf.Tensor]) -> list[Any]:
        self.trainable, self.state = self.begin_backward(cotangents)
        self.keeping.order.begun.pop()  # `Recomputed` notes it
        return self.to_parts(super().backward(cotangents))


# The kind of each mode of a policy; `None` keeps everything, as plain training does.
KINDS: dict[str, type[BlockCall] | None] = {
    "none": None,
    "recompute": Recomputed,
    "recompute+swap": SwappedInputs,
    "swap": Swapped,
    "stream": Streamed,
    "gather": Gathered,
    "gather+keep": GatheredAndKept,
    "gather+recompute": GatheredAgain,
}
