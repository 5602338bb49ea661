"""What a micro-batch keeps for its backward pass, on the host until then.

instructions of a stage   F0   F1   F2   F3 ... B0   B1
to the host                    F0's F1's ...
back                                        B0's B1's     one instruction before it is needed

The stage waits before an instruction until what the forward pass before the last one has left is on the host: else it
would go on, and what it leaves would wait on the device for its way to the host.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from tfdist.memory.block_call import Keeping
from tfdist.memory.host_copies import from_host, is_data, to_host
from tfdist.memory.order import Order
from tfdist.memory.policy import MemoryPolicy
from tfdist.strategies.pipeline.schedule import Instruction


class HostStays:
    """The stays of one batch's micro-batches, on one pipeline.

    Args:
        policy: which host, how many instructions ahead something is fetched, and what is too small.
        devices: of the stages.
        orders: the instructions of each stage.
    """

    def __init__(self, policy: MemoryPolicy, devices: Sequence[str], orders: Sequence[Sequence[Instruction]]):
        self._devices = devices
        self._keepings = [
            Keeping(Order(), _host_of(device, policy.host), policy.prefetch, policy.min_bytes) for device in devices
        ]
        self._places = [{instruction: i for i, instruction in enumerate(order)} for order in orders]
        self._begun: list[list[Sequence[tf.Tensor]]] = [[] for _ in devices]
        # Ids; the stages' orders keep the tensors.
        self._copies: set[int] = set()

    def copy(self) -> HostStays:
        """For another backward pass: what has been sent is on the host still."""
        other = copy.copy(self)
        other._begun = [list(begun) for begun in self._begun]
        return other

    def begin(self, stage: int, instruction: Instruction, begins_with: Sequence[tf.Tensor]) -> list[tf.Operation]:
        """Notes that an instruction begins; returns what it waits for.

        Args:
            stage: the stage.
            instruction: the instruction.
            begins_with: what is there when it begins: its inputs, and what the stage has computed before.
        """
        self._begun[stage].append(begins_with)
        order = self._keepings[stage].order
        return order.to_wait_for(order.begin_block()) if instruction.kind == "forward" else []

    def sent(self, stage: int, instruction: Instruction, tensors: Sequence[tf.Tensor]) -> list[tf.Tensor]:
        """What the forward pass has left, of which what is worth the way is now on the host.

        Args:
            stage: the stage.
            instruction: the forward pass.
            tensors: what it has left.
        """
        keeping, places = self._keepings[stage], self._places[stage]
        away = places[instruction._replace(kind="backward")] - places[instruction]
        # What is fetched when it has just been sent has never left.
        if away <= keeping.prefetch + 1:
            return list(tensors)
        place = len(keeping.order.copies) - 1
        kept = [to_host(tensor, place, keeping) if _travels(tensor, keeping) else tensor for tensor in tensors]
        self._copies |= {id(copied) for copied, tensor in zip(kept, tensors, strict=True) if copied is not tensor}
        return kept

    def fetched(self, stage: int, tensors: Sequence[tf.Tensor]) -> list[tf.Tensor]:
        """The same on the device, for the backward pass that begins now."""
        keeping, begun = self._keepings[stage], self._begun[stage]
        gate = begun[max(0, len(begun) - 1 - keeping.prefetch)]
        device = self._devices[stage]
        return [from_host(t, device, keeping, gate) if id(t) in self._copies else t for t in tensors]


def _travels(tensor: tf.Tensor, keeping: Keeping) -> bool:
    return is_data(tensor) and keeping.moves(tensor)


def _host_of(device: str, host: str) -> str:
    """The host of a stage: in its process."""
    spec: Any = tf.DeviceSpec.from_string(device)
    return spec.make_merged_spec(tf.DeviceSpec.from_string(host)).to_string()
