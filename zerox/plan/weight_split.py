"""Which weights go into which file of a model's folder, as Hugging Face's libraries split and name them."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence

ONE = "model.safetensors"
INDEX = "model.safetensors.index.json"
OURS = re.compile(r"model(-[0-9]{5,}-of-[0-9]{5,})?\.safetensors|model\.safetensors\.index\.json")
UNITS = {
    unit + ending: base**power
    for power, unit in enumerate("KMGT", 1)
    for ending, base in (("B", 1000), ("IB", 1024))
}  # fmt: skip


def bytes_of(size: int | str) -> int:
    """Of a size as "5GB" (10**9 bytes), "500MB" or "2GiB" (2**30), or in bytes. TypeError, ValueError for others."""
    if isinstance(size, bool) or not isinstance(size, int | str):
        raise TypeError(f'{size!r} is no size: pass bytes as a number, or a string as "5GB"')
    if isinstance(size, str):
        found = re.fullmatch(r"\s*([0-9]+(?:\.[0-9]*)?)\s*([A-Za-z]+)\s*", size)
        if found is None or found[2].upper() not in UNITS:
            raise ValueError(f'{size!r} is no size: its form is "5GB", with KB, MB, GB, TB, KiB, MiB, GiB or TiB')
        size = int(float(found[1]) * UNITS[found[2].upper()])
    if size < 1:
        raise ValueError(f"a file of {size} bytes has no place for a weight: pass 1 byte or more")
    return size


def split(nbytes: Mapping[str, int], most_bytes: int) -> list[list[str]]:
    """The names that share a file, file by file, from the bytes of each.

    Greedy in the given order, as huggingface_hub's split_torch_state_dict_into_shards(): a weight of more than
    ``most_bytes`` has a file of its own, which comes before the one that was being filled.
    """
    files: list[list[str]] = []
    current: list[str] = []
    filled = 0
    for name, size in nbytes.items():
        if size > most_bytes:
            files.append([name])
            continue
        if filled + size > most_bytes:
            files.append(current)
            current, filled = [], 0
        current.append(name)
        filled += size
    return [*files, current] if current or not files else files


def name_files(count: int) -> list[str]:
    if count == 1:
        return [ONE]
    return [f"model-{number:05d}-of-{count:05d}.safetensors" for number in range(1, count + 1)]


def index_text(files: Mapping[str, Sequence[str]], total_bytes: int, total_parameters: int) -> str:
    """The index of several files, as transformers writes it. ``files``: the names of the weights in each."""
    metadata = {"total_parameters": total_parameters, "total_size": total_bytes}
    weight_map = {name: file for file, names in files.items() for name in names}
    return json.dumps({"metadata": metadata, "weight_map": weight_map}, indent=2, sort_keys=True) + "\n"
