"""What a model process offers: which session and rank it is, and how its KV cache lies in the memory it hands over."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from .errors import OfferInvalid

KV_REGION = "kv"
ORDERS = ("HND", "NHD", "MLA")
# Where a region lies: in a memfd, or on a GPU, in memory made with cuMemCreate and exported as a POSIX descriptor.
HOST, CUDA = "host", "cuda"
_LAYOUT_NUMBERS = ("layers", "pages", "page_size", "kv_heads", "kv_heads_total", "head_dim", "element_size")
MAX_RANKS = 256


@dataclass(frozen=True)
class Handoff:
    """One rank's memory.

    `session`: 64-bit id that the worker drew. `rank` of `ranks`: data-parallel rank * tensor_parallel + tensor-parallel
    rank; `data_parallel` divides `ranks`.
    `layout`: order ("HND", "NHD", "MLA"), layers, pages, page_size (tokens), kv_heads (this rank's), kv_heads_total (of
    the model), head_dim (MLA: latent + rope), element_size (bytes), dtype (name).
    `regions`: [{"name": "kv", "length": bytes, "layers": number}, ...]: each holds the next so many layers, from its
    beginning, as [layers, pages, page]; a single one holds all and need not say so. Regions on a GPU say "kind": "cuda"
    and "device": the GPU's uuid ("GPU-...") besides, the same for all; then a GPU moves the layer counter, and nobody
    rings the doorbell.
    """

    session: int
    rank: int
    ranks: int
    layout: Mapping[str, Any]
    regions: Sequence[Mapping[str, Any]]
    data_parallel: int = field(default=1)

    @property
    def descriptors(self) -> int:
        """Descriptors that travel with it: one a region, the counter's memory, the doorbell."""
        return len(self.regions) + 2

    @property
    def kv_length(self) -> int:
        """Bytes of all regions."""
        return sum(int(region["length"]) for region in self.regions)

    @property
    def region_layers(self) -> list[int]:
        """How many layers each region holds."""
        return [int(region.get("layers", self.layout["layers"])) for region in self.regions]

    @property
    def device(self) -> str | None:
        """The uuid of the GPU that the regions are on; None for memory of the host."""
        return str(self.regions[0]["device"]) if self.regions[0].get("kind", HOST) == CUDA else None

    def to_json(self) -> dict[str, Any]:
        return {
            "session": self.session,
            "rank": self.rank,
            "ranks": self.ranks,
            "data_parallel": self.data_parallel,
            "layout": dict(self.layout),
            "regions": [dict(region) for region in self.regions],
        }


def region_bytes(layout: Mapping[str, Any]) -> int:
    """layers * pages * page; a page is 2 * kv_heads * page_size * head_dim elements, for MLA page_size * head_dim."""
    page = layout["page_size"] * layout["head_dim"] * layout["element_size"]
    if layout["order"] != "MLA":
        page *= 2 * layout["kv_heads"]
    return int(layout["layers"] * layout["pages"] * page)


def parse_offer(body: Mapping[str, Any]) -> Handoff:
    """Checks every field of an offer that came over the wire. Raises OfferInvalid, naming the first that is wrong."""
    session = _number(body, "session", 1, 2**64 - 1)
    ranks = _number(body, "ranks", 1, MAX_RANKS)
    rank = _number(body, "rank", 0, ranks - 1)
    data_parallel = _number(body, "data_parallel", 1, ranks)
    if ranks % data_parallel:
        raise OfferInvalid(f"data_parallel {data_parallel} doesn't divide {ranks} ranks", ranks=ranks)
    layout = _layout(body.get("layout"))
    regions = _regions(body.get("regions"), layout["layers"])
    layer = region_bytes(layout) // layout["layers"]
    for region in regions:
        expected, length = region.get("layers", layout["layers"]) * layer, region["length"]
        if length < expected:
            raise OfferInvalid(
                f'region "kv" has {length} bytes, its layout needs {expected}', length=length, expected=expected
            )
    return Handoff(session, rank, ranks, layout, regions, data_parallel)


def _layout(layout: Any) -> dict[str, Any]:
    if not isinstance(layout, dict):
        raise OfferInvalid(f"layout must be an object, not {type(layout).__name__}", field="layout")
    order = layout.get("order")
    if order not in ORDERS:
        raise OfferInvalid(f"layout.order must be one of {', '.join(ORDERS)}, not {order!r}", field="layout.order")
    dtype = layout.get("dtype")
    if not isinstance(dtype, str) or not dtype or len(dtype) > 32:
        raise OfferInvalid(f"layout.dtype must be the name of an element type, not {dtype!r}", field="layout.dtype")
    numbers = {name: _number(layout, name, 1, 2**32 - 1, "layout.") for name in _LAYOUT_NUMBERS}
    if numbers["kv_heads"] > numbers["kv_heads_total"]:
        raise OfferInvalid(
            f"layout.kv_heads {numbers['kv_heads']} is more than the model's {numbers['kv_heads_total']}",
            field="layout.kv_heads",
        )
    return {"order": order, "dtype": dtype, **numbers}


def _regions(regions: Any, layers: int) -> list[dict[str, Any]]:
    if not isinstance(regions, list) or not regions or not all(isinstance(region, dict) for region in regions):
        raise OfferInvalid('regions must be a list of one or more regions "kv"', field="regions")
    checked: list[dict[str, Any]] = []
    for region in regions:
        if region.get("name") != KV_REGION:
            raise OfferInvalid(f'a region must be named "kv", not {region.get("name")!r}', field="regions")
        length = _number(region, "length", 1, 2**62, "regions.")
        checked.append({"name": KV_REGION, "length": length, **_place(region)})
        if len(regions) > 1 or "layers" in region:
            checked[-1]["layers"] = _number(region, "layers", 1, layers, "regions.")
    held = sum(region.get("layers", layers) for region in checked)
    if held != layers:
        raise OfferInvalid(f"the regions hold {held} layers, the cache has {layers}", field="regions.layers")
    if len({region.get("device") for region in checked}) > 1:
        raise OfferInvalid("all regions of a rank must be in the same memory: on one GPU, or the host", field="regions")
    return checked


def _place(region: Mapping[str, Any]) -> dict[str, str]:
    kind, device = region.get("kind", HOST), region.get("device")
    if kind == HOST:
        return {}
    if kind != CUDA:
        raise OfferInvalid(f'regions.kind must be "{HOST}" or "{CUDA}", not {kind!r}', field="regions.kind")
    if not isinstance(device, str) or not device.startswith("GPU-") or len(device) > 64:
        raise OfferInvalid(f'regions.device must be a GPU\'s uuid, "GPU-...", not {device!r}', field="regions.device")
    return {"kind": CUDA, "device": device}


def _number(body: Mapping[str, Any], name: str, low: int, high: int, prefix: str = "") -> int:
    value = body.get(name)
    if not isinstance(value, int) or isinstance(value, bool) or not low <= value <= high:
        raise OfferInvalid(
            f"{prefix}{name} must be a whole number in [{low}, {high}], not {value!r}", field=prefix + name
        )
    return value
