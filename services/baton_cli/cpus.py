"""Which CPUs each worker is bound to."""

from collections.abc import Sequence
from itertools import pairwise


def assign_cpus(
    cpus: Sequence[int], prefill: int, decode: int, prefill_ranks: int = 1, decode_ranks: int = 1
) -> list[tuple[int, ...]]:
    """CPUs of the prefill workers, then of the decode workers; empty: any.

    Prefill and decode never share a CPU where there are two: a decode step beside a prefill would wait for it. Each
    gets a part by its number of model processes (`..._ranks` of each worker), and prefill what is over, since it is
    bound by arithmetic and decode by memory. Workers of one kind share their part evenly, and take turns on its CPUs
    if they are more than those.
    """
    workers = prefill + decode
    if len(cpus) < 2 or workers == 0:
        return [()] * workers
    if prefill == 0 or decode == 0:
        return _divide(cpus, workers)
    decoding = decode * decode_ranks
    share = len(cpus) * decoding // (prefill * prefill_ranks + decoding)
    # One for each worker first, if there are so many.
    least, most = (decode, len(cpus) - prefill) if workers <= len(cpus) else (1, len(cpus) - 1)
    for_decode = max(least, min(most, share))
    split = len(cpus) - for_decode
    return _divide(cpus[:split], prefill) + _divide(cpus[split:], decode)


def _divide(cpus: Sequence[int], workers: int) -> list[tuple[int, ...]]:
    if workers > len(cpus):
        return [(cpus[index % len(cpus)],) for index in range(workers)]
    bounds = [len(cpus) * index // workers for index in range(workers + 1)]
    return [tuple(cpus[first:last]) for first, last in pairwise(bounds)]
