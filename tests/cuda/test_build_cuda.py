"""The nvcc step of the build: which nvcc, for which GPUs, what is compiled again, and what is said when it can't be."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

import build_cuda
from build_cuda import BuildError, NoCuda, choose_archs, gencode, open_toolkit
from tests.cuda.fake_nvcc import FakeToolkit


@pytest.fixture(autouse=True)
def no_settings(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("CUDA_HOME", "CUDA_PATH", "CXX", *build_cuda.NVCC_VARIABLES):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture
def fake(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> FakeToolkit:
    toolkit = FakeToolkit(tmp_path / "cuda")
    monkeypatch.setenv("CUDA_HOME", str(toolkit.home))
    return toolkit


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    root = tmp_path / "source tree"
    for name in ("csrc/cuda/fold.cu", "csrc/cuda/norm.cu", "csrc/cuda/launch.cuh", "csrc/math/adam.h", "csrc/cpu/a.h"):
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(name)
    return root


def compile_all(root: Path, archs: str = "", werror: bool = False) -> list[Path]:
    return build_cuda.plan_build(root, archs, werror).compile(root, jobs=2)


# ---- which nvcc


def test_cuda_home_decides_then_cuda_path_then_the_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    home, path, on_path = (FakeToolkit(tmp_path / name) for name in ("home", "path", "on_path"))
    monkeypatch.setenv("PATH", str(on_path.nvcc.parent), prepend=os.pathsep)
    assert build_cuda.find_nvcc() == str(on_path.nvcc)
    monkeypatch.setenv("CUDA_PATH", str(path.home))
    assert build_cuda.find_nvcc() == str(path.nvcc)
    monkeypatch.setenv("CUDA_HOME", str(home.home))
    assert build_cuda.find_nvcc() == str(home.nvcc)
    home.nvcc.unlink()
    with pytest.raises(NoCuda, match="no bin/nvcc in CUDA_HOME="):
        build_cuda.find_nvcc()


def test_no_kernels_are_a_reason_not_an_error(fake: FakeToolkit, tree: Path) -> None:
    for source in build_cuda.kernel_sources(tree):
        source.unlink()
    with pytest.raises(NoCuda, match=r"no \.cu file in csrc/cuda"):
        compile_all(tree)


def test_an_nvcc_without_cpp20_or_static_runtime_is_refused(tmp_path: Path) -> None:
    with pytest.raises(BuildError, match=r"nvcc 11\.8\.7 .* is too old: install CUDA 12"):
        open_toolkit(str(FakeToolkit(tmp_path / "old", release="11.8").nvcc))
    bare = FakeToolkit(tmp_path / "bare")
    (bare.home / "lib/libcudart_static.a").unlink()
    with pytest.raises(BuildError, match=r"libcudart_static\.a is not beside"):
        open_toolkit(str(bare.nvcc))


# ---- which GPUs


def test_the_default_is_what_this_nvcc_knows_of_ours(tmp_path: Path) -> None:
    for archs, expected in (
        ("80 90 100 120", ["8.0", "9.0", "10.0+PTX"]),
        ("75 80 86 90", ["8.0", "9.0+PTX"]),
        ("90 100 130", ["9.0", "10.0+PTX"]),
    ):
        toolkit = open_toolkit(str(FakeToolkit(tmp_path / archs.replace(" ", "-"), archs=archs).nvcc))
        assert choose_archs(" ;", toolkit) == expected
    future = open_toolkit(str(FakeToolkit(tmp_path / "future", archs="140").nvcc))
    with pytest.raises(BuildError, match=r"knows 14\.0 only: choose with TORCH_CUDA_ARCH_LIST"):
        choose_archs("", future)


@pytest.mark.parametrize(
    ("wanted", "expected"),
    [
        ("8.0;9.0 10.0+PTX", ["8.0", "9.0", "10.0+PTX"]),
        ("9.0a", ["9.0a"]),
        (" 9.0 ; 9.0;", ["9.0"]),
        ("Hopper 12.0", ["9.0+PTX", "12.0"]),
    ],
)
def test_torch_s_list_of_archs_is_understood(wanted: str, expected: list[str], fake: FakeToolkit) -> None:
    assert choose_archs(wanted, open_toolkit(str(fake.nvcc))) == expected


@pytest.mark.parametrize(
    ("wanted", "message"),
    [
        ("9.0;sm_90", "'sm_90' is no architecture; write 9.0"),
        ("9.0,10.0", "'9.0,10.0' is no architecture"),
        ("hopper", "'hopper' is no architecture"),
        ("8.0+PTX 7.0", r"nvcc 13\.1\.7 can't compile for 7\.0; it knows 8\.0, 9\.0, 10\.0, 12\.0"),
        ("8.0a", r"can't compile for 8\.0a"),
    ],
)
def test_an_arch_that_can_t_be_is_named(wanted: str, message: str, fake: FakeToolkit) -> None:
    with pytest.raises(BuildError, match=message):
        choose_archs(wanted, open_toolkit(str(fake.nvcc)))


def test_ptx_comes_beside_machine_code() -> None:
    assert gencode(["8.0", "10.0+PTX", "10.0"]) == [
        "-gencode=arch=compute_80,code=sm_80",
        "-gencode=arch=compute_100,code=sm_100",
        "-gencode=arch=compute_100,code=compute_100",
    ]


# ---- what is compiled again

BOTH = ["csrc/cuda/fold.cu", "csrc/cuda/norm.cu"]


def test_a_second_build_compiles_what_changed_only(fake: FakeToolkit, tree: Path) -> None:
    objects = compile_all(tree)
    assert fake.compiled() == BOTH
    assert [path.read_text() for path in objects] == BOTH
    assert [path.with_suffix(".ptxas").read_text() for path in objects] == ["ptxas info    : Used 40 registers\n"] * 2

    (tree / "csrc/cuda/norm.cu").touch()
    (tree / "csrc/cpu/a.h").write_text("not theirs")
    assert compile_all(tree) == objects
    assert fake.compiled() == []

    (tree / "csrc/cuda/norm.cu").write_text("changed")
    compile_all(tree)
    assert fake.compiled() == BOTH[1:]
    for header in ("csrc/cuda/launch.cuh", "csrc/math/adam.h"):
        (tree / header).write_text("changed")
        compile_all(tree)
        assert fake.compiled() == BOTH, header


@pytest.mark.parametrize("change", ["archs", "werror", "NVCC_APPEND_FLAGS", "NVCC_PREPEND_FLAGS", "nvcc"])
def test_other_flags_are_other_objects(
    change: str, fake: FakeToolkit, tree: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = compile_all(tree)
    with monkeypatch.context() as patch:
        if change == "nvcc":
            newer = FakeToolkit(tmp_path / "newer", release="13.2")
            patch.setenv("CUDA_HOME", str(newer.home))
        elif change.startswith("NVCC"):
            patch.setenv(change, "-lineinfo")
        after = compile_all(tree, "9.0" if change == "archs" else "", change == "werror")
    assert not set(before) & set(after)
    fake.compiled()
    assert compile_all(tree) == before
    assert fake.compiled() == [], "going back costs nothing"


# ---- what is said


def test_a_failure_names_the_file_shows_the_error_and_is_not_taken_for_done(
    fake: FakeToolkit, tree: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    objects = compile_all(tree)
    (tree / "csrc/cuda/fold.cu").write_text("broken")
    for _ in range(2):
        with pytest.raises(BuildError, match=r"nvcc could not compile csrc/cuda/fold\.cu, see above"):
            compile_all(tree)
        said = capsys.readouterr().out
        assert "csrc/cuda/fold.cu(1): error: broken" in said
        assert "-fmad=false" in said, "the command"
    (tree / "csrc/cuda/fold.cu").write_text("mended")
    assert compile_all(tree) == objects
    assert objects[0].read_text() == "mended"


def test_warnings_are_shown_and_the_talk_of_ptxas_is_not(
    fake: FakeToolkit, tree: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tree / "csrc/cuda/fold.cu").write_text("doubtful")
    compile_all(tree)
    said = capsys.readouterr().out
    assert "warning: doubtful" in said
    assert "ptxas" not in said


def test_nvcc_gets_the_compiler_of_the_other_files_unless_told(
    fake: FakeToolkit, tree: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CXX", "env c++ -m64")  # as `ccache c++` would be written
    assert build_cuda.plan_build(tree, "", False).flags[0] == "-ccbin=c++"
    monkeypatch.setenv("NVCC_PREPEND_FLAGS", "-ccbin=/opt/c++")
    assert "-ccbin=c++" not in build_cuda.plan_build(tree, "", False).flags
