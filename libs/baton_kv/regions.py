"""Which of a rank's regions hold which layers of its cache."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise

from .errors import InvalidKvArgument
from .layout import PageLayout


class RegionsMismatch(InvalidKvArgument):
    """Regions that don't hold every layer of the cache exactly once."""

    reason = "KV_REGIONS_MISMATCH"


@dataclass(frozen=True, slots=True)
class LayerRun:
    """Layers [first_layer, first_layer + layers), one behind the other in a region: `[layers, pages, page]`.

    `region` counts in the rank's list of regions; `offset` is the byte at which the first of the layers begins.
    """

    region: int
    first_layer: int
    layers: int
    offset: int = 0

    @property
    def end(self) -> int:
        return self.first_layer + self.layers


@dataclass(frozen=True, slots=True)
class RegionMap:
    """One rank's cache over its regions: runs in the order of the layers, each layer in one of them.

    Raises `RegionsMismatch`.
    """

    runs: tuple[LayerRun, ...]

    def __post_init__(self) -> None:
        layer = 0
        for run in self.runs:
            if run.first_layer != layer or run.layers < 1 or run.region < 0 or run.offset < 0:
                raise RegionsMismatch(
                    f"layers [{run.first_layer}, {run.end}) are at byte {run.offset} of region {run.region}; the run "
                    f"must begin with layer {layer}, have at least one, and lie in a region",
                    first_layer=run.first_layer,
                    layers=run.layers,
                )
            layer = run.end

    @classmethod
    def whole(cls, layers: int) -> RegionMap:
        """All layers in the one region."""
        return cls((LayerRun(0, 0, layers),))

    @classmethod
    def split(cls, layers: Sequence[int]) -> RegionMap:
        """Region i holds the next `layers[i]` layers, from its beginning."""
        bounds = pairwise(accumulate(layers, initial=0))
        return cls(tuple(LayerRun(region, first, end - first) for region, (first, end) in enumerate(bounds)))

    @property
    def layers(self) -> int:
        return self.runs[-1].end if self.runs else 0

    def check(self, layout: PageLayout, lengths: Sequence[int]) -> None:
        """Whether a cache of this layout fits regions of these lengths, in bytes, and each of them is used.

        Raises `RegionsMismatch`, naming what does not fit.
        """
        if self.layers != layout.layers:
            raise RegionsMismatch(
                f"the regions hold {self.layers} layers; the cache has {layout.layers}", layers=self.layers
            )
        used = {run.region for run in self.runs}
        if used != set(range(len(lengths))):
            raise RegionsMismatch(
                f"the runs name the regions {sorted(used)}; there are {len(lengths)}, and each must hold layers",
                regions=len(lengths),
            )
        taken: dict[int, list[tuple[int, int]]] = {}
        for run in self.runs:
            end = run.offset + run.layers * layout.layer_bytes
            if end > lengths[run.region]:
                raise RegionsMismatch(
                    f"region {run.region} has {lengths[run.region]} bytes; layers [{run.first_layer}, {run.end}) need "
                    f"{end}",
                    region=run.region,
                    length=lengths[run.region],
                    expected=end,
                )
            if any(run.offset < other_end and start < end for start, other_end in taken.get(run.region, ())):
                raise RegionsMismatch(
                    f"layers [{run.first_layer}, {run.end}) overlap others in region {run.region}", region=run.region
                )
            taken.setdefault(run.region, []).append((run.offset, end))
