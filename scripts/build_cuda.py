"""Compiles csrc/cuda/*.cu with nvcc, for setup.py and kernel_table.py. Standard library only.

torch.utils.cpp_extension does not serve: under a CPU build of torch it knows no CUDA, and there too these kernels have
to compile and link, or a machine without a GPU could not check them.

The kernels know neither torch nor Python, so their objects serve every environment. They lie in build/nvcc-KEY, where
KEY stands for nvcc, its host compiler and all flags; beside each is a hash of the sources that it was made from.
"""

from __future__ import annotations

import hashlib
import os
import re
import shlex
import shutil
import subprocess
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

# No contraction: each fma is spelled out in the source, so that CUDA agrees with the CPU kernels bit for bit. For the
# same reason nothing of --use_fast_math: division and square root are rounded correctly, subnormals are kept.
# -v has ptxas tell what each kernel takes; that is kept beside the object.
NVCC_FLAGS = ["-O3", "-std=c++20", "--expt-relaxed-constexpr", "-fmad=false", "-Xptxas=-v"]
NVCC_FLAGS += ["-Xcompiler=-fPIC,-fvisibility=hidden,-ffp-contract=off,-fno-math-errno,-Wall,-Wextra"]
WERROR_FLAGS = ["-Werror=all-warnings", "-Xcompiler=-Werror"]

DEFAULT_ARCHS = ("8.0", "9.0", "10.0")
# What torch's TORCH_CUDA_ARCH_LIST understands by these names.
NAMED_ARCHS = {
    "Volta": "7.0+PTX",
    "Turing": "7.5+PTX",
    "Ampere": "8.0 8.6+PTX",
    "Ada": "8.9+PTX",
    "Hopper": "9.0+PTX",
    "Blackwell": "10.0 10.3 12.0 12.1+PTX",
}
MIN_CUDA = 12  # the first whose nvcc takes C++20
COMPILERS = ("c++", "g++", "clang++")
# nvcc reads these itself, so they are part of what an object depends on.
NVCC_VARIABLES = ("NVCC_PREPEND_FLAGS", "NVCC_APPEND_FLAGS", "NVCC_CCBIN")


class BuildError(Exception):
    """One line: what is wrong, and what to do about it."""


class NoCuda(BuildError):
    """Nothing is broken: there is no nvcc, or there are no kernels."""


@dataclass(frozen=True)
class Toolkit:
    nvcc: str
    release: str  # 13.0.88
    known_archs: tuple[str, ...]  # 80, 90, ...
    cudart: Path  # the static one

    def accepts(self, number: str, suffix: str) -> bool:
        if not suffix:
            return number in self.known_archs
        # No list names the variants (90a, 100f), but the driver refuses those that it does not know.
        arch = f"-gencode=arch=compute_{number}{suffix},code=sm_{number}{suffix}"
        return subprocess.run([self.nvcc, "--dryrun", "-c", arch, "x.cu"], capture_output=True).returncode == 0


