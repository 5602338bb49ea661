"""PMI and PMIx, by which MPI's launchers serve their processes: each is a `channels.Channel`.

PMI-1 is the text protocol of the mpiexec of MPICH and Intel MPI, on an inherited descriptor:

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

PMIx is what Open MPI's mpirun and IBM's jsrun speak; here through its C library.

References:
    Balaji et al., "PMI: A scalable parallel process-management interface for extreme-scale systems", EuroMPI 2010;
    MPICH, src/pmi.
    https://pmix.github.io/standard, "Key-value management"; the structures are those of versions 2 to 5.
"""

from __future__ import annotations

import atexit
import base64
import ctypes
import ctypes.util
import os
import queue
import select
import threading
import time
from collections.abc import Mapping

from tfdist.cluster.errors import ClusterError
from tfdist.cluster.variables import number

# Of PMI: a value is put in pieces, because mpiexec limits it to 1024 characters.
_PIECE_KEY = "tfdist-{}"
_PIECE = 512
_PIECES = 4
_LONGEST_ANSWER = 64 * 1024
_SHOWN = 200
# Of PMIx.
_MEETING_KEY = b"tfdist-meeting"
_GLOBAL, _STRING = 3, 3
_SUCCESS = 0
_NAMESPACE_SIZE = 256
_PAUSE_SECONDS = 0.1


class PmiChannel:
    """The conversation with mpiexec; each of its processes has to call `tell` or `hear` once.

    Args:
        descriptor: That of the connection to mpiexec.

    Raises:
        ClusterError: If mpiexec does not answer.
    """

    def __init__(self, descriptor: int):
        self._descriptor = descriptor
        self._rest = b""
        self._ask("init", 30.0, pmi_version=1, pmi_subversion=1)
        self._name = self._ask("get_my_kvsname", 30.0, "kvsname")["kvsname"]

    @classmethod
    def from_environment(cls, env: Mapping[str, str]) -> PmiChannel:
        """The channel on the descriptor that mpiexec has passed on.

        Raises:
            OSError: If there is no descriptor, or it is not open here.
            ClusterError: If mpiexec does not answer.
        """
        if "PMI_FD" not in env:
            raise OSError("PMI_FD is not set")
        descriptor = number(env, "PMI_FD")
        os.fstat(descriptor)
        return cls(descriptor)

    def tell(self, text: str, seconds: float) -> None:
        """See `Channel`."""
        value = base64.urlsafe_b64encode(text.encode()).decode().replace("=", "")
        for index in range(_PIECES):
            piece = value[index * _PIECE : (index + 1) * _PIECE]
            self._ask("put", 30.0, kvsname=self._name, key=_PIECE_KEY.format(index), value=f"-{piece}")
        self._ask("barrier_in", seconds)
        self._ask("finalize", 30.0)

    def hear(self, seconds: float) -> str:
        """See `Channel`."""
        self._ask("barrier_in", seconds)
        value = ""
        for index in range(_PIECES):
            value += self._ask("get", 30.0, "value", kvsname=self._name, key=_PIECE_KEY.format(index))["value"][1:]
        self._ask("finalize", 30.0)
        try:
            return base64.urlsafe_b64decode(value + "=" * (-len(value) % 4)).decode()
        except ValueError:
            raise ClusterError(f"mpiexec passes on {value[:_SHOWN]!r}, which is not what rank 0 has put") from None

    def _ask(self, command: str, seconds: float, needed: str = "", **values: object) -> dict[str, str]:
        line = " ".join([f"cmd={command}", *(f"{name}={value}" for name, value in values.items())])
        os.write(self._descriptor, line.encode() + b"\n")
        answer = dict(part.split("=", 1) for part in self._line(command, seconds).split() if "=" in part)
        if answer.get("rc", "0") != "0" or (needed and needed not in answer):
            raise ClusterError(f"mpiexec refuses {command}: {str(answer)[:_SHOWN]}")
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
            if len(self._rest) > _LONGEST_ANSWER:
                raise ClusterError(f"mpiexec answers {command} by more than {_LONGEST_ANSWER} bytes without an end")
        line, _, self._rest = self._rest.partition(b"\n")
        return line.decode(errors="replace")


