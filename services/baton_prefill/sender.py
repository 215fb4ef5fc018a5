"""The sending side's messenger: which transfers the sequences of this worker feed, and what each step fills."""

from __future__ import annotations

import asyncio
import logging
from collections import defaultdict
from dataclasses import dataclass, field

from baton.v1 import agent_pb2

from baton_engine.messages import StepPlan
from baton_kv.plan import chunk_pages
from baton_rpc.errors import RemoteError
from baton_worker.agent_session import AgentSession, Transfer
from baton_worker.background import BackgroundTasks
from baton_worker.errors import AgentUnavailable
from baton_worker.letting_go import until_quiesced

log = logging.getLogger(__name__)


@dataclass
class Outgoing:
    """One prompt's transfer."""

    session: AgentSession
    transfer: Transfer
    prompt_tokens: int
    prefix_tokens: int
    # Tokens of the smaller of the two sides' pages: what the chunk plans count in.
    page_size: int
    # Resolves to a reason if the agent could not be told of a step: the transfer can't be completed then.
    broken: asyncio.Future[str] = field(default_factory=lambda: asyncio.get_running_loop().create_future())

    def chunk(self, start: int, end: int) -> agent_pb2.ChunkPlan | None:
        """What is complete when the prompt's positions [start, end) are, if that is anything to be told."""
        pages = chunk_pages(self.prompt_tokens, self.prefix_tokens, self.page_size, start, end)
        last = end == self.prompt_tokens - 1
        if not pages and not last:
            return None
        return agent_pb2.ChunkPlan(transfer=self.transfer.transfer, first_page=pages.start, pages=len(pages), last=last)

    def break_off(self, reason: str) -> None:
        if not self.broken.done():
            self.broken.set_result(reason)


class KvSender:
    """Announces chunk plans to the agent as steps begin."""

    def __init__(self, background: BackgroundTasks) -> None:
        self._background = background
        self._outgoing: dict[int, Outgoing] = {}

    def track(self, sequence_id: int, outgoing: Outgoing) -> None:
        """From now on the steps of this sequence are announced for its transfer."""
        self._outgoing[sequence_id] = outgoing

    def forget(self, sequence_id: int) -> None:
        self._outgoing.pop(sequence_id, None)

    def send_cached(self, outgoing: Outgoing, tokens: int, step: int) -> None:
        """The first `tokens` tokens' pages leave at once: they are complete in every layer since step `step` at the
        latest, which is done. To be called before any step with this prompt begins.
        """
        chunk = outgoing.chunk(0, tokens)
        if chunk is not None:
            submit = self._submit(outgoing.session, step, [(outgoing, chunk)])
            self._background.spawn(submit, f"cached pages of transfer {outgoing.transfer.transfer:x}")

    def before_step(self, plan: StepPlan) -> None:
        """A plan may reach the agent before, during or after its step, so that nothing waits for this."""
        chunks: defaultdict[AgentSession, list[tuple[Outgoing, agent_pb2.ChunkPlan]]] = defaultdict(list)
        for item in plan.prefills:
            outgoing = self._outgoing.get(item.sequence_id)
            if outgoing is None:
                continue
            chunk = outgoing.chunk(item.start, item.end)
            if chunk is not None:
                chunks[outgoing.session].append((outgoing, chunk))
        for session, planned in chunks.items():
            self._background.spawn(self._submit(session, plan.step, planned), f"chunk plan of step {plan.step}")

    async def after_failed_step(self, plan: StepPlan) -> None:
        """The next step would move the layer counter past what was never computed: its transfers end first."""
        affected = [self._outgoing[item.sequence_id] for item in plan.items if item.sequence_id in self._outgoing]
        for outgoing in affected:
            outgoing.break_off(f"forward step {plan.step} failed")
        await asyncio.gather(*(self._cancel(outgoing) for outgoing in affected))

    @staticmethod
    async def _cancel(outgoing: Outgoing) -> None:
        """An agent that is gone posts nothing; one that lives and does not answer must not hold garbage to send."""

        async def quiesce() -> None:
            if not outgoing.transfer.ended.done():
                await outgoing.session.cancel_transfer(outgoing.transfer)

        await until_quiesced(quiesce, outgoing.session.lost, f"transfer {outgoing.transfer.transfer:x}")

    @staticmethod
    async def _submit(session: AgentSession, step: int, planned: list[tuple[Outgoing, agent_pb2.ChunkPlan]]) -> None:
        try:
            await session.submit_step(step, [chunk for _, chunk in planned])
        except (AgentUnavailable, RemoteError) as error:
            for outgoing, _ in planned:
                outgoing.break_off(str(error))
