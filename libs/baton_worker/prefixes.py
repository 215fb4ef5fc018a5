"""How a worker names the pages of its sequences, so that they can be found again."""

from __future__ import annotations

from collections.abc import Sequence

from baton_engine.messages import EngineInfo
from baton_kv.prefix import PageChain, chain_root


class PrefixNames:
    """Of one engine: a page of another model or layout never has the same name."""

    def __init__(self, info: EngineInfo) -> None:
        self._page_size = info.page_size
        self._identity: dict[str, str | int] = {
            "fingerprint": info.fingerprint,
            "dtype": info.dtype,
            "order": info.order,
            "layers": info.layers,
            "kv_heads": info.kv_heads,
            "head_dim": info.head_dim,
            "page_size": info.page_size,
        }

    def chain(self, prompt: Sequence[int], salt: str) -> PageChain:
        """The names of the pages that a prompt may share: those that lie wholly before its last token.

        The last token is always run again, as something must give the first one of the answer; the page that its
        entries are written into is therefore never a shared one.
        """
        return PageChain(chain_root(self._identity, salt), self._page_size, prompt[:-1])
