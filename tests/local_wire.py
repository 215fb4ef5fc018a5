"""The local transport's protocol, spoken by hand: senders and receivers that say what no engine would."""

from __future__ import annotations

import array
import contextlib
import fcntl
import mmap
import os
import secrets
import socket
import struct
from typing import Self

from fabric_harness import DEADLINE_S

MAGIC = 0x31435442
HELLO, REGION, FORGET, WAKE = 1, 2, 3, 4
ENTRIES, ENTRY, HEADER = 256, 64, 256
LENGTH = HEADER + ENTRIES * ENTRY
HEAD, TAIL, RECEIVER_SLEEPS, WAKE_SENDER_AT = 0, 64, 128, 192
CLOSED = 1 << 63
NEVER = (1 << 64) - 1
SHRINK = fcntl.F_SEAL_SHRINK


def memory(length: int, seals: int = SHRINK, name: str = "local-wire") -> int:
    fd = os.memfd_create(name, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    os.ftruncate(fd, length)
    fcntl.fcntl(fd, fcntl.F_ADD_SEALS, seals)
    return fd


def message(kind: int, region: int = 0, length: int = 0, magic: int = MAGIC) -> bytes:
    return struct.pack("<IIQQ", magic, kind, region, length)


class Ring:
    """A view of a ring's memory."""

    def __init__(self, fd: int) -> None:
        self.fd = fd
        self.bytes = mmap.mmap(fd, LENGTH)

    def word(self, offset: int) -> int:
        return int(struct.unpack_from("<Q", self.bytes, offset)[0])

    def set_word(self, offset: int, value: int) -> None:
        struct.pack_into("<Q", self.bytes, offset, value)

    def entry(self, position: int) -> tuple[int, ...]:
        """region, source offset, key, destination offset, length, immediate"""
        return struct.unpack_from("<QQQQQI", self.bytes, HEADER + position % ENTRIES * ENTRY)

    def put(self, region: int, source: int, key: int, destination: int, length: int, immediate: int) -> None:
        head = self.word(HEAD)
        struct.pack_into(
            "<QQQQQI", self.bytes, HEADER + head % ENTRIES * ENTRY, region, source, key, destination, length, immediate
        )
        self.set_word(HEAD, head + 1)

    def close(self) -> None:
        self.bytes.close()
        os.close(self.fd)


class Sender:
    """Connects to an engine's endpoint."""

    def __init__(self, address: bytes) -> None:
        self.socket = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self.socket.settimeout(DEADLINE_S)
        self.socket.connect(b"\0" + address.removeprefix(b"local:"))
        self.ring = Ring(memory(LENGTH))
        self.ring.set_word(WAKE_SENDER_AT, NEVER)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.socket.close()
        self.ring.close()

    def send(self, data: bytes, *fds: int) -> None:
        socket.send_fds(self.socket, [data], fds) if fds else self.socket.send(data)

    def hello(self) -> None:
        self.send(message(HELLO), self.ring.fd)

    def region(self, number: int, contents: bytes) -> None:
        fd = memory(len(contents))
        os.pwrite(fd, contents, 0)
        self.send(message(REGION, number, len(contents)), fd)
        os.close(fd)

    def write(self, region: int, source: int, key: int, destination: int, length: int, immediate: int) -> None:
        self.ring.put(region, source, key, destination, length, immediate)
        self.wake()

    def wake(self) -> None:
        """A receiver that is awake may have seen the ring, and closed, already."""
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):
            self.send(message(WAKE))

    def dropped(self) -> bool:
        """Waits until the receiver closes the connection; it says nothing before but wake-ups."""
        try:
            while self.socket.recv(64):
                pass
        except ConnectionResetError:
            pass
        return True


class Receiver:
    """Where an engine's connect goes."""

    def __init__(self) -> None:
        name = f"baton-{secrets.token_hex(16)}".encode()
        self.address = b"local:" + name
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._listener.settimeout(DEADLINE_S)
        self._listener.bind(b"\0" + name)
        self._listener.listen()

    def accept(self) -> None:
        self.socket, _ = self._listener.accept()
        self.socket.settimeout(DEADLINE_S)
        data, fds, _, _ = socket.recv_fds(self.socket, 64, 4)
        assert data == message(HELLO)
        self.ring = Ring(fds[0])

    def receive(self) -> tuple[int, int, int, array.array[int]]:
        """kind, region, length, descriptors of the next message"""
        data, fds, _, _ = socket.recv_fds(self.socket, 64, 4)
        magic, kind, region, length = struct.unpack("<IIQQ", data)
        assert magic == MAGIC
        return kind, region, length, array.array("i", fds)

    def close(self) -> None:
        self._listener.close()
        self.socket.close()
        self.ring.close()
