"""Files of torch.save() are read by ranges: also tensors that lie in odd ways, and files that were changed."""

from __future__ import annotations

import os
import re
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.checkpoint.test_damaged_weights import built, source
from tests.checkpoint.weight_folders import write_weights
from tests.checkpoint.weights import contents
from tests.kernels.shards import same_bits
from tests.ranks import run_ranks
from zerox import CheckpointError, FusedShardedAdam, load_weights
from zerox.checkpoint import weights
from zerox.checkpoint.manifest import open_regular
from zerox.checkpoint.torch_file import read_torch


def lying_oddly() -> dict[str, Tensor]:
    """Views of larger storages and of shared ones, in any order of dimensions, and in other dtypes than the model."""
    generator = torch.Generator().manual_seed(4)
    drawn = torch.randn(40, 30, 6, generator=generator)
    table = torch.randn(50, 64, generator=generator)
    return {
        "plain": drawn[0].clone(),
        "behind": table[7:19],
        "transposed": table.t(),
        "turned": drawn.permute(1, 2, 0),
        "channels": torch.randn(4, 8, 5, 6, generator=generator).to(memory_format=torch.channels_last),
        "columns": table[:, 3:41],
        "every_third": table[::2, 1::3],
        "expanded": drawn[3, :, 0].expand(17, 30),
        "expanded_behind": drawn[3, :, :1].expand(30, 17),
        "overlapping": drawn.as_strided((20, 9), (4, 1), 5),
        "narrow": drawn[:, 4:5, 2:3],
        "short": torch.randn(33, 5, generator=generator).bfloat16().t(),
        "number": torch.tensor(3.25),
        "param": nn.Parameter(torch.randn(9, 11, generator=generator)),
        "none": torch.empty(0, 4),
    }


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        for name, value in lying_oddly().items():
            made = torch.zeros(value.shape)
            if name == "channels":
                made = made.to(memory_format=torch.channels_last)
            self.register_parameter(name, nn.Parameter(made))


def load_oddly(rank: int, _: int, path: str, stage: int) -> dict[str, Tensor]:
    model = Model()
    load_weights(FusedShardedAdam(model.named_parameters(), stage=stage, bucket_cap_mb=0.01), path)
    return contents(model)


@pytest.mark.parametrize(("size", "stage"), [(1, 2), (2, 3), (3, 1)])
def test_tensors_that_lie_in_any_way_are_read(tmp_path: Path, size: int, stage: int) -> None:
    torch.save(lying_oddly(), tmp_path / "x.pt")
    for found in run_ranks(load_oddly, size, str(tmp_path / "x.pt"), stage):
        for name, value in lying_oddly().items():
            assert same_bits(found[name].contiguous(), value.detach().float().contiguous()), name


def test_where_elements_were_saved_from_does_not_matter(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.serialization, "location_tag", lambda storage: "cuda:0")
    torch.save(source(), tmp_path / "x.pt")
    model, optimizer = built(2)
    load_weights(optimizer, tmp_path / "x.pt")
    assert all(same_bits(value.detach().clone(), source()[name]) for name, value in model.named_parameters())


# ---- files that are not as torch writes them


Change = Callable[[zipfile.ZipInfo, bytes], bytes | None]


def repacked(path: Path, change: Change, how: int = zipfile.ZIP_STORED) -> None:
    with zipfile.ZipFile(path) as old:
        members = [(each, old.read(each)) for each in old.infolist()]
    with zipfile.ZipFile(path, "w", how) as new:
        for each, content in members:
            if (changed := change(each, content)) is not None:
                new.writestr(each.filename, changed)


def ends_with(name: str, new: Callable[[bytes], bytes | None]) -> Change:
    return lambda member, content: new(content) if member.filename.endswith(name) else content


def same(_: zipfile.ZipInfo, content: bytes) -> bytes:
    return content


NOT_AS_WRITTEN = "does not have the [0-9]+ bytes of '.*' as torch.save.. writes them"
DAMAGES: dict[str, tuple[Callable[[Path], None], str]] = {
    "compressed": (lambda path: repacked(path, same, zipfile.ZIP_DEFLATED), NOT_AS_WRITTEN),
    "a short record": (lambda path: repacked(path, ends_with("data/0", lambda b: b[:-4])), NOT_AS_WRITTEN),
    "another order of bytes": (
        lambda path: repacked(path, ends_with("byteorder", lambda _: b"big")),
        "was written on a machine with another order of bytes",
    ),
    "conjugated": (
        lambda path: torch.save({"x": torch.ones(3, dtype=torch.complex64).conj()}, path),
        "has 'x' as a view that conjugates or negates",
    ),
    "on meta": (
        lambda path: torch.save({"x": torch.ones(3, device="meta")}, path),
        "does not have the 12 bytes of 'x'",
    ),
}


@pytest.mark.parametrize("name", DAMAGES)
def test_what_torch_does_not_write_is_refused_by_name(tmp_path: Path, name: str) -> None:
    path = write_weights("torch", source(), tmp_path / "x")
    damage, text = DAMAGES[name]
    damage(path)
    model, optimizer = built(2)
    before = contents(model)
    with pytest.raises(CheckpointError, match=f"could not be loaded: {re.escape(str(path))} {text}"):
        load_weights(optimizer, path)
    assert all(map(same_bits, contents(model).values(), before.values()))


def test_an_archive_that_was_packed_anew_is_read_where_its_records_are(tmp_path: Path) -> None:
    """Without torch's alignment. Where torch's file does not say its version torch looks, and does not count."""
    path = write_weights("torch", source(), tmp_path / "x")
    repacked(path, ends_with(".format_version", lambda _: None))
    model, optimizer = built(2)
    load_weights(optimizer, path)
    assert all(same_bits(value.detach().clone(), source()[name]) for name, value in model.named_parameters())


def test_elements_are_not_read_to_find_out_where_they_are(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    torch.save({"x": torch.ones(3 * 2**20)}, tmp_path / "x.pt")
    seen, preadv = [], os.preadv

    def count(*args: Any) -> int:
        seen.append(found := preadv(*args))
        return found

    monkeypatch.setattr(os, "preadv", count)
    with open_regular(tmp_path / "x.pt") as file:
        entries, others = read_torch(file)
    assert (entries["x"].shape, others) == ((3 * 2**20,), [])
    assert 0 < sum(seen) < 2**18


# ---- a file that is cut while it is read


def cut_midway(rank: int, size: int, path: str, stage: int) -> str:
    """By somebody else, once all ranks have looked at it."""
    _, optimizer = built(stage)
    with pytest.MonkeyPatch.context() as patch:
        bring_home = weights.bring_home

        def cut(*args: Any) -> None:
            bring_home(*args)
            if rank == 0:
                os.truncate(path, 4096)

        patch.setattr(weights, "bring_home", cut)
        with pytest.raises(CheckpointError) as error:
            load_weights(optimizer, path)
    return str(error.value)


@pytest.mark.parametrize(("size", "stage"), [(1, 2), (2, 1), (2, 3)])
def test_a_file_that_is_cut_while_it_is_read_is_one_line(tmp_path: Path, size: int, stage: int) -> None:
    path = write_weights("torch", source(), tmp_path / "x")
    found = run_ranks(cut_midway, size, str(path), stage)
    assert found == found[:1] * size
    assert re.match(rf"zerox: {path} could not be read to its end, and parameters have a part of it", found[0])
    assert re.search(rf"{path} ends at byte \d+, and ended later a moment ago", found[0])
    assert "\n" not in found[0]
