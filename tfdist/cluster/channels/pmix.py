"""PMIx, by which Open MPI's mpirun and IBM's jsrun serve their processes, through its C library.

References:
    https://pmix.github.io/standard, "Key-value management"; the structures are those of versions 2 to 5.
"""

from __future__ import annotations

import atexit
import ctypes
import ctypes.util
import queue
import threading
import time
from collections.abc import Mapping

from tfdist.cluster.errors import ClusterError
from tfdist.cluster.membership import Membership

_KEY = b"tfdist-meeting"
_GLOBAL, _STRING = 3, 3
_SUCCESS = 0
_NAMESPACE_SIZE = 256
_PAUSE_SECONDS = 0.1


class _Process(ctypes.Structure):
    _fields_ = (("namespace", ctypes.c_char * _NAMESPACE_SIZE), ("rank", ctypes.c_uint32))


class _Union(ctypes.Union):
    # The largest member has 24 bytes or fewer in all versions.
    _fields_ = (("text", ctypes.c_char_p), ("number", ctypes.c_int), ("room", ctypes.c_byte * 24))


class _Value(ctypes.Structure):
    _fields_ = (("type", ctypes.c_uint16), ("data", _Union))


def open_channel(membership: Membership, env: Mapping[str, str]) -> PmixChannel:
    """Connects to the server of this host.

    Raises:
        OSError: if the library is not there, or has no server.
    """
    return PmixChannel(_library())


def _library() -> ctypes.CDLL:
    """libpmix; or what a library of Open MPI that the process has loaded brings along.

    Raises:
        OSError: if there is none.
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

    Args:
        library: libpmix.

    Raises:
        OSError: if it has no server.
    """

    def __init__(self, library: ctypes.CDLL):
        self._library, self._own = library, _Process()
        status = library.PMIx_Init(ctypes.byref(self._own), None, ctypes.c_size_t(0))
        if status != _SUCCESS:
            raise OSError(f"PMIx_Init returns {status}: no mpirun serves this process")
        # mpirun takes a process that leaves without it for one that has failed.
        atexit.register(library.PMIx_Finalize, None, ctypes.c_size_t(0))

    def tell(self, text: str, seconds: float) -> None:
        """See `Channel`."""
        value = _Value(_STRING, _Union(text=text.encode()))
        self._check("PMIx_Put", self._library.PMIx_Put(ctypes.c_uint8(_GLOBAL), _KEY, ctypes.byref(value)))
        self._check("PMIx_Commit", self._library.PMIx_Commit())

    def hear(self, seconds: float) -> str:
        """See `Channel`.

        It asks rank 0 alone: a fence would not end as long as any process is missing, which rank 0 can then name.
        """
        deadline = time.monotonic() + seconds
        heard: queue.SimpleQueue[str] = queue.SimpleQueue()
        # PMIx_Get has no deadline of its own that all servers keep.
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
            status = self._library.PMIx_Get(ctypes.byref(first), _KEY, None, ctypes.c_size_t(0), ctypes.byref(found))
            if status == _SUCCESS:
                heard.put(found.contents.data.text.decode())
                return
            # The server answers at once where it knows other things of rank 0, by MPI_Init.
            time.sleep(_PAUSE_SECONDS)

    @staticmethod
    def _check(name: str, status: int) -> None:
        if status != _SUCCESS:
            raise ClusterError(f"{name} returns {status}: the processes cannot be told where rank 0 is")
