"""PMI-1, the text protocol by which MPICH's and Intel MPI's mpiexec serves its processes, on an inherited descriptor.

process                                    mpiexec's proxy
cmd=init pmi_version=1 pmi_subversion=1 -->
                                        <--  cmd=response_to_init rc=0 pmi_version=1 ...
cmd=get_my_kvsname                      -->
                                        <--  cmd=my_kvsname kvsname=kvs_77_0
cmd=put kvsname=.. key=k value=v        -->
                                        <--  cmd=put_result rc=0
cmd=barrier_in                          -->                                     (all processes)
                                        <--  cmd=barrier_out rc=0
cmd=get kvsname=.. key=k                -->
                                        <--  cmd=get_result rc=0 value=v
cmd=finalize                            -->
                                        <--  cmd=finalize_ack

References:
    Balaji et al., "PMI: A scalable parallel process-management interface for extreme-scale systems", EuroMPI 2010;
    MPICH, src/pmi.
"""

from __future__ import annotations

import base64
import os
import select
import time
from collections.abc import Mapping

from tfdist.cluster.errors import ClusterError
from tfdist.cluster.membership import Membership

_KEY = "tfdist-{}"
# Of a value; mpiexec's own limit is 1024.
_PIECE = 512
_PIECES = 4


def open_channel(membership: Membership, env: Mapping[str, str]) -> PmiChannel:
    """Greets mpiexec.

    Raises:
        OSError: if there is no descriptor, or it is not open here.
        ClusterError: if mpiexec does not answer.
    """
    if "PMI_FD" not in env:
        raise OSError("PMI_FD is not set")
    descriptor = int(env["PMI_FD"])
    os.fstat(descriptor)
    return PmiChannel(descriptor)


class PmiChannel:
    """The conversation with mpiexec; each of its processes has to call `tell` or `hear` once.

    Args:
        descriptor: of the connection.

    Raises:
        ClusterError: if mpiexec does not answer.
    """

    def __init__(self, descriptor: int):
        self._descriptor = descriptor
        self._rest = b""
        self._ask("init", 30.0, pmi_version=1, pmi_subversion=1)
        self._name = self._ask("get_my_kvsname", 30.0)["kvsname"]

    def tell(self, text: str, seconds: float) -> None:
        """See `Channel`."""
        value = base64.urlsafe_b64encode(text.encode()).decode().replace("=", "")
        for index in range(_PIECES):
            piece = value[index * _PIECE : (index + 1) * _PIECE]
            self._ask("put", 30.0, kvsname=self._name, key=_KEY.format(index), value=f"-{piece}")
        self._ask("barrier_in", seconds)
        self._ask("finalize", 30.0)

    def hear(self, seconds: float) -> str:
        """See `Channel`."""
        self._ask("barrier_in", seconds)
        value = ""
        for index in range(_PIECES):
            value += self._ask("get", 30.0, kvsname=self._name, key=_KEY.format(index))["value"][1:]
        self._ask("finalize", 30.0)
        return base64.urlsafe_b64decode(value + "=" * (-len(value) % 4)).decode()

    def _ask(self, command: str, seconds: float, **values: object) -> dict[str, str]:
        line = " ".join([f"cmd={command}", *(f"{name}={value}" for name, value in values.items())])
        os.write(self._descriptor, line.encode() + b"\n")
        answer = dict(part.split("=", 1) for part in self._line(command, seconds).split() if "=" in part)
        if answer.get("rc", "0") != "0":
            raise ClusterError(f"mpiexec refuses {command}: {answer}")
        return answer

    def _line(self, command: str, seconds: float) -> str:
        deadline = time.monotonic() + seconds
        while b"\n" not in self._rest:
            if not select.select([self._descriptor], [], [], max(0.0, deadline - time.monotonic()))[0]:
                raise ClusterError(
                    f"Received: no answer of mpiexec to {command} within {seconds:.3g} s. Expected: one as soon as all "
                    "processes have come to this point; mpiexec does not tell which has not. See what each has printed"
                )
            data = os.read(self._descriptor, 4096)
            if not data:
                raise ClusterError(f"mpiexec has hung up on {command}")
            self._rest += data
        line, _, self._rest = self._rest.partition(b"\n")
        return line.decode()
