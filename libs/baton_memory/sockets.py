"""Unix socket paths: short enough to bind, and free of a predecessor that is dead."""

from __future__ import annotations

import errno
import os
import socket
import stat

from .errors import SocketInUse, SocketPathInvalid

# sun_path holds 108 bytes with the final zero; gRPC spends some on its own, so stay under 100.
MAX_PATH = 99


def check_socket_path(path: str) -> None:
    """Raises SocketPathInvalid for a path that is empty or longer than 99 bytes."""
    size = len(os.fsencode(path))
    if not 0 < size <= MAX_PATH:
        raise SocketPathInvalid(
            f"the unix socket path {path!r} has {size} bytes, 1 to {MAX_PATH} are possible: choose a shorter directory",
            path=path,
            size=size,
        )


def clear_stale_socket(path: str) -> None:
    """Removes the socket file of a dead process, so that `path` can be bound; makes the directory (mode 0700).

    Raises SocketInUse if somebody listens there, SocketPathInvalid if the path is too long or no socket.
    """
    check_socket_path(path)
    os.makedirs(os.path.dirname(os.path.abspath(path)), mode=0o700, exist_ok=True)
    try:
        mode = os.lstat(path).st_mode
    except FileNotFoundError:
        return
    if not stat.S_ISSOCK(mode):
        raise SocketPathInvalid(f"{path!r} exists and is not a socket", path=path)
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        probe.setblocking(False)
        result = probe.connect_ex(path)
    if result == errno.ECONNREFUSED:
        os.unlink(path)
    elif result != errno.ENOENT:
        # 0: it accepts. EAGAIN: its queue is full, which a dead one's is not. EACCES and the like: somebody else's.
        raise SocketInUse(
            f"somebody listens on {path!r} ({os.strerror(result) if result else 'it accepts'})", path=path
        )
