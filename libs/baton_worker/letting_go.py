"""How an owner lets go of pages that a transfer may still touch."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Hashable

from baton_rpc.errors import RemoteError
from baton_worker.background import first_of
from baton_worker.errors import AgentUnavailable
from baton_worker.reservation import PageReserver

log = logging.getLogger(__name__)

# Pages for which the agent has not answered by then are shown as quarantined. The fence, the slowest of the answers
# that come, has the peer's timeout of one StopTransfer before it.
QUARANTINE_AFTER_S = 2.0
FIRST_DELAY_S = 0.05
LONGEST_DELAY_S = 1.0


async def let_go(
    reserver: PageReserver,
    owner: Hashable,
    quiesce: Callable[[], Awaitable[object]],
    lost: asyncio.Future[str],
    reason: str,
) -> None:
    """Releases `owner` once nothing can touch its pages any more, however long that takes.

    That is so when `quiesce` returns or says NOT_FOUND, or when the agent's session is `lost`. `quiesce` is tried again
    until then; after `QUARANTINE_AFTER_S` the pages are in quarantine for `reason`. Cancelled, it releases nothing.
    """
    proof = asyncio.create_task(until_quiesced(quiesce, lost, str(owner)), name=f"proof for {owner}")
    try:
        await first_of(proof, timeout=QUARANTINE_AFTER_S)
        quarantined = not proof.done()
        if quarantined:
            log.error("the pages of %s are in quarantine: the agent does not say that they are quiet", owner)
            reserver.quarantine(owner, reason)
        await proof
    finally:
        proof.cancel()
    if quarantined:
        log.info("the quarantine of %s has ended", owner)
        reserver.release_quarantine(owner)
    else:
        reserver.release(owner)


async def until_quiesced(quiesce: Callable[[], Awaitable[object]], lost: asyncio.Future[str], what: str) -> None:
    """Tries `quiesce` until it returns or says NOT_FOUND, or the agent's session is `lost`."""
    delay = FIRST_DELAY_S
    complained = False
    while not lost.done():
        try:
            await quiesce()
            return
        except (AgentUnavailable, RemoteError) as error:
            if error.status == "NOT_FOUND":
                return
            if not complained and not lost.done():
                log.warning("%s is not known to be quiet, asking on: %s", what, error)
            complained = True
        await first_of(lost, timeout=delay)
        delay = min(delay * 2, LONGEST_DELAY_S)