@dataclass(frozen=True)
class CudaBuild:
    toolkit: Toolkit
    archs: list[str]  # 9.0, 9.0a, 10.0+PTX, ...
    flags: list[str]

    def folder(self, root: Path) -> Path:
        state = [ask(self.toolkit.nvcc, "--version"), self.flags, [os.environ.get(name) for name in NVCC_VARIABLES]]
        if self.flags[0].startswith("-ccbin="):  # the same name may be another compiler tomorrow
            state.append(ask(self.flags[0].removeprefix("-ccbin="), "--version"))
        return root / "build" / f"nvcc-{hash_of(state)[:8]}"

    def objects(self, root: Path) -> list[Path]:
        """Beside each adam.o lies adam.ptxas: what ptxas said about its kernels."""
        return [self.folder(root) / f"{source.stem}.o" for source in kernel_sources(root)]

    def compile(self, root: Path, jobs: int) -> list[Path]:
        """Compiles what is not up to date. Returns the objects; raises BuildError when nvcc's errors are printed."""
        objects = self.objects(root)
        headers = [root.glob("csrc/cuda/*.h"), root.glob("csrc/cuda/*.cuh"), root.glob("csrc/math/*.h")]
        shared = [(path.name, path.read_bytes()) for paths in headers for path in sorted(paths)]
        stale: list[tuple[Path, Path, str]] = []
        for source, target in zip(kernel_sources(root), objects, strict=True):
            key, key_file = hash_of([shared, source.read_bytes()]), target.with_suffix(".key")
            if not (target.exists() and key_file.exists() and key_file.read_text() == key):
                stale.append((source, target, key))
        with ThreadPoolExecutor(jobs) as pool:
            done = list(pool.map(lambda work: self._compile_one(root, *work), stale))
        failed = [source for (source, _, _), success in zip(stale, done, strict=True) if not success]
        if failed:
            names = ", ".join(path.relative_to(root).as_posix() for path in failed)
            raise BuildError(f"nvcc could not compile {names}, see above")
        return objects

    def _compile_one(self, root: Path, source: Path, target: Path, key: str) -> bool:
        name = source.relative_to(root).as_posix()  # a relative path, since nvcc makes names of symbols out of it
        target.parent.mkdir(parents=True, exist_ok=True)
        partial = target.with_suffix(f".{os.getpid()}.o")
        started = time.monotonic()
        command = [self.toolkit.nvcc, "-c", name, "-o", str(partial), "-Icsrc", *self.flags]
        done = subprocess.run(command, cwd=root, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        about_kernels = re.compile(r"ptxas info\b|\s+\d+ bytes stack frame")
        lines = done.stdout.splitlines()
        report = [line for line in lines if about_kernels.match(line)]
        said = [line for line in lines if not about_kernels.match(line)]
        # One print, so that what two compilers say does not mix.
        head = f"  nvcc      {name} ({time.monotonic() - started:.1f} s)"
        if done.returncode:
            head = f"\nFAILED: {shlex.join(command)}"
        print("\n".join([head, *said]), flush=True)
        if done.returncode:
            partial.unlink(missing_ok=True)
            return False
        target.with_suffix(".key").unlink(missing_ok=True)
        target.with_suffix(".ptxas").write_text("\n".join(report) + "\n")
        partial.replace(target)
        target.with_suffix(".key").write_text(key)
        return True

    def link_flags(self) -> list[str]:
        # Hidden, or our calls would land in the libcudart that torch loads with RTLD_GLOBAL, of whatever version.
        return [str(self.toolkit.cudart), f"-Wl,--exclude-libs,{self.toolkit.cudart.name}", "-ldl", "-lrt", "-lpthread"]


def plan_build(root: Path, wanted_archs: str, werror: bool) -> CudaBuild:
    """What there is to do. Raises NoCuda or BuildError."""
    nvcc = find_nvcc()
    temporary = os.environ.get("TMPDIR")  # other compilers fall back to /tmp, nvcc fails
    if temporary and not (Path(temporary).is_dir() and os.access(temporary, os.W_OK | os.X_OK)):
        reason = "where nvcc writes, is not a folder to write to: make it, or unset TMPDIR"
        raise BuildError(f"TMPDIR={temporary}, {reason}")
    if not kernel_sources(root):
        raise NoCuda("there is no .cu file in csrc/cuda")
    toolkit = open_toolkit(nvcc)
    archs = choose_archs(wanted_archs, toolkit)
    flags = [*host_compiler(), *NVCC_FLAGS, *(WERROR_FLAGS if werror else []), *gencode(archs)]
    return CudaBuild(toolkit, archs, flags)


def kernel_sources(root: Path) -> list[Path]:
    return sorted(root.glob("csrc/cuda/*.cu"))


def find_nvcc() -> str:
    """By CUDA_HOME, CUDA_PATH, the PATH, /usr/local/cuda: the first that is there decides, as with torch."""
    for name in ("CUDA_HOME", "CUDA_PATH"):
        if os.environ.get(name):
            nvcc = Path(os.environ[name], "bin/nvcc")
            if nvcc.exists():
                return str(nvcc)
            raise NoCuda(f"there is no bin/nvcc in {name}={os.environ[name]}")
    usual = Path("/usr/local/cuda/bin/nvcc")
    nvcc_on_path = shutil.which("nvcc")
    if nvcc_on_path or usual.exists():
        return nvcc_on_path or str(usual)
    raise NoCuda("nvcc is neither on the PATH nor in /usr/local/cuda (install the CUDA toolkit, or set CUDA_HOME)")


def open_toolkit(nvcc: str) -> Toolkit:
    release = re.search(r"\bV(\d+\.\d+\.\d+)", ask(nvcc, "--version"))
    if not release:
        raise BuildError(f"{nvcc} --version does not say which release it is")
    if int(release[1].split(".")[0]) < MIN_CUDA:
        raise BuildError(f"nvcc {release[1]} ({nvcc}) is too old: install CUDA {MIN_CUDA} or newer, and set CUDA_HOME")
    known = re.findall(r"^sm_(\d+)$", ask(nvcc, "--list-gpu-code"), re.MULTILINE)
    return Toolkit(nvcc, release[1], tuple(sorted(known, key=int)), static_cudart(nvcc))


def static_cudart(nvcc: str) -> Path:
    """Asked of nvcc, since the nvcc on the PATH may be a script in front of the real one."""
    plan = ask(nvcc, "--dryrun", "-c", "x.cu")
    libraries = re.search(r"^#\$ LIBRARIES=(.*)$", plan, re.MULTILINE)
    top = re.search(r"^#\$ TOP=(.*)$", plan, re.MULTILINE)
    folders = [word.removeprefix("-L") for word in shlex.split(libraries[1] if libraries else "") if word[:2] == "-L"]
    if top:
        folders += [f"{top[1].strip()}/lib64", f"{top[1].strip()}/lib"]
    for folder in folders:
        library = Path(folder, "libcudart_static.a").resolve()
        if library.exists():
            return library
    raise BuildError(
        f"libcudart_static.a is not beside {nvcc}: install the development files of the CUDA runtime (cuda-cudart-dev, "
        "or cuda-cudart-static of conda)"
    )


def ask(program: str, *question: str) -> str:
    try:
        done = subprocess.run([program, *question], capture_output=True, text=True)
    except OSError as error:
        raise BuildError(f"{program} does not run: {error}") from None
    if done.returncode:
        last = (done.stdout + done.stderr).strip().rpartition("\n")[2]
        raise BuildError(f"{program} {' '.join(question)} failed: {last}")
    return done.stdout + done.stderr


def compilers() -> list[str]:
    """Those that are there: CXX, or else the usual names."""
    candidates = [os.environ["CXX"]] if os.environ.get("CXX") else COMPILERS
    return [cxx for cxx in candidates if shutil.which(shlex.split(cxx)[0])]


def host_compiler() -> list[str]:
    """The compiler of the other files, unless nvcc was told of one: two -ccbin are an error."""
    told = " ".join(os.environ.get(name, "") for name in NVCC_VARIABLES[:2])
    if os.environ.get("NVCC_CCBIN") or "-ccbin" in told or "--compiler-bindir" in told or not compilers():
        return []
    words = [word for word in shlex.split(compilers()[0]) if not word.startswith("-")]  # perhaps `ccache g++`
    return [f"-ccbin={words[-1]}"]


def choose_archs(wanted: str, toolkit: Toolkit) -> list[str]:
    """`wanted` is written as torch has it: "8.0;9.0a 10.0+PTX", or names. Empty is our default."""
    known = ", ".join(f"{number[:-1]}.{number[-1]}" for number in toolkit.known_archs)
    if not wanted.strip(" ;"):
        default = [arch for arch in DEFAULT_ARCHS if toolkit.accepts(arch.replace(".", ""), "")]
        if not default:
            raise BuildError(f"nvcc {toolkit.release} knows {known} only: choose with TORCH_CUDA_ARCH_LIST")
        return [*default[:-1], f"{default[-1]}+PTX"]
    words = [word for entry in re.split(r"[;\s]+", wanted) for word in NAMED_ARCHS.get(entry, entry).split()]
    for word in words:
        arch = re.fullmatch(r"(\d+)\.(\d)([a-z]?)(\+PTX)?", word)
        if not arch:
            raise BuildError(f"TORCH_CUDA_ARCH_LIST: {word!r} is no architecture; write 9.0, 9.0a, 10.0+PTX or Hopper")
        if not toolkit.accepts(arch[1] + arch[2], arch[3]):
            raise BuildError(f"TORCH_CUDA_ARCH_LIST: nvcc {toolkit.release} can't compile for {word}; it knows {known}")
    return list(dict.fromkeys(words))


def gencode(archs: list[str]) -> list[str]:
    flags = []
    for arch in archs:
        number = arch.removesuffix("+PTX").replace(".", "")
        kinds = ["sm", "compute"] if arch.endswith("+PTX") else ["sm"]
        flags += [f"-gencode=arch=compute_{number},code={kind}_{number}" for kind in kinds]
    return list(dict.fromkeys(flags))


def hash_of(state: object) -> str:
    return hashlib.sha256(repr(state).encode()).hexdigest()
