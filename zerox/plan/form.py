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

    def __str__(self) -> str:
        """As users call it."""
        return f"{8 * self.itemsize} bits" if self.scaled else f"torch.{self.dtype}"


FLOAT64 = Form("float64", 8)
FLOAT32 = Form("float32", 4)
BFLOAT16 = Form("bfloat16", 2)
FLOAT16 = Form("float16", 2)
EIGHT_BIT = Form("uint8", 1, scaled=True)
BOOL = Form("bool", 1)
LOW_16_BITS = Form("int16", 2)  # of a float32 whose high 16 are a bfloat16 parameter
SAVED = (FLOAT64, FLOAT32, BFLOAT16, EIGHT_BIT)  # how files may have state of which the constructor chooses the form
SAVED_OF_ROWS = (FLOAT32, BFLOAT16, EIGHT_BIT)
SAVED_OF_CLASSES = (*SAVED, FLOAT16)  # of torch's kind, which may work on float16 parameters without a master


def form_given(dtype: str, itemsize: int, always: Form | None) -> Form:
    """Of state that comes from outside: files and state_dict() say no more of it than torch's name of its dtype.

    ``always``: the form that it has in any case, if its rule knows one; else uint8 are codes. A form that shares its
    dtype with another needs a word beside it in files, which belongs here.
    """
    if always is not None and always.dtype == dtype:
        return always
    return EIGHT_BIT if dtype == EIGHT_BIT.dtype else Form(dtype, itemsize)


def num_blocks(numel: int) -> int:
    """Blocks are counted from the parameter's start, and no shard cuts one."""
    return -(-numel // BLOCK_NUMEL)
