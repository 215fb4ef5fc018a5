"""Channels to other workers, kept while they are used."""

from __future__ import annotations

import asyncio
from collections import OrderedDict

import grpc

from baton_rpc.channel import open_channel


class ChannelCache:
    """One channel an address, the least recently used closed beyond `limit`."""

    def __init__(self, credentials: grpc.ChannelCredentials | None, limit: int = 64) -> None:
        self._credentials = credentials
        self._limit = limit
        self._channels: OrderedDict[str, grpc.aio.Channel] = OrderedDict()
        self._closing: set[asyncio.Task[None]] = set()

    def get(self, address: str) -> grpc.aio.Channel:
        """Raises AddressError."""
        channel = self._channels.get(address)
        if channel is None:
            channel = self._channels[address] = open_channel(address, self._credentials)
        self._channels.move_to_end(address)
        while len(self._channels) > self._limit:
            _, oldest = self._channels.popitem(last=False)
            # Calls in progress on it may end.
            task = asyncio.create_task(oldest.close(grace=600.0))
            self._closing.add(task)
            task.add_done_callback(self._closing.discard)
        return channel

    async def close(self) -> None:
        channels = list(self._channels.values())
        self._channels.clear()
        for task in self._closing:
            task.cancel()
        await asyncio.gather(*self._closing, *(channel.close() for channel in channels), return_exceptions=True)
