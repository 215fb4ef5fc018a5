"""What GGUF does to the tensors of latent attention."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from .errors import WrongShape
from .gguf_file import GgufWeights

_FUSED, _KEYS, _VALUES = ".kv_b_proj.", ".k_b_proj.", ".v_b_proj."
_BIAS = ".e_score_correction_bias"


class LatentGgufWeights(GgufWeights):
    """As `GgufWeights`. llama.cpp's converter takes the up-projections `[heads * (nope + value), latent]` apart, head
    by head, into `[heads, latent, nope]` (transposed) and `[heads, value, latent]`; here they are one matrix again.
    Files from before it did so have that matrix itself.
    """

    def __len__(self) -> int:
        # Two tensors of the file are one here.
        return super().__len__() - sum(".attn_k_b." in name for name in self._file)

    def __contains__(self, name: str) -> bool:
        return super().__contains__(_renamed(name)) or (_FUSED in name and self._is_split(name))

    def shape(self, name: str) -> tuple[int, ...]:
        """See `WeightSource.shape`. Raises `WrongShape` where the two parts contradict each other."""
        name = _renamed(name)
        if not (_FUSED in name and self._is_split(name)):
            return super().shape(name)
        keys, values = super().shape(name.replace(_FUSED, _KEYS)), super().shape(name.replace(_FUSED, _VALUES))
        if len(keys) != 3 or len(values) != 3 or keys[:2] != (values[0], values[2]):
            raise WrongShape(name.replace(_FUSED, _VALUES), [*keys[:1], *values[1:2], *keys[1:2]], values, self.path)
        return keys[0] * (keys[2] + values[1]), keys[1]

    def read(self, name: str, slices: Sequence[range] = ()) -> torch.Tensor:
        """See `WeightSource.read`."""
        name = _renamed(name)
        if not (_FUSED in name and self._is_split(name)):
            return super().read(name, slices)
        rows, columns = [*slices, *(range(size) for size in self.shape(name)[len(slices) :])]
        # Parts of each head's rows come from either tensor, so whole heads are read.
        size = self.shape(name)[0] // super().shape(name.replace(_FUSED, _KEYS))[0]
        heads = range(rows.start // size, -(-rows.stop // size))
        keys = super().read(name.replace(_FUSED, _KEYS), [heads]).transpose(1, 2)
        values = super().read(name.replace(_FUSED, _VALUES), [heads])
        fused = torch.cat((keys, values), dim=1).flatten(0, 1)
        first = rows.start - heads.start * size
        return fused[first : first + len(rows), columns.start : columns.stop]

    def _is_split(self, name: str) -> bool:
        return super().__contains__(name.replace(_FUSED, _KEYS))


def _renamed(name: str) -> str:
    """The name that the gguf library knows."""
    return name.replace(_BIAS, ".e_score_correction.bias")
