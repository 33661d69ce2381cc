"""The header of safetensors files: the package's bytes, and no file that the package would refuse."""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from zerox import CheckpointError
from zerox.checkpoint import safetensors_file
from zerox.checkpoint.safetensors_file import DTYPES, DamagedHeader, make_header, parse_header, read_header

safetensors = pytest.importorskip("safetensors.torch")


def of_every_dtype() -> dict[str, Tensor]:
    found = {}
    for number, (name, dtype) in enumerate(sorted(DTYPES.items())):
        raw = torch.arange(6 * dtype.itemsize, dtype=torch.uint8)
        found[f'{number % 3} "{name}" ü\n\t'] = raw.bool() if dtype is torch.bool else raw.view(dtype).view(2, 3)
    found |= {"empty": torch.zeros(0, 7), "one": torch.tensor(1.5), "another": torch.ones(5), "é": torch.ones(2)}
    return found


def written(tensors: dict[str, Tensor], metadata: dict[str, str] | None = None) -> bytes:
    header, entries = make_header([(name, t.dtype, t.shape) for name, t in tensors.items()], metadata)
    content = bytearray(header)
    for name, entry in entries.items():
        assert entry.start == len(content)
        content += tensors[name].contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
        assert entry.stop == len(content)
    return bytes(content)


@pytest.mark.parametrize("metadata", [None, {"format": "pt"}, {"a": "ü"}])
@pytest.mark.parametrize("count", [0, 1, 5, None])
def test_what_is_written_has_the_packages_bytes(metadata: dict[str, str] | None, count: int | None) -> None:
    tensors = dict(list(of_every_dtype().items())[:count])
    assert written(tensors, metadata) == safetensors.save(tensors, metadata=metadata)


def test_every_dtype_of_the_package_is_known() -> None:
    assert {name: dtype for name, dtype in safetensors._TYPES.items() if name not in DTYPES} == {}


def test_what_the_package_writes_is_read(tmp_path: Path) -> None:
    tensors = of_every_dtype()
    safetensors.save_file(tensors, tmp_path / "x", metadata={"format": "pt"})
    content = (tmp_path / "x").read_bytes()
    with (tmp_path / "x").open("rb", buffering=0) as file:
        found = read_header(file)
    assert found.keys() == tensors.keys()
    for name, entry in found.items():
        assert (entry.dtype, entry.shape) == (tensors[name].dtype, tuple(tensors[name].shape))
        assert content[entry.start : entry.stop] == tensors[name].reshape(-1).view(torch.uint8).numpy().tobytes()


def test_a_dtype_that_files_lack_is_refused() -> None:
    with pytest.raises(ValueError, match=r"'x' is torch.complex128, which safetensors files do not have"):
        make_header([("x", torch.complex128, (1,))])
    with pytest.raises(ValueError, match="two tensors"):
        make_header([("x", torch.int8, (1,)), ("x", torch.int8, (1,))])


