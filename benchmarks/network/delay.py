"""Joins two network namespaces by tap devices, and keeps every frame for some time: `delay SECONDS NAME NAME`.

Kernels without the queueing discipline netem have no other way. Prints "ready", and runs until it is killed.
"""

from __future__ import annotations

import collections
import contextlib
import fcntl
import os
import select
import struct
import subprocess
import sys
import time

from benchmarks.network.links import DEVICE

_TUNSETIFF = 0x400454CA
_TAP_WITHOUT_HEADER = 0x1002
# As large as TCP makes them: fewer frames to carry.
_MTU = 9000
_AT_ONCE = 64


def main(delay: float, names: list[str]) -> None:
    """Carries frames from each end to the other."""
    ends = [_tap(name) for name in names]
    other = dict(zip(ends, reversed(ends), strict=True))
    print("ready", flush=True)
    # Frames wait equally long: those of both directions leave in the order in which they came.
    waiting: collections.deque[tuple[float, int, bytes]] = collections.deque()
    poll = select.poll()
    for end in ends:
        poll.register(end, select.POLLIN)
    while True:
        left = None if not waiting else max(0.0, 1000 * (waiting[0][0] - time.monotonic()))
        for end, _ in poll.poll(left):
            for _ in range(_AT_ONCE):
                try:
                    frame = os.read(end, _MTU + 100)
                except BlockingIOError:
                    break
                waiting.append((time.monotonic() + delay, other[end], frame))
        now = time.monotonic()
        while waiting and waiting[0][0] <= now:
            _, end, frame = waiting.popleft()
            # The device may not be up yet: TCP sends it again.
            with contextlib.suppress(OSError):
                os.write(end, frame)


def _tap(namespace: str) -> int:
    end = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK)
    name = f"tfdist{end}"
    fcntl.ioctl(end, _TUNSETIFF, struct.pack("16sH22x", name.encode(), _TAP_WITHOUT_HEADER))
    for words in (
        ["ip", "link", "set", name, "netns", namespace, "name", DEVICE],
        ["ip", "-n", namespace, "link", "set", DEVICE, "mtu", str(_MTU)],
    ):
        subprocess.run(words, check=True)
    return end


if __name__ == "__main__":
    main(float(sys.argv[1]), sys.argv[2:])
