"""Client channels."""

import grpc

from baton_rpc.addresses import UnixAddress, parse_address

# A prompt of 128 k token ids is under 1 MiB; logits of a large vocabulary for many positions are not.
MESSAGE_LIMIT = 64 << 20

CHANNEL_OPTIONS: tuple[tuple[str, int], ...] = (
    ("grpc.max_receive_message_length", MESSAGE_LIMIT),
    ("grpc.max_send_message_length", MESSAGE_LIMIT),
    # Only while calls are open, so an idle channel costs nothing.
    ("grpc.keepalive_time_ms", 20_000),
    ("grpc.keepalive_timeout_ms", 10_000),
    ("grpc.keepalive_permit_without_calls", 0),
    ("grpc.http2.max_pings_without_data", 0),
    # A restarted peer is found again in at most half a second; the default grows to two minutes.
    ("grpc.initial_reconnect_backoff_ms", 50),
    ("grpc.max_reconnect_backoff_ms", 500),
    # Despite its name the time one attempt to connect may take.
    ("grpc.min_reconnect_backoff_ms", 5_000),
    ("grpc.dns_min_time_between_resolutions_ms", 1_000),
    # Back-off is per subchannel, and by default those are shared by every channel of the process.
    ("grpc.use_local_subchannel_pool", 1),
    # Services talk to each other directly, whatever http_proxy says.
    ("grpc.enable_http_proxy", 0),
)


def open_channel(target: str, credentials: grpc.ChannelCredentials | None = None) -> grpc.aio.Channel:
    """A channel to ``host:port`` or ``unix:path``; connects when first used. Raises AddressError.

    Unix sockets are protected by the file system, so ``credentials`` apply to TCP only.
    """
    address = parse_address(target)
    if credentials is None or isinstance(address, UnixAddress):
        return grpc.aio.insecure_channel(str(address), options=CHANNEL_OPTIONS)
    return grpc.aio.secure_channel(str(address), credentials, options=CHANNEL_OPTIONS)