def entry(start: int, stop: int, dtype: str = "F32", shape: Any = None) -> dict[str, Any]:
    return {"dtype": dtype, "shape": [(stop - start) // 4] if shape is None else shape, "data_offsets": [start, stop]}


ONE = entry(0, 4)
DAMAGED: dict[str, tuple[bytes | dict[str, Any] | list[Any], int, str]] = {  # the header, bytes behind it, the refusal
    "no text": (b"\xff{}", 0, "no JSON"),
    "no JSON": (b'{"a":', 0, "no JSON"),
    "deep": (b"[" * 100_000, 0, "no JSON"),
    "a list": ([], 0, "no JSON object"),
    "a long number": (b'{"a":' + b"9" * 5000 + b"}", 0, "damaged|digits"),
    "twice": (json.dumps({"a": ONE})[:-1].encode() + b"," + json.dumps({"a": ONE})[1:].encode(), 4, "has 'a' twice"),
    "metadata": ({"__metadata__": {"a": 1}, "a": ONE}, 4, "__metadata__ is no dict of strings"),
    "no dict": ({"a": 1}, 0, "damaged at 'a'"),
    "no dtype": ({"a": {"shape": [1], "data_offsets": [0, 4]}}, 4, "damaged at 'a'"),
    "no offsets": ({"a": {"shape": [1], "dtype": "F32"}}, 4, "damaged at 'a'"),
    "three offsets": ({"a": {**ONE, "data_offsets": [0, 2, 4]}}, 4, "damaged at 'a'"),
    "half a row": ({"a": {**ONE, "shape": [1.0]}}, 4, "damaged at 'a'"),
    "a bool": ({"a": {**ONE, "shape": [True]}}, 4, "damaged at 'a'"),
    "negative": ({"a": {**ONE, "shape": [-1, -1]}}, 4, "damaged at 'a'"),
    "a huge shape": ({"a": {**ONE, "shape": [2**63]}}, 4, "damaged at 'a'"),
    "an unknown dtype": ({"a": entry(0, 4, "F6_E2M3")}, 4, "'a' has the dtype F6_E2M3, which zerox does not know"),
    "too many bytes": ({"a": entry(0, 8, shape=[1])}, 8, r"'a', F32 of shape \[1\], has 8 bytes and needs 4"),
    "backwards": ({"a": {**ONE, "data_offsets": [4, 0]}}, 4, "'a', F32 .* has -4 bytes"),
    "a hole": ({"a": ONE, "b": entry(8, 12)}, 12, "'b' begins at byte .*, and the tensor before it ends at"),
    "a hole at first": ({"a": entry(4, 8)}, 8, "'a' begins at byte"),
    "an overlap": ({"a": entry(0, 8), "b": entry(4, 12)}, 12, "'b' begins at byte"),
    "one place for two": ({"a": ONE, "b": ONE}, 4, "'b' begins at byte"),
    "cut short": ({"a": ONE}, 3, "it has .* bytes, and its tensors end at byte"),
    "longer": ({"a": ONE}, 5, "it has .* bytes, and its tensors end at byte"),
}


@pytest.mark.parametrize("name", DAMAGED)
def test_a_damaged_header_is_named(tmp_path: Path, name: str) -> None:
    given, behind, text = DAMAGED[name]
    header = given if isinstance(given, bytes) else json.dumps(given).encode()
    (tmp_path / "x").write_bytes(len(header).to_bytes(8, "little") + header + bytes(behind))
    with (
        (tmp_path / "x").open("rb", buffering=0) as file,
        pytest.raises(CheckpointError, match=rf"x is no whole safetensors file: .*({text})") as error,
    ):
        read_header(file)
    assert "\n" not in str(error.value)


def test_what_the_package_refuses_is_refused_here() -> None:
    """Of each byte of a header that is changed: nothing that it refuses is read."""
    content = bytearray(written({"a": torch.ones(3), "bc": torch.ones(2, 2, dtype=torch.int16)}))
    length = int.from_bytes(content[:8], "little")
    refused = 0
    for place in range(8, 8 + length):
        for value in (0, 32, 34, 48, 57, 65, 91, 125, 255):
            changed = bytes([*content[:place], value, *content[place + 1 :]])
            try:
                theirs = {name: t.shape for name, t in safetensors.load(changed).items()}
            except Exception:
                refused += 1
                with pytest.raises(DamagedHeader):
                    parse_header(changed[8 : 8 + length], len(changed))
                continue
            with_ours = {}
            try:
                with_ours = {
                    name: each.shape for name, each in parse_header(changed[8 : 8 + length], len(changed)).items()
                }
            except DamagedHeader:
                continue  # stricter than the package
            assert with_ours == {name: tuple(shape) for name, shape in theirs.items()}
    assert refused > 500


def test_files_that_are_too_short_for_a_header_are_named(tmp_path: Path) -> None:
    whole = written(of_every_dtype())
    for length in (0, 1, 7, 8, 9, 100, len(whole) - 1):
        (tmp_path / "x").write_bytes(whole[:length])
        with io.FileIO(tmp_path / "x") as file, pytest.raises(CheckpointError, match="x is no whole safetensors file"):
            read_header(file)


def test_a_header_of_most_bytes_is_read_and_no_longer_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "x").write_bytes(written({"a": torch.ones(3)}))
    length = int.from_bytes((tmp_path / "x").read_bytes()[:8], "little")
    with io.FileIO(tmp_path / "x") as file:
        monkeypatch.setattr(safetensors_file, "MOST_HEADER_BYTES", length)
        assert list(read_header(file)) == ["a"]
        monkeypatch.setattr(safetensors_file, "MOST_HEADER_BYTES", length - 1)
        with pytest.raises(CheckpointError, match=f"its header has {length} bytes, and may have {length - 1}"):
            read_header(file)
