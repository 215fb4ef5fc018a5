"""What a page holds, as a key: a hash chained over a sequence's pages from its start."""

from __future__ import annotations

import hashlib
import json
from array import array
from collections.abc import Iterable, Mapping

from .errors import InvalidKvArgument

# A token id as it is hashed: 32 bits, little endian on every machine that this runs on.
_ID = "I"


def chain_root(identity: Mapping[str, str | int], salt: str = "") -> bytes:
    """What a chain starts from, 32 bytes.

    `identity` says what the entries of a page depend on beside its tokens and those before it: the model's fingerprint,
    how it computes, the layout. Requests with different `salt` never share a page. The root is the SHA-256 of both, as
    JSON with sorted keys.
    """
    text = json.dumps([dict(identity), salt], sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode("utf-8", "surrogatepass")).digest()


class PageChain:
    """The keys of a sequence's full pages.

    Key i is the SHA-256 of key i - 1 (of the root, for the first) and of page i's token ids, so that equal keys mean
    equal tokens from the start on. A hash without known collisions: whoever could make one would be shown another's
    conversation. 0.4 us a page of 16 tokens.
    """

    def __init__(self, root: bytes, page_size: int, token_ids: Iterable[int] = ()) -> None:
        if page_size < 1:
            raise InvalidKvArgument(f"page_size is {page_size}; it must be at least 1", page_size=page_size)
        self._key = root
        self._page_bytes = page_size * array(_ID).itemsize
        self._rest = b""
        self.page_size = page_size
        # Of all full pages, in order.
        self.keys: list[bytes] = []
        self.extend(token_ids)

    @property
    def tokens(self) -> int:
        """Tokens that the chain has been given."""
        return len(self.keys) * self.page_size + len(self._rest) // array(_ID).itemsize

    def extend(self, token_ids: Iterable[int]) -> None:
        """Appends tokens to the sequence. Raises OverflowError for an id that isn't of 32 bits."""
        data = self._rest + array(_ID, token_ids).tobytes()
        size, key = self._page_bytes, self._key
        whole = len(data) - len(data) % size
        for start in range(0, whole, size):
            key = hashlib.sha256(key + data[start : start + size]).digest()
            self.keys.append(key)
        self._key, self._rest = key, data[whole:]
