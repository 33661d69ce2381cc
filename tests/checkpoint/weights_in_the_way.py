"""What a save of weights must not replace: each function makes it, and returns the path and what is said."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tests.checkpoint import in_the_way
from zerox.plan.weight_split import ONE


def a_project(folder: Path) -> tuple[Path, str]:
    in_the_way.a_project(folder)
    return folder, r"holds the folders data, and a model has files only: save to another path, such as .*/model$"


def a_folder_of_a_weight_file_s_name(folder: Path) -> tuple[Path, str]:
    (folder / "x" / ONE).mkdir(parents=True)
    return folder / "x", r"holds the folders model[.]safetensors"


def a_checkpoint(folder: Path) -> tuple[Path, str]:
    return in_the_way.put(folder / "x"), r"x is a checkpoint of zerox[.]save\(\), which would not be one any more"


def a_checkpoint_that_is_aside(folder: Path) -> tuple[Path, str]:
    in_the_way.put(folder / "x").rename(folder / ".x.replaced")
    return folder / "x", r"x is a checkpoint of zerox[.]save\(\) that .*[.]x[.]replaced has"


def a_pipe_among_files(folder: Path) -> tuple[Path, str]:
    (folder / "x").mkdir()
    os.mkfifo(folder / "x" / "pipe")
    return folder / "x", r"holds pipe, which is no file"


def the_working_folder(folder: Path) -> tuple[str, str]:
    (folder / "x").mkdir()
    (folder / "x" / "config.json").write_text("{}")
    os.chdir(folder / "x")
    return ".", r"[.] is this process's working folder"


def somebody_s_folder_where_it_is_written(folder: Path) -> tuple[Path, str]:
    return in_the_way.with_somebody_s_notes(folder, ".x.weights-saving")


def a_folder_of_a_file_s_name_where_it_is_written(folder: Path) -> tuple[Path, str]:
    return in_the_way.with_a_folder_in(folder, ".x.weights-saving", ONE)


def a_link_where_it_is_written(folder: Path) -> tuple[Path, str]:
    (folder / "y").mkdir()
    (folder / ".x.weights-saving").symlink_to("y")
    return folder / "x", r"[.]x[.]weights-saving is in the way, and zerox did not make it"


def somebody_s_folder_where_the_old_one_goes(folder: Path) -> tuple[Path, str]:
    return in_the_way.with_somebody_s_notes(folder, ".x.weights-replaced")


def another_file_of_the_name_where_the_old_one_goes(folder: Path) -> tuple[Path, str]:
    """Of the folder before a save that was killed: who changed it since is not known."""
    for name, text in (("x", "mine"), (".x.weights-replaced", "older")):
        (folder / name).mkdir()
        (folder / name / "config.json").write_text(text)
    return folder / "x", r"[.]x[.]weights-replaced is zerox's own, and holds config[.]json: move that elsewhere"


def a_file(folder: Path) -> tuple[Path, str]:
    path, _ = in_the_way.a_file(folder)
    return path, r"x is a file, and a model is a folder: save to another path"


IN_THE_WAY: list[Callable[[Path], tuple[Any, str]]] = [
    a_project,
    a_folder_of_a_weight_file_s_name,
    a_checkpoint,
    a_checkpoint_that_is_aside,
    a_pipe_among_files,
    the_working_folder,
    somebody_s_folder_where_it_is_written,
    a_folder_of_a_file_s_name_where_it_is_written,
    a_link_where_it_is_written,
    somebody_s_folder_where_the_old_one_goes,
    another_file_of_the_name_where_the_old_one_goes,
    a_file,
    in_the_way.a_link_to_nothing,
    in_the_way.a_parent_that_links_to_nothing,
    in_the_way.the_root,
    in_the_way.the_empty_working_folder,
]