class _Process(ctypes.Structure):
    _fields_ = (("namespace", ctypes.c_char * _NAMESPACE_SIZE), ("rank", ctypes.c_uint32))


class _Union(ctypes.Union):
    # The largest member has 24 bytes or fewer in all versions.
    _fields_ = (("text", ctypes.c_char_p), ("number", ctypes.c_int), ("room", ctypes.c_byte * 24))


class _Value(ctypes.Structure):
    _fields_ = (("type", ctypes.c_uint16), ("data", _Union))


def _library() -> ctypes.CDLL:
    """libpmix, which may also come with a library of Open MPI that the process has loaded.

    Raises:
        OSError: If there is none.
    """
    problem = None
    for name in dict.fromkeys(("libpmix.so.2", ctypes.util.find_library("pmix"))):
        try:
            if name:
                return ctypes.CDLL(name)
        except OSError as error:
            problem = error
    raise OSError(f"the library of PMIx is not found ({problem}); add its folder to LD_LIBRARY_PATH")


class PmixChannel:
    """The connection to the host's PMIx server.

    Raises:
        OSError: If the library is not found, or there is no server.
    """

    def __init__(self) -> None:
        self._library, self._own = _library(), _Process()
        status = self._library.PMIx_Init(ctypes.byref(self._own), None, ctypes.c_size_t(0))
        if status != _SUCCESS:
            raise OSError(f"PMIx_Init returns {status}: no mpirun serves this process")
        # To mpirun, a process that ends without this has failed.
        atexit.register(self._library.PMIx_Finalize, None, ctypes.c_size_t(0))

    def tell(self, text: str, seconds: float) -> None:
        """See `Channel`."""
        value = _Value(_STRING, _Union(text=text.encode()))
        self._check("PMIx_Put", self._library.PMIx_Put(ctypes.c_uint8(_GLOBAL), _MEETING_KEY, ctypes.byref(value)))
        self._check("PMIx_Commit", self._library.PMIx_Commit())

    def hear(self, seconds: float) -> str:
        """See `Channel`.

        It asks for the value of rank 0 alone: a fence would not end as long as any process is missing, and rank 0 could
        not name it.
        """
        deadline = time.monotonic() + seconds
        heard: queue.SimpleQueue[str] = queue.SimpleQueue()
        # Not all servers keep the deadline that PMIx_Get can be given.
        threading.Thread(target=self._listen, args=(heard, deadline), name="tfdist-pmix", daemon=True).start()
        try:
            return heard.get(timeout=max(0.0, seconds))
        except queue.Empty:
            raise ClusterError(
                f"Received: nothing from rank 0 within {seconds:.3g} s, by PMIx. Expected: where it can be met. See "
                "what rank 0 has printed"
            ) from None

    def _listen(self, heard: queue.SimpleQueue[str], deadline: float) -> None:
        first = _Process(self._own.namespace, 0)
        while time.monotonic() < deadline:
            found = ctypes.POINTER(_Value)()
            status = self._library.PMIx_Get(
                ctypes.byref(first), _MEETING_KEY, None, ctypes.c_size_t(0), ctypes.byref(found)
            )
            if status == _SUCCESS:
                heard.put(found.contents.data.text.decode())
                return
            # If rank 0 has called MPI_Init, the server answers at once, without waiting for this value.
            time.sleep(_PAUSE_SECONDS)

    @staticmethod
    def _check(name: str, status: int) -> None:
        if status != _SUCCESS:
            raise ClusterError(f"{name} returns {status}: the processes cannot be told where rank 0 is")
