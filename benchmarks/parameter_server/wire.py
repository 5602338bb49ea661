"""How many bytes the processes of a cluster have sent to each other, from what Linux counts for each connection."""

from __future__ import annotations

import re
import shutil
import subprocess
from collections.abc import Collection


def bytes_between(ports: Collection[int]) -> int | None:
    """Bytes of all open connections of the processes that listen at these ports, both directions, so far.

    `None` without the command `ss` (package iproute2).
    """
    if not shutil.which("ss"):
        return None
    output = subprocess.run(["ss", "-tinHO"], capture_output=True, text=True, check=True, timeout=30).stdout
    return count(output, ports)


def count(output: str, ports: Collection[int]) -> int:
    """Adds up what `ss -tinHO` prints: what the side that listened has sent, and what it has received.

    Args:
        output: a line for each connection.
        ports: at which the processes listen; each connection between them has one of these at one of its ends.

    Example:
        >>> count("ESTAB 0 0 127.0.0.1:20001 127.0.0.1:41000 cubic bytes_acked:10 bytes_received:5 segs_out:1", [20001])
        15
    """
    total = 0
    for line in output.splitlines():
        fields = line.split()
        # ESTAB, two queues, this end, the other end, what is counted.
        if len(fields) > 5 and fields[0] == "ESTAB" and int(fields[3].rpartition(":")[2]) in ports:
            total += sum(int(number) for number in re.findall(r"\bbytes_(?:acked|received):(\d+)", line))
    return total
