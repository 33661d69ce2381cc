"""Files of weights that are damaged, made to do harm, or of another model: one line on all ranks, nothing changes."""

from __future__ import annotations

import errno
import json
import os
import pickle
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import zerox
from tests.checkpoint.weight_folders import write_index, write_safetensors, write_weights
from tests.kernels.shards import same_bits
from tests.ranks import run_ranks
from zerox import CheckpointError, FusedShardedAdam, load_weights
from zerox.checkpoint import weight_reader, weights
from zerox.checkpoint.records import Record
from zerox.checkpoint.weight_files import WeightFiles, find_weights

Given = tuple[Path, dict[str, Any]]  # a path, and other arguments
INDEX = "model.safetensors.index.json"
FIRST, SECOND = (f"model-0000{i}-of-00003.safetensors" for i in (1, 2))


class Net(nn.Module):
    """``a.weight`` and ``b.weight`` span ranks; the head is tied."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.a = nn.Linear(80, 90)
        self.b = nn.Linear(90, 80)
        self.norm = nn.BatchNorm1d(80)
        self.head = nn.Linear(90, 80, bias=False)
        self.head.weight = self.b.weight

    def forward(self, x: Tensor) -> Tensor:
        return (self.norm(self.b(torch.tanh(self.a(x)))) @ self.head.weight).square().mean()


def source(seed: int = 5) -> dict[str, Tensor]:
    found = {name: value.detach().clone() for name, value in Net(seed).state_dict().items()}
    del found["head.weight"]
    return found


def built(stage: int, seed: int = 1) -> tuple[Net, FusedShardedAdam]:
    model = Net(seed)
    return model, FusedShardedAdam(model.named_parameters(), lr=1e-2, stage=stage, bucket_cap_mb=0.02)


def step(model: Net, optimizer: FusedShardedAdam, rank: int, number: int) -> None:
    model(torch.randn(8, 80, generator=torch.Generator().manual_seed(10 * number + rank))).backward()
    optimizer.step()
    optimizer.zero_grad()


def everything(model: nn.Module, optimizer: FusedShardedAdam) -> list[Tensor]:
    kept = [t for b in optimizer.inside.buckets for s in b.state.values() for t in s.tensors().values()]
    return [each.detach().clone() for each in (*model.state_dict().values(), *kept)]


# ---- what is damaged: each function makes it in a folder


def several(folder: Path) -> Path:
    return write_weights("several", source(), folder / "several")


def cut(folder: Path, file: str = SECOND, nbytes: int = -1) -> Given:
    path = several(folder)
    content = (path / file).read_bytes()
    (path / file).write_bytes(content[:nbytes])
    return path, {}


def longer(folder: Path) -> Given:
    path = several(folder)
    with (path / FIRST).open("ab") as file:
        file.write(b"x")
    return path, {}


def without(folder: Path, file: str) -> Given:
    path = several(folder)
    (path / file).unlink()
    return path, {}


def mapped(folder: Path, change: Callable[[dict[str, Any]], object]) -> Given:
    path = several(folder)
    content = json.loads((path / INDEX).read_text())
    change(content["weight_map"])
    (path / INDEX).write_text(json.dumps(content))
    return path, {}


def outside(folder: Path, name: str) -> Given:
    """The file is there, and fits."""
    path, _ = mapped(folder, lambda of: of.update({"a.bias": name.format(folder=folder)}))
    write_safetensors({"a.bias": source()["a.bias"]}, folder / "elsewhere.safetensors")
    return path, {}


def linked(folder: Path) -> Given:
    path = several(folder)
    (path / FIRST).rename(folder / "elsewhere.safetensors")
    (path / FIRST).symlink_to(folder / "elsewhere.safetensors")
    return path, {}


def index_of(content: str | bytes) -> Callable[[Path], Given]:
    def make(folder: Path) -> Given:
        path = several(folder)
        (path / INDEX).write_bytes(content if isinstance(content, bytes) else content.encode())
        return path, {}

    return make


def in_two_files(folder: Path) -> Given:
    path = several(folder)
    write_safetensors({"a.bias": source()["a.bias"], "b.bias": source()["b.bias"]}, path / "more.safetensors")
    content = json.loads((path / INDEX).read_text())["weight_map"]
    write_index(path / INDEX, {**content, "b.bias": "more.safetensors"})
    return path, {}


def replaced_by(folder: Path, make: Callable[[Path], object]) -> Given:
    path = several(folder)
    (path / FIRST).unlink()
    make(path / FIRST)
    return path, {}


class Harm:
    def __reduce__(self) -> Any:
        return os.mkdir, ("harm was done",)


def of_torch(content: Any) -> Callable[[Path], Given]:
    def make(folder: Path) -> Given:
        folder.mkdir(exist_ok=True)
        torch.save(content() if callable(content) else content, folder / "x.pt")
        return folder / "x.pt", {}

    return make


def torch_cut(folder: Path) -> Given:
    path = write_weights("torch", source(), folder / "torch")
    path.write_bytes(path.read_bytes()[:-100])
    return path, {}


def torch_old(folder: Path) -> Given:
    folder.mkdir(exist_ok=True)
    torch.save(source(), folder / "old.bin", _use_new_zipfile_serialization=False)
    return folder / "old.bin", {}


def a_pickle(folder: Path) -> Given:
    folder.mkdir(exist_ok=True)
    (folder / "x.pt").write_bytes(pickle.dumps(Harm()))
    return folder / "x.pt", {}


def checkpoint(folder: Path) -> Path:
    model = Net(5)
    zerox.save(folder / "x", model, FusedShardedAdam(model.named_parameters(), process_group="alone"))
    return folder / "x"


def checkpoint_cut(folder: Path) -> Given:
    path = checkpoint(folder)
    data = next(path.glob("*.distcp"))
    data.write_bytes(data.read_bytes()[:-1])
    return path, {}


def checkpoint_other(folder: Path) -> Given:
    """Its manifest fits the damage, as if a disk had made it: the archive of a tensor is gone."""
    path = checkpoint(folder)
    data = next(path.glob("*.distcp"))
    data.write_bytes(bytes(data.stat().st_size))
    return path, {}


def changed(change: Callable[[dict[str, Tensor]], object]) -> Callable[[Path], Given]:
    def make(folder: Path) -> Given:
        tensors = source()
        change(tensors)
        return write_weights("several", tensors, folder / "several"), {}

    return make


def renaming(rename: Any) -> Callable[[Path], Given]:
    return lambda folder: (several(folder), {"rename": rename})


def made(name: str, make: Callable[[Path], object]) -> Callable[[Path], Given]:
    def found(folder: Path) -> Given:
        folder.mkdir(exist_ok=True)
        make(folder / name)
        return folder / name, {}

    return found


NO_WHOLE = "is no whole safetensors file: "
DAMAGES: dict[str, tuple[Callable[[Path], Given], str]] = {
    "cut short": (cut, rf"{SECOND} {NO_WHOLE}it has \d+ bytes, and its tensors end at byte \d+"),
    "cut in the header": (lambda f: cut(f, FIRST, 40), rf"{FIRST} {NO_WHOLE}it has 40 bytes, and a header of"),
    "empty": (lambda f: cut(f, FIRST, 0), rf"{FIRST} {NO_WHOLE}it has 0 bytes"),
    "longer": (longer, rf"{FIRST} {NO_WHOLE}"),
    "a file is missing": (lambda f: without(f, FIRST), rf"No such file or directory: '.*{FIRST}'"),
    "no index": (lambda f: without(f, INDEX), "holds model-00001.*, and none of model.safetensors, "),
    "upwards": (lambda f: outside(f, "../elsewhere.safetensors"), r"names a file '../elsewhere.safetensors', which is"),
    "absolute": (lambda f: outside(f, "{folder}/elsewhere.safetensors"), "names a file '/.*', which is not in that"),
    "down and up": (lambda f: outside(f, "x/../../elsewhere.safetensors"), "names a file 'x/../../elsewhere"),
    "no name": (lambda f: outside(f, ""), "names a file '', which is not in that folder"),
    "a link": (linked, rf"{FIRST} is a link to .*elsewhere.safetensors, outside of that folder"),
    "a loop": (lambda f: replaced_by(f, lambda p: p.symlink_to(p.name)), "Too many levels of symbolic links"),
    "a pipe": (lambda f: replaced_by(f, os.mkfifo), "it is no regular file"),
    "a folder": (lambda f: replaced_by(f, Path.mkdir), "Is a directory"),
    "index no JSON": (index_of('{"weight_map": '), f"{INDEX} is damaged"),
    "index no text": (index_of(b"\xff\xfe"), f"{INDEX} is damaged"),
    "index deep": (index_of("[" * 100_000), f"{INDEX} is damaged"),
    "index of nothing": (index_of("{}"), f"{INDEX} has no 'weight_map'"),
    "index a list": (index_of("[]"), f"{INDEX} has no 'weight_map'"),
    "index of no names": (index_of('{"weight_map": {}}'), "'weight_map' has no names"),
    "index of numbers": (index_of('{"weight_map": {"a.bias": 3}}'), "something else than names of files"),
    "index twice": (index_of(f'{{"weight_map": {{"a.bias": "{FIRST}", "a.bias": "{SECOND}"}}}}'), "has 'a.bias' twice"),
    "index of another file": (
        lambda f: mapped(f, lambda of: of.update({"a.weight": SECOND})),
        rf"{SECOND} does not have 'a.weight', which the index says is there",
    ),
    "index of more": (
        lambda f: mapped(f, lambda of: of.update(x=FIRST)),
        f"{FIRST} does not have 'x', which the index",
    ),
    "index of less": (
        lambda f: mapped(f, lambda of: of.pop("a.weight")),
        "has a.weight, which the index does not list",
    ),
    "in two files": (in_two_files, "both have 'a.bias'"),
    "nothing there": (lambda f: (f / "org" / "model", {}), r"nothing is there, .*snapshot_download\('.*org/model'\)"),
    "a model of the Hub": (lambda f: (Path("org/model"), {}), r"nothing is there, .*snapshot_download\('org/model'\)"),
    "an empty folder": (made("x", Path.mkdir), "x is empty, and none of model.safetensors"),
    "a pipe alone": (made("x", os.mkfifo), "it is no regular file"),
    "a device": (lambda f: (Path("/dev/zero"), {}), "it is no regular file"),
    "an empty file": (made("x.pt", Path.touch), "x.pt was not written by torch.save"),
    "a text": (made("x.txt", lambda p: p.write_text("hello " * 99)), "x.txt was not written by torch.save"),
    "torch cut short": (torch_cut, "weights.pt was not written by torch.save"),
    "torch's old format": (torch_old, "old.bin is in torch's old format"),
    "code": (of_torch(lambda: {"a.bias": torch.ones(3), "x": Harm()}), "asks for posix.mkdir, and zerox neither makes"),
    "a plain pickle": (a_pickle, "x.pt "),
    "a training's file": (of_torch(lambda: {"model": source(), "step": 3}), r"but 'model', 'step': save the one"),
    "a list": (of_torch(lambda: [torch.ones(3)]), "has a list, and is to have a model's state_dict"),
    "numbers as names": (of_torch(lambda: {3: torch.ones(3)}), "has a dict, and is to have a model's state_dict"),
    "a sparse tensor": (
        of_torch(lambda: {"a.bias": torch.eye(3).to_sparse()}),
        "has 'a.bias' as a Tensor of torch.spa",
    ),
    "a checkpoint cut": (checkpoint_cut, r"distcp of the checkpoint has \d+ bytes instead of"),
    "a checkpoint's other": (checkpoint_other, r"distcp does not have .*: at byte \d+ there is no tensor"),
    "two become one": (renaming({"a.weight": "b.weight"}), "rename makes one name of 'a.weight' and 'b.weight'"),
    "renamed to a number": (renaming(lambda name: 3), "rename makes 3 of '.*', which is no name and not None"),
    "renames another": (renaming({"c": "a"}), "rename has 'c', and the files have no tensor of that name"),
    "a broken rename": (renaming(lambda name: name[99]), "IndexError"),
    "missing": (changed(lambda t: (t.pop("a.bias"), t.pop("b.weight"))), "Error"),
    "missing and unexpected": (renaming({"a.bias": "c"}), "Error"),
    "misshapen": (changed(lambda t: t.update({"a.bias": torch.ones(91), "c": torch.ones(2)})), "Error"),
    "complex": (
        changed(lambda t: t.update({"a.bias": torch.ones(90, dtype=torch.complex64)})),
        "dtype mismatch for a.",
    ),
}
OF_NAMES = ("missing", "missing and unexpected", "misshapen", "complex")


def load_each(rank: int, size: int, given: dict[str, Given], stage: int) -> tuple[dict[str, str], bool, list[Tensor]]:
    """What each raised, whether nothing changed, and a step afterwards."""
    model, optimizer = built(stage)
    step(model, optimizer, rank, 0)
    before, said = everything(model, optimizer), {}
    for name, (path, arguments) in given.items():
        with pytest.raises(CheckpointError) as error:
            load_weights(optimizer, path, **arguments)
        said[name] = str(error.value)
        assert all(map(same_bits, everything(model, optimizer), before)), name
    is_same = all(map(same_bits, everything(model, optimizer), before))
    step(model, optimizer, rank, 1)
    return said, is_same, everything(model, optimizer)


PICKLED = [name for name in DAMAGES if "renamed" not in name and name != "a broken rename"]  # a function can't be sent


def test_damage_is_one_line_and_changes_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    given = {name: make(tmp_path / str(i)) for i, (name, (make, _)) in enumerate(DAMAGES.items())}
    said, is_same, ended = load_each(0, 1, given, 2)
    assert is_same
    for name, text in said.items():
        assert text.startswith(f"zerox: {given[name][0]} could not be loaded: "), text
        assert re.search(DAMAGES[name][1], text), (name, text)
        assert "\n" not in text or name in OF_NAMES, text
    assert not (tmp_path / "harm was done").exists()
    model, optimizer = built(2)
    for number in range(2):
        step(model, optimizer, 0, number)
    assert all(map(same_bits, ended, everything(model, optimizer)))


@pytest.mark.parametrize("stage", [1, 3])
def test_ranks_have_one_line(tmp_path: Path, stage: int) -> None:
    given = {name: DAMAGES[name][0](tmp_path / str(i)) for i, name in enumerate(PICKLED)}
    found = run_ranks(load_each, 3, given, stage)
    for said, is_same, _ in found:
        assert is_same
        assert said == found[0][0]
        for name, text in said.items():
            assert re.match(rf"zerox: {given[name][0]} could not be loaded on rank \d: ", text), text
            assert re.search(DAMAGES[name][1], text), (name, text)
            assert "\n" not in text or name in OF_NAMES, text


@pytest.mark.parametrize("name", OF_NAMES[:3])
def test_names_and_shapes_are_told_in_torchs_words(tmp_path: Path, name: str) -> None:
    path, arguments = DAMAGES[name][0](tmp_path)
    model, optimizer = built(2)
    with pytest.raises(CheckpointError) as ours:
        load_weights(optimizer, path, **arguments)
    tensors: dict[str, Tensor] = {}
    for file in path.glob("*.safetensors"):
        from safetensors.torch import load_file

        tensors |= load_file(file)
    tensors = {arguments.get("rename", {}).get(n, n): value for n, value in tensors.items()}
    if "b.weight" in tensors:
        tensors["head.weight"] = tensors["b.weight"]
    with pytest.raises(RuntimeError) as theirs:
        model.load_state_dict(tensors)
    assert str(ours.value) == f"zerox: {path} could not be loaded: {theirs.value}"


def test_without_strict_the_rest_is_loaded_and_names_are_returned(tmp_path: Path) -> None:
    path, arguments = renaming({"a.bias": "c", "b.bias": None})(tmp_path)
    model, optimizer = built(2)
    kept = {name: model.state_dict()[name].clone() for name in ("a.bias", "b.bias")}
    bent, _ = DAMAGES["misshapen"][0](tmp_path / "bent")
    with pytest.raises(
        CheckpointError, match=r"loading state_dict for Net:\n\tsize mismatch for a[.]bias: copying a param with"
    ):
        load_weights(optimizer, bent, strict=False)  # as torch
    keys = load_weights(optimizer, path, strict=False, **arguments)
    assert keys == (["a.bias", "b.bias"], ["c"])
    assert (keys.missing_keys, keys.unexpected_keys) == (keys[0], keys[1])
    for name, value in model.state_dict().items():
        assert torch.equal(value, kept[name] if name in kept else source()[name.replace("head", "b")]), name


def test_torchs_old_files_lack_counts_of_batches(tmp_path: Path) -> None:
    path, _ = changed(lambda t: t.pop("norm.num_batches_tracked"))(tmp_path)
    model, optimizer = built(2)
    assert load_weights(optimizer, path) == ([], [])
    tensors = source()
    del tensors["norm.num_batches_tracked"]
    model.load_state_dict({**tensors, "head.weight": tensors["b.weight"]})


# ---- links, folders, and files that differ over ranks


@pytest.mark.parametrize("inside", ["abc", "abc/text_encoder"])
def test_links_of_the_hubs_cache_are_followed(tmp_path: Path, inside: str) -> None:
    cache = tmp_path / "models--org--model"
    written = several(tmp_path)
    (cache / "blobs").mkdir(parents=True)
    (cache / "snapshots" / inside).mkdir(parents=True)
    up = "../" * (2 + inside.count("/"))
    for number, file in enumerate(sorted(written.iterdir())):
        file.rename(cache / "blobs" / str(number))
        (cache / "snapshots" / inside / file.name).symlink_to(f"{up}blobs/{number}")
    model, optimizer = built(2)
    load_weights(optimizer, cache / "snapshots" / inside)
    assert torch.equal(model.a.weight, source()["a.weight"])
    (cache / "blobs").rename(tmp_path / "blobs")
    (cache / "blobs").symlink_to(tmp_path / "blobs")
    with pytest.raises(CheckpointError, match=r"is a link to .*, outside of that folder"):
        load_weights(optimizer, cache / "snapshots" / inside)


def test_a_path_that_is_a_link_is_followed(tmp_path: Path) -> None:
    file = write_weights("safetensors", source(), tmp_path / "there")
    (tmp_path / "file").symlink_to(file)
    (tmp_path / "folder").symlink_to(several(tmp_path))
    (tmp_path / "index.json").write_text("")
    for path in (tmp_path / "file", str(tmp_path / "folder"), tmp_path / "folder" / INDEX):
        model, optimizer = built(2)
        load_weights(optimizer, path)
        assert torch.equal(model.b.weight, source()["b.weight"])


def test_one_file_comes_before_an_index(tmp_path: Path) -> None:
    path = several(tmp_path)
    write_safetensors(source(6), path / "model.safetensors")
    torch.save(source(7), path / "pytorch_model.bin")
    for seed, file in ((6, "model.safetensors"), (5, INDEX), (7, "pytorch_model.bin")):
        model, optimizer = built(2)
        load_weights(optimizer, path)
        assert torch.equal(model.b.weight, source(seed)["b.weight"])
        (path / file).unlink()


def test_of_a_tied_weight_the_last_name_counts_as_in_torch(tmp_path: Path) -> None:
    tensors = {**source(), "head.weight": torch.randn(80, 90)}
    write_safetensors(tensors, tmp_path / "x")
    model, optimizer = built(2)
    load_weights(optimizer, tmp_path / "x")
    twin = Net(1)
    twin.load_state_dict(tensors)
    assert all(map(torch.equal, model.state_dict().values(), twin.state_dict().values()))


def load_where_it_is(rank: int, _: int, folders: list[str], name: str) -> str:
    """As on two machines: where rank 0 has the first folder, rank 1 has the second one."""

    class Elsewhere(weight_reader.WeightReader):
        def __init__(self, seen: WeightFiles) -> None:
            super().__init__(seen._replace(folder=Path(folders[1])) if rank == 1 else seen)

    model, optimizer = built(3)
    before, path = everything(model, optimizer), f"{folders[0]}/{name}"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(weights, "WeightReader", Elsewhere)
        try:
            load_weights(optimizer, path)
        except CheckpointError as error:
            assert all(map(same_bits, everything(model, optimizer), before))
            return str(error)
    assert same_bits(model.a.weight.detach(), source()["a.weight"])
    return ""


@pytest.mark.parametrize("kind", ["safetensors", "torch"])
def test_what_is_not_the_same_on_all_ranks_is_told(tmp_path: Path, kind: str) -> None:
    file = write_weights(kind, source(), tmp_path / "0").name
    (tmp_path / "none").mkdir()
    write_weights(kind, source(), tmp_path / "copy")
    other = {**source(), "c": torch.ones(3)}
    del other["a.weight"]
    write_weights(kind, other, tmp_path / "other")
    swapped = source()
    swapped["a.weight"], swapped["b.weight"] = swapped["b.weight"], swapped["a.weight"]
    write_weights(kind, swapped, tmp_path / "swapped")
    (tmp_path / "linked").mkdir()
    (tmp_path / "linked" / file).symlink_to(tmp_path / "copy" / file)
    for where, text in (
        ("linked", "on rank 1: .*is a link to .*copy.*, outside of that folder"),
        ("none", "on rank 1: FileNotFoundError"),
        ("other", "on rank 1: .*(bytes here, and|has another '.*' here)"),
        ("swapped", "on rank 1: .*(has other tensors here than on rank 0|has another '.*' here)"),
        ("copy", "^$"),
    ):
        found = run_ranks(load_where_it_is, 2, [str(tmp_path / "0"), str(tmp_path / where)], file)
        assert found[0] == found[1]
        assert re.search(text, found[0]), (where, found[0])


def save_and_copy(rank: int, _: int, folder: str) -> None:
    model, optimizer = built(3)
    load_weights(optimizer, f"{folder}/source/weights.pt")
    zerox.save(f"{folder}/0", model, optimizer)
    if rank == 0:
        shutil.copytree(f"{folder}/0", f"{folder}/copy")


def count_looks(rank: int, size: int, folders: list[str]) -> tuple[int, int]:
    """Files of a checkpoint that rank 1 has elsewhere, and how often it looked through all of that."""
    looks = []
    find = weight_reader.find_weights
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(weight_reader, "find_weights", lambda path: looks.append(path) or find(path))
        assert load_where_it_is(rank, size, folders, "") == ""
    assert all(path == Path(folders[1]) for path in looks)
    return len(list(Path(folders[1]).glob("*.distcp"))), len(looks)


def test_a_checkpoint_on_another_machine_is_looked_through_once(tmp_path: Path) -> None:
    write_weights("torch", source(), tmp_path / "source")
    run_ranks(save_and_copy, 3, str(tmp_path))
    here, there = run_ranks(count_looks, 2, [str(tmp_path / "0"), str(tmp_path / "copy")])
    assert here[1] == 0
    assert there[0] >= 3
    assert there[1] == 1


def load_relative(rank: int, _: int, folder: str, path: str) -> None:
    model, optimizer = built(3)
    now = os.getcwd()
    if rank == 0:
        os.chdir(folder)
    try:
        load_weights(optimizer, path)
    finally:
        os.chdir(now)
    assert same_bits(model.a.weight.detach(), source()["a.weight"])


@pytest.mark.parametrize("kind", ["several", "several of torch"])
def test_a_relative_path_is_rank_0s(tmp_path: Path, kind: str) -> None:
    write_weights(kind, source(), tmp_path / "x")
    run_ranks(load_relative, 2, str(tmp_path), "x")


# ---- a disk that fails while it is read


def fail_midway(rank: int, size: int, path: str, stage: int, victim: int) -> tuple[list[str], list[Tensor]]:
    model, optimizer = built(stage)
    step(model, optimizer, rank, 0)
    said = []
    state = optimizer.state_dict()
    with pytest.MonkeyPatch.context() as patch:
        if rank == victim:
            preadv, counts = os.preadv, iter(range(99))

            def fail(*args: Any) -> int:
                if next(counts) == 1:
                    raise OSError(errno.EIO, "Input/output error")
                return preadv(*args)

            patch.setattr(weight_reader.os, "preadv", fail)
        for call in (
            lambda: load_weights(optimizer, path),
            lambda: step(model, optimizer, rank, 1),
            lambda: zerox.save(f"{path} saved", model, optimizer),
        ):
            with pytest.raises(RuntimeError) as error:
                call()
            said.append(str(error.value))
            optimizer.zero_grad()  # or the step that raised would raise again
    optimizer.load_state_dict(state)  # has no parameters: it is no way out
    one = next(iter(find_weights(Path(path)).tensors))
    load_weights(optimizer, path, strict=False, rename=lambda name: name if name == one else None)  # nor is this
    for call in (lambda: step(model, optimizer, rank, 1), lambda: zerox.save_weights(optimizer, f"{path} saved")):
        with pytest.raises(RuntimeError, match="could not be read to its end"):
            call()
        optimizer.zero_grad()
    load_weights(optimizer, path)
    step(model, optimizer, rank, 1)
    return said, everything(model, optimizer)


@pytest.mark.parametrize(("size", "stage"), [(1, 2), (2, 1), (2, 3)])
def test_a_disk_that_fails_midway_is_told_until_weights_are_loaded_anew(tmp_path: Path, size: int, stage: int) -> None:
    path = str(several(tmp_path))
    found = run_ranks(fail_midway, size, path, stage, size - 1)
    for said, _ in found:
        where = "" if size == 1 else rf" on rank {size - 1}"
        part = rf"zerox: {path} could not be read to its end, and parameters have a part of it"
        assert re.match(rf"{part}{where}: OSError: .*Input/output error", said[0])
        assert re.search(part + r": call zerox.load_weights\(\) or zerox.load\(\) again", said[1])
        assert re.search(part, said[2])
    good = run_ranks(load_after_a_step, size, path, stage)
    for (_, ours), theirs in zip(found, good, strict=True):
        assert all(map(same_bits, ours, theirs))


def load_after_a_step(rank: int, size: int, path: str, stage: int) -> list[Tensor]:
    model, optimizer = built(stage)
    step(model, optimizer, rank, 0)
    load_weights(optimizer, path)
    step(model, optimizer, rank, 1)
    return everything(model, optimizer)


# ---- a folder of zerox.save() in which bytes have changed


def save_here(rank: int, size: int, path: str, stage: int) -> None:
    model, optimizer = built(stage, 5)
    zerox.save(path, model, optimizer)


def load_changed(rank: int, size: int, path: str, stage: int) -> tuple[str, int, int]:
    """What a load said, how many of this rank's reads were of whole records, and how many there were."""
    _, optimizer = built(stage)
    seen: list[weight_reader.Read] = []
    run, said = weight_reader.WeightReader._run, ""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(weight_reader.WeightReader, "_run", lambda self, read: (seen.append(read), run(self, read)))
        try:
            load_weights(optimizer, path)
        except CheckpointError as error:
            said = str(error)
    return said, sum(read.crc != 0 for read in seen), len(seen)


