"""Who holds which page of a cache."""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass

from .errors import InvalidKvArgument, KvError
from .free_runs import FreeRuns
from .prefix_index import PrefixIndex

# Neighbours leave as one write, and a full cache falls to pieces unless something is done for them. Simulated, 3,000
# prompts of chats over 2,000 pages: where only what is missing is evicted, pages come in runs of 1.7; so, in runs of 8,
# for 1.5 % fewer hits. With 32 it would be runs of 18, for 4 % fewer.
RUN = 16


class PoolExhausted(KvError):
    """Fewer pages are free than were asked for."""

    status = "RESOURCE_EXHAUSTED"
    reason = "KV_POOL_EXHAUSTED"

    def __init__(self, requested: int, free: int) -> None:
        super().__init__(f"{requested} pages requested, {free} are free", requested=requested, free=free)
        self.requested = requested
        self.free = free


class UnknownOwner(KvError):
    """The owner holds nothing here, or let go already."""

    status = "NOT_FOUND"
    reason = "KV_UNKNOWN_OWNER"

    def __init__(self, owner: Hashable) -> None:
        super().__init__(f"owner {owner!r} holds nothing in this pool", owner=owner)
        self.owner = owner


class OwnerQuarantined(KvError):
    """The owner's pages are in quarantine; only `release_quarantine` ends that."""

    status = "FAILED_PRECONDITION"
    reason = "KV_OWNER_QUARANTINED"

    def __init__(self, owner: Hashable) -> None:
        super().__init__(f"the pages of owner {owner!r} are in quarantine; release_quarantine ends that", owner=owner)
        self.owner = owner


class OwnerNotQuarantined(KvError):
    """`release_quarantine` for an owner whose pages are not in quarantine."""

    status = "FAILED_PRECONDITION"
    reason = "KV_OWNER_NOT_QUARANTINED"

    def __init__(self, owner: Hashable) -> None:
        super().__init__(f"the pages of owner {owner!r} are not in quarantine; release lets them go", owner=owner)
        self.owner = owner


class PageNotHeld(KvError):
    """A page that nobody holds, and that is not kept, can't be shared: it may be given to anyone at any moment."""

    status = "FAILED_PRECONDITION"
    reason = "KV_PAGE_NOT_HELD"

    def __init__(self, page: int) -> None:
        super().__init__(f"page {page} is free; only a page that somebody holds can get another owner", page=page)
        self.page = page


class PageQuarantined(KvError):
    """A page that a write may still touch gets no new owner."""

    status = "FAILED_PRECONDITION"
    reason = "KV_PAGE_QUARANTINED"

    def __init__(self, page: int) -> None:
        super().__init__(f"page {page} is in quarantine; it gets no new owner before that ends", page=page)
        self.page = page


@dataclass(frozen=True, slots=True)
class Quarantine:
    """Why an owner's pages are kept back, since when (the caller's clock), and how many they are."""

    reason: str
    since: float
    pages: int


