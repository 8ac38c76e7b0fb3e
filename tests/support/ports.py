"""Free ports for process groups."""

from __future__ import annotations

import contextlib
import itertools
import os
import socket

_CALLS = itertools.count()


def free_port() -> int:
    """A port that no other call here has had and that nothing uses.

    A process group may listen to it much later. The port therefore lies below 32768, where Linux takes the ports of
    outgoing connections, and begins at a place that depends on the process.
    """
    first = 16_384 + os.getpid() * 37 % 12_000 + 8 * next(_CALLS)
    for port in range(first, 32_768):
        with socket.socket() as tried, contextlib.suppress(OSError):
            tried.bind(("127.0.0.1", port))
            return port
    raise OSError(f"no free port from {first} on")
