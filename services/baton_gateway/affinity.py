"""Which workers are likely to have the beginning of a prompt in their prefix caches. Pure.

From what this gateway has sent to them: nobody is asked, and a worker that has dropped a prefix meanwhile, or got it
through another gateway, makes a route no worse than one without this.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping, Sequence

from baton_gateway.registry import WorkerKey
from baton_kv.prefix import PageChain, chain_root

# Tokens that are told apart. Twice the default page: half the entries, and shorter beginnings are not worth a detour.
BLOCK = 32
# Blocks remembered: two million tokens, about 20 MB.
CAPACITY = 1 << 16
# Workers remembered for one block; those that were told last stay.
WORKERS = 16


class PrefixMemory:
    """Beginnings of prompts and the workers that have them, the least recently used forgotten first."""

    def __init__(self, capacity: int = CAPACITY) -> None:
        self._capacity = capacity
        self._blocks: OrderedDict[bytes, OrderedDict[WorkerKey, None]] = OrderedDict()

    def __len__(self) -> int:
        return len(self._blocks)

    def held(self, chain: PageChain) -> Mapping[WorkerKey, int]:
        """Tokens from the beginning on that each worker is believed to have; workers without any are left out."""
        found: dict[WorkerKey, int] = {}
        for position, key in enumerate(chain.keys):
            workers = self._blocks.get(key)
            if workers is None:
                break
            for worker in workers:
                if found.get(worker, 0) == position * BLOCK:
                    found[worker] = (position + 1) * BLOCK
        return found

    def remember(self, chain: PageChain, *workers: WorkerKey) -> None:
        """These have all of it now."""
        # From the end on, so that beginnings are forgotten last: without them nothing is found.
        for key in reversed(chain.keys):
            known = self._blocks.setdefault(key, OrderedDict())
            self._blocks.move_to_end(key)
            for worker in workers:
                known[worker] = None
                known.move_to_end(worker)
            while len(known) > WORKERS:
                known.popitem(last=False)
        while len(self._blocks) > self._capacity:
            self._blocks.popitem(last=False)


class Trail:
    """One request, as far as its followers can profit from it."""

    def __init__(self, memory: PrefixMemory, prompt: Sequence[int], salt: str) -> None:
        self._memory = memory
        # The last token is always run again.
        self._chain = PageChain(chain_root({"block": BLOCK}, salt), BLOCK, prompt[:-1])
        # Known and not in the chain: the latest is in nobody's cache yet.
        self._ahead = list(prompt[-1:])
        self._begun = False

    def held(self) -> Mapping[WorkerKey, int]:
        """As `PrefixMemory.held`."""
        return self._memory.held(self._chain)

    def answered(self, token_ids: Sequence[int], decode: WorkerKey, prefill: WorkerKey | None) -> None:
        """The decode worker has drawn tokens; with the first ones the prompt is where it was needed."""
        if token_ids and not self._begun:
            self._begun = True
            self._memory.remember(self._chain, decode, *([prefill] if prefill is not None else []))
        self._ahead += token_ids

    def ended(self, decode: WorkerKey) -> None:
        """So is the answer, but for its last token."""
        if self._begun:
            self._chain.extend(self._ahead[:-1])
            self._memory.remember(self._chain, decode)