@pytest.mark.parametrize(("savers", "stage", "loaders", "to_stage"), [(1, 2, 1, 3), (3, 3, 1, 2), (2, 3, 2, 3)])
def test_records_that_are_read_whole_are_as_they_were_written(
    tmp_path: Path, savers: int, stage: int, loaders: int, to_stage: int
) -> None:
    path = tmp_path / "x"
    run_ranks(save_here, savers, str(path), stage)
    for said, whole, count in run_ranks(load_changed, loaders, str(path), to_stage):
        assert not said
        assert whole == count > 0
    tensors = find_weights(path).tensors
    for stored, chunk in ((tensors[name], chunk) for name in ("a.weight", "b.bias") for chunk in tensors[name].chunks):
        file = path / chunk.file
        content, nbytes = file.read_bytes(), torch.Size(chunk.sizes).numel() * stored.dtype.itemsize
        with file.open("rb", buffering=0) as stream:
            start = chunk.start + Record(stream, chunk.start, chunk.record).elements(nbytes)
        last = start + nbytes - 1
        file.write_bytes(content[:last] + bytes([content[last] ^ 1]) + content[last + 1 :])
        found = [said for said, _, _ in run_ranks(load_changed, loaders, str(path), to_stage)]
        assert found == found[:1] * loaders
        assert re.search(f"{file} was changed after it was written, between bytes {start} and {last + 1}$", found[0])
        assert "could not be read to its end, and parameters have a part of it" in found[0]
        file.write_bytes(content)


def test_records_that_are_read_in_parts_are_not_compared(tmp_path: Path) -> None:
    """A changed byte is not found in one that several ranks read."""
    path = tmp_path / "x"
    run_ranks(save_here, 1, str(path), 2)
    stored = find_weights(path).tensors["a.weight"]
    [chunk] = stored.chunks
    content, nbytes = (path / chunk.file).read_bytes(), torch.Size(chunk.sizes).numel() * stored.dtype.itemsize
    with (path / chunk.file).open("rb", buffering=0) as stream:
        start = chunk.start + Record(stream, chunk.start, chunk.record).elements(nbytes)
    (path / chunk.file).write_bytes(content[:start] + bytes([content[start] ^ 1]) + content[start + 1 :])
    for said, whole, count in run_ranks(load_changed, 2, str(path), 3):
        assert not said
        assert whole < count


def test_records_without_checksums_are_read(tmp_path: Path) -> None:
    torch.serialization.set_crc32_options(False)
    try:
        save_here(0, 1, str(tmp_path / "x"), 2)
    finally:
        torch.serialization.set_crc32_options(True)
    said, whole, count = load_changed(0, 1, str(tmp_path / "x"), 2)
    assert not said
    assert whole == 0 < count
