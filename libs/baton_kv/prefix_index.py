"""Which page holds which prefix, and which of those that nobody holds goes first."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from .errors import InvalidKvArgument


@dataclass(eq=False, slots=True)
class _Entry:
    """A page that is complete in every layer, and its place in the tree of prefixes."""

    key: bytes
    page: int
    parent: _Entry | None
    depth: int
    children: dict[bytes, _Entry] = field(default_factory=dict)


class PrefixIndex:
    """A tree of pages by the keys of `PageChain`: the parent of a page is the page before it.

    Every ancestor of a page that is in the index is in it too: what can't be found from the start on is not kept.
    Pages without an owner are *idle*; they are in order of when their last owner let go, a page before its parent if
    both were let go at once. The pool says who holds what; the index knows only who is idle.
    """

    def __init__(self) -> None:
        self._by_key: dict[bytes, _Entry] = {}
        self._by_page: dict[int, _Entry] = {}
        self._idle: OrderedDict[int, _Entry] = OrderedDict()

    def __len__(self) -> int:
        return len(self._by_page)

    def __contains__(self, page: int) -> bool:
        return page in self._by_page

    @property
    def idle(self) -> int:
        return len(self._idle)

    @property
    def idle_pages(self) -> list[int]:
        """Those that nobody holds, the one that was let go first in front; a copy."""
        return list(self._idle)

    def is_idle(self, page: int) -> bool:
        return page in self._idle

    def key_of(self, page: int) -> bytes | None:
        entry = self._by_page.get(page)
        return entry.key if entry is not None else None

    def match(self, keys: Sequence[bytes]) -> list[int]:
        """The pages of the longest prefix of `keys` that is here."""
        pages: list[int] = []
        for key in keys:
            entry = self._by_key.get(key)
            if entry is None:
                break
            pages.append(entry.page)
        return pages

    def add(self, keys: Sequence[bytes], pages: Sequence[int]) -> int:
        """Enters pages, each under its key and below the one before it; how many are new.

        A key that is here already keeps its page: the other one is not entered, but that of the key counts as used now.
        Raises `InvalidKvArgument` if a page is here under another key, or comes twice.
        """
        if len(set(pages)) != len(pages):
            raise InvalidKvArgument(f"pages {list(pages)} hold one twice", pages=list(pages))
        for key, page in zip(keys, pages, strict=True):
            entry = self._by_page.get(page)
            if entry is not None and entry.key != key:
                raise InvalidKvArgument(
                    f"page {page} is kept as {entry.key.hex()[:16]}; it can't be {key.hex()[:16]} as well", page=page
                )
        added = 0
        known: list[int] = []
        parent: _Entry | None = None
        for key, page in zip(keys, pages, strict=True):
            entry = self._by_key.get(key)
            if entry is None:
                entry = _Entry(key, page, parent, parent.depth + 1 if parent is not None else 0)
                self._by_key[key] = self._by_page[page] = entry
                if parent is not None:
                    parent.children[key] = entry
                added += 1
            elif entry.page in self._idle:
                known.append(entry.page)
            parent = entry
        for page in reversed(known):
            self._idle.move_to_end(page)
        return added

    def let_go(self, pages: Iterable[int]) -> None:
        """Nobody holds these any more; pages that are not here are ignored."""
        entries = [self._by_page[page] for page in pages if page in self._by_page]
        for entry in sorted(entries, key=lambda entry: -entry.depth):
            self._idle[entry.page] = entry

    def hold(self, pages: Iterable[int]) -> None:
        """These have an owner again."""
        for page in pages:
            self._idle.pop(page, None)

    def evict(self, count: int) -> list[int]:
        """Takes `count` idle pages out, least recently used first; all of them, if there are no more.

        Those below a page go before it. What is held below an idle page, which takes two owners of the same content,
        leaves the index with it and stays its owner's.
        """
        evicted: list[int] = []
        while len(evicted) < count and self._idle:
            entry = next(iter(self._idle.values()))
            evicted += self.forget([self._last_idle(entry).page])
        return evicted

    def forget(self, pages: Iterable[int]) -> list[int]:
        """Takes pages and everything below them out; those of them that were idle, which are nobody's now."""
        freed: list[int] = []
        found = [self._by_page[page] for page in pages if page in self._by_page]
        while found:
            entry = found.pop()
            if self._by_page.pop(entry.page, None) is None:
                continue
            del self._by_key[entry.key]
            if entry.parent is not None:
                entry.parent.children.pop(entry.key, None)
            if self._idle.pop(entry.page, None) is not None:
                freed.append(entry.page)
            found += entry.children.values()
        return freed

    def _last_idle(self, entry: _Entry) -> _Entry:
        """An idle entry at or below this one that has no idle one below itself."""
        below = list(entry.children.values())
        while below:
            candidate = below.pop()
            if candidate.page in self._idle:
                entry, below = candidate, []
            below += candidate.children.values()
        return entry
