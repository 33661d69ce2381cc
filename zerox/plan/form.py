"""How a number that an update rule keeps for each element is stored."""

from __future__ import annotations

from dataclasses import dataclass

from zerox.plan.span import SHARD_ALIGN

BLOCK_NUMEL = 256  # elements that share a scale, counted from the parameter's start: kStateBlock in csrc/math/state.h
assert SHARD_ALIGN % BLOCK_NUMEL == 0


@dataclass(frozen=True)
class Form:
    """``dtype`` is torch's name of the dtype that an element is stored in, ``itemsize`` its bytes.

    With ``scaled``, elements are codes, and each block of 256 has a float32 scale: element = map[code] * scale, by the
    maps of csrc/math/dynamic_map.h.
    """

    dtype: str
    itemsize: int
    scaled: bool = False

    def num_scales(self, numel: int) -> int:
        return num_blocks(numel) if self.scaled else 0


FLOAT64 = Form("float64", 8)
FLOAT32 = Form("float32", 4)
BFLOAT16 = Form("bfloat16", 2)
FLOAT16 = Form("float16", 2)
EIGHT_BIT = Form("uint8", 1, scaled=True)
BOOL = Form("bool", 1)
LOW_16_BITS = Form("int16", 2)  # of a float32 whose high 16 are a bfloat16 parameter


def num_blocks(numel: int) -> int:
    """Blocks are counted from the parameter's start, and no shard cuts one."""
    return -(-numel // BLOCK_NUMEL)
