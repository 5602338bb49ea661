"""One call of a block whose backward pass is made by tfdist, so that less is kept for it."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any, ClassVar, Protocol

import keras
import tensorflow as tf

from tfdist.compat.upstream import AutocastScope, get_autocast_scope, record
from tfdist.layer_graph.pure_call import ImpureError, PureResult
from tfdist.layer_graph.values import is_differentiable
from tfdist.memory.op_recorder import labelled
from tfdist.memory.order import Keeping


class Block(Protocol):
    """A part of a model, as a pure function.

    Attributes:
        label: its name.
        trainable: its trainable variables.
        state: all other variables that it uses.
    """

    label: str
    trainable: Sequence[keras.Variable]
    state: Sequence[keras.Variable]

    def run(self, trainable: Sequence[Any], state: Sequence[Any], tensors: Sequence[Any]) -> PureResult:
        """Computes with these values of the variables; the result is a flat list of tensors."""


class BlockCall:
    """One call of a block, and what it leaves for its backward pass.

    Args:
        block: the block.
        trainable: values of its trainable variables.
        state: values of its other variables.
        tensors: its inputs.
        keeping: how it is called.

    Attributes:
        inference: the kind that is used instead where nothing is trained; `None` if the block is simply run then.
    """

    inference: ClassVar[type[BlockCall] | None] = None
    # The end of an error message: what to do with a layer that is not a pure function.
    remedy: ClassVar[str] = "mode 'none' for this block, which is then called as it is"

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
        """The gradients of the trainable variables and of the inputs, `None` where there is none.

        Args:
            cotangents: gradients of the outputs and of the losses that the layers have added.
        """
        raise NotImplementedError

    @contextlib.contextmanager
    def autocast(self) -> Iterator[None]:
        """Lets layers without a dtype of their own compute in the dtype of the forward pass."""
        with AutocastScope(self._autocast.dtype if self._autocast else None):
            yield

    def gradients(self, tape: tf.GradientTape, result: PureResult, sources: list, cotangents: Sequence) -> list[Any]:
        """The gradients of `sources`, which the tape has watched."""
        outputs = [*result.result, *result.losses]
        pairs = [(o, c) for o, c in zip(outputs, cotangents, strict=True) if is_differentiable(o)]
        taken = [source for source in sources if is_differentiable(source)]
        found = iter(tape.gradient([o for o, _ in pairs], taken, output_gradients=[c for _, c in pairs]))
        return [next(found) if is_differentiable(source) else None for source in sources]


def watch(tape: tf.GradientTape, tensors: Sequence[tf.Tensor]) -> None:
    """Lets a tape watch the tensors that can have gradients."""
    tape.watch([tensor for tensor in tensors if is_differentiable(tensor)])


def call_block(
    block: Block, tensors: Sequence[tf.Tensor], kind: type[BlockCall] | None, keeping: Keeping
) -> PureResult:
    """Calls a block.

    Args:
        block: the block.
        tensors: its inputs.
        kind: what is kept for its backward pass; `None` for all of it.
        keeping: how it is called.

    Returns:
        Its outputs and the losses that its layers have added. Its variables have changed.
    """
    with labelled(block.label):
        return _call_block(block, tensors, kind, keeping)


def _call_block(
    block: Block, tensors: Sequence[tf.Tensor], kind: type[BlockCall] | None, keeping: Keeping
) -> PureResult:
    with AutocastScope(None):
        trainable = [tf.convert_to_tensor(variable.value) for variable in block.trainable]
        state = [tf.convert_to_tensor(variable.value) for variable in block.state]
    recorded = [*trainable, *tensors]
    trained = record.should_record_backprop(recorded)
    if kind is not None and not trained:
        kind = kind.inference
    if kind is None:
        result = block.run(trainable, state, tensors)
        _assign(block, state, result)
        return result
    call = kind(block, trainable, state, list(tensors), keeping)
    try:
        result = call.forward()
    except ImpureError as error:
        if str(error).startswith("Received: block "):
            raise
        told = str(error).removeprefix("Received: ").removesuffix(".")
        raise ImpureError(f"Received: block '{block.label}': {told}; or {call.remedy}.") from error
    _assign(block, state, result)
    if not trained:
        return result

    # The tapes of the caller see one operation, "TfdistBlock": weights and inputs go in, results come out, and this
    # function is its gradient. What happened inside is hidden from them: the results are identities that no tape has
    # recorded, so that there is no other way back from them.
    def backward(*cotangents: Any) -> list[Any]:
        with labelled(block.label):
            return call.backward([tf.convert_to_tensor(cotangent) for cotangent in cotangents])

    with record.stop_recording():
        results = [tf.identity(tensor) for tensor in (*result.result, *result.losses)]
    record.record_operation("TfdistBlock", results, recorded, backward)
    count = len(result.result)
    return PureResult(results[:count], result.state, results[count:])


def _assign(block: Block, before: list, result: PureResult) -> None:
    for variable, old, new in zip(block.state, before, result.state, strict=True):
        if new is not old:
            variable.assign(new)
