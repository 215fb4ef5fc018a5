"""A loopback of the benchmark's own, so that what is measured is what runs over TCP, and not how TCP is paced.

Under BBR, which some hosts have for all connections, a pair of processes over loopback is fast or slow for seconds or
for its whole life: BBR paces what it sends by the rate that it has measured, paced bytes leave by a timer when they are
cold, and so the rate stays what it was. The same bare loop with 256 KiB a write, a core a side, moves 3.3 or 6.2 GB/s;
under Reno, which does not pace, 6.5 always.
"""

from __future__ import annotations

import ctypes
import fcntl
import os
import socket
import struct
from pathlib import Path

CLONE_NEWNET = 0x4000_0000
SIOCSIFFLAGS = 0x8914
IFF_UP = 1
CONGESTION = Path("/proc/sys/net/ipv4/tcp_congestion_control")
UNPACED = "reno"


def own_loopback() -> str:
    """Puts this thread, and what it starts from now on, into a network namespace with nothing but a loopback whose
    connections are not paced. Says which congestion control holds, and why there is no such namespace if there is none:
    it takes the right to make one."""
    if ctypes.CDLL(None, use_errno=True).unshare(CLONE_NEWNET) != 0:
        return f"the host's loopback, {_congestion()} ({os.strerror(ctypes.get_errno())}: no loopback of its own)"
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as handle:
        fcntl.ioctl(handle, SIOCSIFFLAGS, struct.pack("16sh22x", b"lo", IFF_UP))
    CONGESTION.write_text(UNPACED)
    return f"a loopback of its own, {_congestion()}"


def _congestion() -> str:
    return CONGESTION.read_text().strip()