class PagePool:
    """Pages `0 .. pages-1` of one cache: free, held by one or more owners, or in quarantine.

    Owners are hashable values such as `("request", id)` and `("transfer", id)`. A page returns to the free ones when
    its last owner lets go. An owner in quarantine goes on holding its pages until `release_quarantine`; while one
    does, the page counts as quarantined, whoever else holds it. Always: `free + held + quarantined == total`.

    Pages whose contents are worth finding again are told to `keep`. They count as free as soon as nobody holds them,
    but are given to somebody else only when the others don't suffice, least recently used first; until then `match`
    finds them by what they hold. Pages in quarantine are never kept: nobody knows what is written into them.

    Every method either does all that it says, or raises and changes nothing.
    """

    def __init__(self, pages: int) -> None:
        if pages < 1:
            raise InvalidKvArgument(f"pages is {pages}; a pool has at least 1", pages=pages)
        self._total = pages
        self._runs = FreeRuns(pages)
        self._kept = PrefixIndex()
        # Kept pages that were given to somebody else, ever.
        self.evicted = 0
        self._holds = [0] * pages
        self._quarantine_holds = [0] * pages
        self._quarantined_pages = 0
        self._pages_of: dict[Hashable, set[int]] = {}
        self._quarantines: dict[Hashable, Quarantine] = {}

    @property
    def total(self) -> int:
        return self._total

    @property
    def free(self) -> int:
        """Pages that nobody holds, kept ones included."""
        return self._runs.pages + self._kept.idle

    @property
    def kept(self) -> int:
        """Pages that `match` finds, whether somebody holds them or not."""
        return len(self._kept)

    @property
    def quarantined(self) -> int:
        """Pages with at least one owner in quarantine."""
        return self._quarantined_pages

    @property
    def held(self) -> int:
        """Pages with at least one owner, none of them in quarantine."""
        return self._total - self.free - self._quarantined_pages

    @property
    def longest_free_run(self) -> int:
        """Most neighbouring pages that one allocation can get without taking kept ones."""
        return self._runs.longest

    @property
    def quarantines(self) -> dict[Hashable, Quarantine]:
        """Owners in quarantine, a copy."""
        return dict(self._quarantines)

    @property
    def owners(self) -> set[Hashable]:
        """Everybody who holds something, or was allocated nothing and has not let go; a copy."""
        return set(self._pages_of)

    def pages_of(self, owner: Hashable) -> list[int]:
        """The owner's pages, sorted. Raises `UnknownOwner`."""
        return sorted(self._known(owner))

    def free_runs(self) -> list[range]:
        """The free pages that are not kept as runs of neighbours, in order."""
        return self._runs.runs()

    def oldest_quarantine_age(self, now: float) -> float:
        """How long the oldest quarantine has lasted, in the unit of the caller's clock; 0 without one."""
        return max((now - quarantine.since for quarantine in self._quarantines.values()), default=0.0)

    def match(self, keys: Sequence[bytes]) -> list[int]:
        """Kept pages with the longest prefix of these keys (of `PageChain`), in order; whoever wants them holds them
        before anything else is allocated: `allocate` does it at once."""
        return self._kept.match(keys)

    def key_of(self, page: int) -> bytes | None:
        """Under which key a page is kept, if it is."""
        return self._kept.key_of(page)

    def available(self, prefix: Sequence[int] = ()) -> int:
        """Pages that can be allocated beside those of `prefix`, whether somebody holds these or not."""
        return self.free - sum(self._kept.is_idle(page) for page in prefix)

    def allocate(self, count: int, owner: Hashable, prefix: Sequence[int] = ()) -> list[int]:
        """Gives `count` free pages to `owner`, sorted, in as few runs of neighbours as best fit finds.

        An owner may allocate again, which adds to what it holds; `count` may be 0, which makes the owner known. With
        `prefix`, pages of `match`, the owner holds these as well. Raises `PoolExhausted`, `OwnerQuarantined`,
        `InvalidKvArgument`, and what `hold` raises.
        """
        if count < 0:
            raise InvalidKvArgument(f"count is {count}; it must not be negative", count=count)
        if owner in self._quarantines:
            raise OwnerQuarantined(owner)
        available = self.available(prefix)
        if count > available:
            raise PoolExhausted(count, available)
        self.hold(prefix, owner)
        self._make_room(count)
        pages = self._runs.take(count)
        for page in pages:
            self._holds[page] = 1
        self._pages_of[owner].update(pages)
        return pages

    def hold(self, pages: Iterable[int], owner: Hashable) -> None:
        """Makes `owner` one more owner of pages that somebody holds or that are kept; those it holds already stay as
        they are.

        Raises `PageNotHeld`, `PageQuarantined`, `OwnerQuarantined`, `InvalidKvArgument`.
        """
        wanted = set(pages)
        if owner in self._quarantines:
            raise OwnerQuarantined(owner)
        for page in wanted:
            if not 0 <= page < self._total:
                raise InvalidKvArgument(f"page is {page}; it must be in [0, {self._total})", page=page)
            if not self._holds[page] and page not in self._kept:
                raise PageNotHeld(page)
            if self._quarantine_holds[page]:
                raise PageQuarantined(page)
        own = self._pages_of.setdefault(owner, set())
        self._kept.hold(wanted)
        for page in wanted - own:
            self._holds[page] += 1
        own |= wanted

    def keep(self, keys: Sequence[bytes], pages: Sequence[int]) -> int:
        """From now on `match` finds these pages under these keys, the first ones of their chain; how many are new.

        They are complete in every layer, somebody holds them, and nobody writes into them any more. Where a key has a
        page already, that one stays, and the other is free when it is let go. Nothing is kept from a page in quarantine
        on. Raises `PageNotHeld`, `InvalidKvArgument`.
        """
        if len(keys) != len(pages):
            raise InvalidKvArgument(f"{len(keys)} keys for {len(pages)} pages", keys=len(keys), pages=len(pages))
        usable = len(pages)
        for position, page in reversed(list(enumerate(pages))):
            if not 0 <= page < self._total:
                raise InvalidKvArgument(f"page is {page}; it must be in [0, {self._total})", page=page)
            if not self._holds[page]:
                raise PageNotHeld(page)
            if self._quarantine_holds[page]:
                usable = position
        return self._kept.add(keys[:usable], pages[:usable])

    def forget(self, pages: Iterable[int]) -> None:
        """`match` finds these pages no more, nor those that follow them."""
        self._runs.give(self._kept.forget(pages))

    def release(self, owner: Hashable) -> None:
        """Ends all holds of `owner`; pages without another owner become free.

        Raises `UnknownOwner`, `OwnerQuarantined`.
        """
        self._known(owner)
        if owner in self._quarantines:
            raise OwnerQuarantined(owner)
        self._let_go(owner)

    def quarantine(self, owner: Hashable, reason: str, now: float) -> None:
        """Keeps the owner's pages back until `release_quarantine`: a write may still touch them. None of them is kept
        for `match` any more, nor any that follows one of them.

        Raises `UnknownOwner`, `OwnerQuarantined`.
        """
        pages = self._known(owner)
        if owner in self._quarantines:
            raise OwnerQuarantined(owner)
        for page in pages:
            self._quarantined_pages += not self._quarantine_holds[page]
            self._quarantine_holds[page] += 1
        self.forget(pages)
        self._quarantines[owner] = Quarantine(reason=reason, since=now, pages=len(pages))

    def release_quarantine(self, owner: Hashable) -> None:
        """Ends the owner's quarantine and its holds: no write can touch its pages any more.

        Raises `UnknownOwner`, `OwnerNotQuarantined`.
        """
        pages = self._known(owner)
        if owner not in self._quarantines:
            raise OwnerNotQuarantined(owner)
        for page in pages:
            self._quarantine_holds[page] -= 1
            self._quarantined_pages -= not self._quarantine_holds[page]
        del self._quarantines[owner]
        self._let_go(owner)

    def _make_room(self, count: int) -> None:
        """Stops keeping pages until `count` others are free, and until `RUN` of them are neighbours: for that as many
        again, and a few, at most."""
        run, spare = min(count, RUN), count
        while self._kept.idle:
            missing = count - self._runs.pages
            if missing <= 0 and (spare <= 0 or self._runs.longest >= run):
                return
            evicted = self._kept.evict(missing if missing > 0 else run)
            if missing <= 0:
                spare -= len(evicted)
            self.evicted += len(evicted)
            self._runs.give(evicted)

    def _known(self, owner: Hashable) -> set[int]:
        pages = self._pages_of.get(owner)
        if pages is None:
            raise UnknownOwner(owner)
        return pages

    def _let_go(self, owner: Hashable) -> None:
        freed: list[int] = []
        for page in self._pages_of.pop(owner):
            self._holds[page] -= 1
            if not self._holds[page]:
                freed.append(page)
        kept = [page for page in freed if page in self._kept]
        self._kept.let_go(kept)
        self._runs.give([page for page in freed if page not in self._kept])
