"""The one error type of the fabric, raised by the native core and by its Python face."""

from __future__ import annotations


class FabricError(Exception):
    """A command to the fabric engine was refused or failed.

    ``status`` is the name of a gRPC code, ``reason`` an UPPER_SNAKE word that says what kind of thing went wrong, and
    ``fields`` the values concerned. The reasons of the native core:

    ================== ===================== ======================================================================
    status             reason                when
    ================== ===================== ======================================================================
    INVALID_ARGUMENT   BAD_ARGUMENT          a value is outside its range (slot, generation, pages, layers, ...)
    INVALID_ARGUMENT   BAD_REGION            the descriptor does not hold ``length`` bytes or cannot be mapped
    INVALID_ARGUMENT   BAD_COUNTER           the counter's memory or doorbell is not what it must be
    INVALID_ARGUMENT   BAD_DOMAINS           a device or domain was named that this node does not have (assignment), or
                                              domains that can't be those of one engine
    INVALID_ARGUMENT   BAD_ADDRESS           the provider does not understand the peer's address
    INVALID_ARGUMENT   OUT_OF_BOUNDS         a stream names bytes outside its source or destination region
    INVALID_ARGUMENT   EXTENT_TOO_LARGE      one extent is larger than the provider's largest message
    INVALID_ARGUMENT   CHUNK_OUT_OF_ORDER    a chunk does not start where the one before ended, or comes after the last
    INVALID_ARGUMENT   CHUNK_TOO_LONG        a chunk ends behind the transfer's last page
    INVALID_ARGUMENT   LAST_CHUNK_SHORT      the last chunk leaves pages of the transfer without a plan
    RESOURCE_EXHAUSTED NO_MEMORY             the node has not the memory that a region's file only promises
    NOT_FOUND          UNKNOWN_REGION        no such region; likewise UNKNOWN_COUNTER, UNKNOWN_ENDPOINT, UNKNOWN_PEER
    ALREADY_EXISTS     TRANSFER_EXISTS       the transfer id is in use
    ALREADY_EXISTS     SLOT_IN_USE           the inbox slot is in use
    FAILED_PRECONDITION REGION_IN_USE        writes may still read the region, or an inbox be written through it
    FAILED_PRECONDITION COUNTER_IN_USE       a transfer still waits for the counter
    FAILED_PRECONDITION ENGINE_CLOSED        the engine was closed
    FAILED_PRECONDITION CHECKSUM_UNSUPPORTED the region is memory of a GPU: no checksum of it can be made
    FAILED_PRECONDITION DEVICE_UNSUPPORTED   the provider can't register memory of a GPU
    UNAVAILABLE        PEER_FAILED           the peer failed earlier; connect again
    UNAVAILABLE        PROVIDER_UNAVAILABLE  no such provider here, or it lacks what is needed
    INTERNAL           FABRIC_CALL_FAILED    a libfabric call failed (fields: call, error)
    INTERNAL           SYSTEM_CALL_FAILED    a system call failed (fields: call, error)
    INTERNAL           ENGINE_FAILED         the progress thread ended by an error
    DEADLINE_EXCEEDED  ENGINE_STALLED        the progress thread did not answer in time: the provider does not return
    ================== ===================== ======================================================================
    """

    def __init__(self, message: str, status: str, reason: str, fields: dict[str, str] | None = None) -> None:
        super().__init__(message)
        self.status = status
        self.reason = reason
        self.fields: dict[str, str] = dict(fields or {})
