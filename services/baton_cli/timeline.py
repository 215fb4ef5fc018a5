"""Where the time of a request went, as rows for people. Pure but for `timeline_table`."""

from collections.abc import Sequence
from dataclasses import dataclass

from baton.v1 import common_pb2
from rich.table import Table

# More rows than these of a prompt's chunks would hide the rest of the table.
_SHOWN_CHUNKS = 6


@dataclass(frozen=True)
class Row:
    step: str
    duration_us: int | None
    note: str = ""


def timeline_rows(timeline: common_pb2.Timeline, usage: common_pb2.Usage) -> list[Row]:
    """In the order in which things happen to a request; what overlaps says so."""
    rows = [
        Row("tokenise", timeline.tokenize_us, f"{usage.prompt_tokens} prompt tokens"),
        Row("route", timeline.route_us, f"to {timeline.decode_worker or '?'}"),
        Row("reserve pages", timeline.reserve_us),
    ]
    if timeline.decode_cached_tokens:
        rows.append(_cached(timeline.decode_cached_tokens, "decode"))
    if timeline.local_prefill:
        rows.append(Row("prefill", None, "computed by the decode worker itself"))
    elif timeline.prefill_worker:
        retries = f", after {timeline.prefill_retries} failed" if timeline.prefill_retries else ""
        rows.append(Row("prefill queue", timeline.prefill_queue_us, f"at {timeline.prefill_worker}{retries}"))
    else:
        rows.append(Row("prefill", None, "nothing to compute before the last prompt token"))
    if timeline.prefill_cached_tokens:
        rows.append(_cached(timeline.prefill_cached_tokens, "prefill"))
    rows += _chunk_rows(timeline.chunks)
    rows += _transfer_rows(timeline.transfer)
    if timeline.inbox_us:
        rows.append(Row("all pages arrived", timeline.inbox_us, "since prefill was asked for"))
    rows.append(Row("first decode step", timeline.first_decode_step_us))
    rows.append(Row("time to first token", timeline.time_to_first_token_us, "at the decode worker"))
    if timeline.inter_token_us:
        rate = f"{1e6 / timeline.inter_token_us:,.1f} tokens/s, {usage.completion_tokens} tokens"
        rows.append(Row("inter-token latency", timeline.inter_token_us, rate))
    return rows


def _chunk_rows(chunks: Sequence[common_pb2.ChunkTiming]) -> list[Row]:
    """A row a chunk; where there are many, the first, all between, and the last."""
    if len(chunks) <= _SHOWN_CHUNKS:
        return [_chunks(f"chunk {number}", [chunk]) for number, chunk in enumerate(chunks, 1)]
    return [
        _chunks("chunk 1", chunks[:1]),
        _chunks(f"chunks 2 to {len(chunks) - 1}", chunks[1:-1]),
        _chunks(f"chunk {len(chunks)}", chunks[-1:]),
    ]


def _chunks(name: str, chunks: Sequence[common_pb2.ChunkTiming]) -> Row:
    tokens, compute_us = sum(chunk.tokens for chunk in chunks), sum(chunk.compute_us for chunk in chunks)
    rate = f", {tokens * 1e6 / compute_us:,.0f} tokens/s" if compute_us else ""
    return Row(f"prefill compute, {name}", compute_us, f"{tokens:,} tokens{rate}")


def _cached(tokens: int, role: str) -> Row:
    return Row("prefix cache", None, f"{_count(tokens, 'token')} at the {role} worker")


def _transfer_rows(transfer: common_pb2.TransferStats) -> list[Row]:
    if not transfer.bytes:
        return []
    return [
        Row("transfer", transfer.duration_us, f"{format_bytes(transfer.bytes)}, {_count(transfer.pages, 'page')}"),
        Row("  in", None, _writes(transfer)),
        Row("  overlapped with compute", transfer.overlapped_us),
        Row("  exposed after compute", transfer.exposed_us),
        Row("  layer done to first write", transfer.first_post_us),
    ]


def timeline_table(timeline: common_pb2.Timeline, usage: common_pb2.Usage) -> Table:
    table = Table(title="Where the time went", title_justify="left", show_edge=False, pad_edge=False)
    table.add_column("step")
    table.add_column("ms", justify="right")
    table.add_column("")
    for row in timeline_rows(timeline, usage):
        strong = "bold" if row.step in {"time to first token", "inter-token latency"} else ""
        table.add_row(row.step, format_ms(row.duration_us), row.note, style=strong)
    return table


def format_ms(duration_us: int | None) -> str:
    return "" if duration_us is None else f"{duration_us / 1000:,.{1 if duration_us >= 1000 else 2}f}"


def format_bytes(count: int) -> str:
    """Decimal units, as in figures of network speed."""
    for unit, size in (("GB", 10**9), ("MB", 10**6), ("kB", 10**3)):
        if count >= size:
            return f"{count / size:.1f} {unit}"
    return f"{count} B"


def _writes(transfer: common_pb2.TransferStats) -> str:
    """How well neighbouring pages were joined."""
    each = f", {transfer.extents / transfer.writes:,.1f} extents each" if transfer.writes else ""
    return f"{_count(transfer.writes, 'write')} of {_count(transfer.extents, 'extent')}{each}"


def _count(number: int, noun: str) -> str:
    return f"{number:,} {noun}" + ("" if number == 1 else "s")
