"""What a save must not replace: each function makes it in a folder, and returns the path and what is said of it."""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch import nn

from zerox import FusedShardedAdam, save
from zerox.checkpoint import manifest


def small() -> tuple[nn.Module, FusedShardedAdam]:
    model = nn.Linear(3, 2)
    return model, FusedShardedAdam(model.named_parameters())


def put(path: Path, extra: Any = None) -> Path:
    save(path, *small(), extra=extra)
    return path


def a_project(folder: Path) -> tuple[Path, str]:
    (folder / "train.py").write_text("print()")
    (folder / "data").mkdir()
    return folder, r"holds data, train[.]py, which would be lost"


def a_project_by_its_dot(folder: Path) -> tuple[str, str]:
    a_project(folder)
    return f"{folder}/.", r"holds data, train[.]py, which would be lost"


def the_folder_of_checkpoints(folder: Path) -> tuple[str, str]:
    for name in ("step-100", "step-200"):
        put(folder / name)
    (folder / "notes.txt").write_text("good run")
    return f"{folder}/", r"holds notes[.]txt, step-100, step-200, which would be lost"


def a_checkpoint_with_notes(folder: Path) -> tuple[Path, str]:
    (put(folder / "x") / "notes.txt").write_text("good run")
    return folder / "x", r"is a checkpoint, and holds notes[.]txt, which .* does not list"


def a_checkpoint_with_a_folder_of_a_file_s_name(folder: Path) -> tuple[Path, str]:
    data = put(folder / "x") / "__0_0.distcp"
    data.unlink()
    data.mkdir()
    return folder / "x", r"is a checkpoint, and holds __0_0[.]distcp"


def a_checkpoint_and_another_s_file(folder: Path) -> tuple[Path, str]:
    (put(folder / "x") / "__1_0.distcp").write_bytes(b"of a run with 2 ranks")
    return folder / "x", r"is a checkpoint, and holds __1_0[.]distcp"


def a_checkpoint_of_dcp(folder: Path) -> tuple[Path, str]:
    dcp.save({"a": torch.ones(2)}, checkpoint_id=folder / "x", no_dist=True)
    return folder / "x", r"is no checkpoint: it has no zerox[.]json.* holds [.]metadata, __0_0[.]distcp"


def a_damaged_manifest(folder: Path) -> tuple[Path, str]:
    (put(folder / "x") / manifest.NAME).write_text("{}")
    return folder / "x", r"zerox[.]json is damaged.* holds [.]metadata"


def a_file(folder: Path) -> tuple[Path, str]:
    (folder / "x").write_text("mine")
    return folder / "x", r"x is a file, and a checkpoint is a folder"


def a_link_to_a_file(folder: Path) -> tuple[Path, str]:
    a_file(folder)
    (folder / "link").symlink_to("x")
    return folder / "link", r"link is a file, and a checkpoint is a folder"


def a_pipe(folder: Path) -> tuple[Path, str]:
    os.mkfifo(folder / "x")
    return folder / "x", r"x is a file, and a checkpoint is a folder"


def a_link_to_nothing(folder: Path) -> tuple[Path, str]:
    (folder / "x").symlink_to("gone")
    return folder / "x", r"x is a link to gone, which does not exist: make that folder"


def a_parent_that_links_to_nothing(folder: Path) -> tuple[Path, str]:
    (folder / "disk").symlink_to("gone")
    return folder / "disk" / "x", r"disk is a link to gone, which does not exist"


def a_link_to_itself(folder: Path) -> tuple[Path, str]:
    (folder / "x").symlink_to("x")
    return folder / "x", r"x is a link to x, which does not exist"


def the_root(_: Path) -> tuple[str, str]:
    return "/", r"/ is the root of a file system"


def the_empty_working_folder(folder: Path) -> tuple[str, str]:
    (folder / "here").mkdir()
    os.chdir(folder / "here")
    return ".", r"[.] is this process's working folder"


def a_checkpoint_that_is_the_working_folder(folder: Path) -> tuple[str, str]:
    os.chdir(put(folder / "x"))
    return "", r"is this process's working folder"


def with_somebody_s_notes(folder: Path, name: str) -> tuple[Path, str]:
    (folder / name).mkdir()
    (folder / name / "notes.txt").write_text("mine")
    return folder / "x", rf"{re.escape(name)} is zerox's own, and holds notes[.]txt: move that elsewhere"


def with_a_folder_in(folder: Path, name: str, of: str) -> tuple[Path, str]:
    (folder / name / of).mkdir(parents=True)
    return folder / "x", rf"{re.escape(name)} is zerox's own, and holds {re.escape(of)}: move that elsewhere"


def somebody_s_folder_where_it_is_written(folder: Path) -> tuple[Path, str]:
    return with_somebody_s_notes(folder, ".x.saving")


def a_folder_of_a_file_s_name_where_it_is_written(folder: Path) -> tuple[Path, str]:
    return with_a_folder_in(folder, ".x.saving", manifest.NAME)


def a_link_where_it_is_written(folder: Path) -> tuple[Path, str]:
    (put(folder / "y") / manifest.NAME).unlink()
    (folder / ".x.saving").symlink_to("y")
    return folder / "x", r"[.]x[.]saving is in the way, and zerox did not make it"


def somebody_s_folder_where_the_old_one_goes(folder: Path) -> tuple[Path, str]:
    (put(folder / "x").rename(folder / ".x.replaced") / "notes.txt").write_text("mine")
    return folder / "x", r"[.]x[.]replaced is zerox's own, and holds notes[.]txt"


IN_THE_WAY: list[Callable[[Path], tuple[Any, str]]] = [
    a_project,
    a_project_by_its_dot,
    the_folder_of_checkpoints,
    a_checkpoint_with_notes,
    a_checkpoint_with_a_folder_of_a_file_s_name,
    a_checkpoint_and_another_s_file,
    a_checkpoint_of_dcp,
    a_damaged_manifest,
    a_file,
    a_link_to_a_file,
    a_pipe,
    a_link_to_nothing,
    a_parent_that_links_to_nothing,
    a_link_to_itself,
    the_root,
    the_empty_working_folder,
    a_checkpoint_that_is_the_working_folder,
    somebody_s_folder_where_it_is_written,
    a_folder_of_a_file_s_name_where_it_is_written,
    a_link_where_it_is_written,
    somebody_s_folder_where_the_old_one_goes,
]
