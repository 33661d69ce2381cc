"""Builds zerox._C, the one C++ and CUDA extension. Metadata is in pyproject.toml, the loader in zerox/_ext.py, the step
that runs nvcc in scripts/build_cuda.py.

torch must be installed before this runs: the extension links against the very torch that will load it. pip's isolated
build hides it, scripts/find_torch.py finds it there.
"""

import datetime
import hashlib
import os
import pprint
import shlex
import shutil
import subprocess
import sys
import sysconfig
import tempfile
from pathlib import Path

import setuptools

ROOT = Path(__file__).parent.resolve()
sys.path.insert(0, str(ROOT / "scripts"))  # pip runs this file with no folder of ours on the path
import build_cuda  # noqa: E402
import find_torch  # noqa: E402
from build_cuda import CudaBuild  # noqa: E402

# ---- Switches (zerox/plan/environment.py has the table of all environment variables) ---------------------------------
# auto | 0 | 1. auto is with CUDA where torch is a CUDA build and there is an nvcc, 1 fails rather than build without.
CUDA = os.environ.get("ZEROX_CUDA") or ("1" if os.environ.get("FORCE_CUDA") == "1" else "auto")
CUDA_ARCHS = os.environ.get("TORCH_CUDA_ARCH_LIST", "")
WERROR = os.environ.get("ZEROX_WERROR", "0") == "1"
MAX_JOBS = os.environ.get("MAX_JOBS") or str(os.cpu_count() or 1)

# ---- What is built ---------------------------------------------------------------------------------------------------
FOUND = sorted(path.relative_to(ROOT).as_posix() for path in ROOT.glob("csrc/**/*.cpp"))
# These know torch but no CUDA: .cu files know CUDA but no torch, and are built apart.
CUDA_SOURCES = [path for path in FOUND if path.startswith("csrc/cuda/")]
SOURCES = [path for path in FOUND if path not in CUDA_SOURCES]

# No -march: a wheel moves between machines, the instruction set is chosen at run time (csrc/cpu/isa.h).
# No contraction: each fma is spelled out in the source, so that scalar, SIMD and CUDA agree bit for bit.
# -g1 (line numbers in a backtrace) replaces the -g that many Pythons pass on: a quarter of the size.
CXX_FLAGS = ["-O3", "-g1", "-std=c++20", "-ffp-contract=off", "-fno-math-errno", "-fvisibility=hidden"]
CXX_FLAGS += ["-Wall", "-Wextra"]
CXX_FLAGS += ["-Werror"] if WERROR else []

# Commands that end in a compile. dist_info is among them because pip runs it first: failing there is failing before pip
# has downloaded the dependencies. sdist and egg_info work without torch.
BUILD_COMMANDS = {"dist_info", "bdist_wheel", "editable_wheel", "build", "build_ext", "install", "develop"}


WITHOUT_CUDA = "to build without CUDA kernels: ZEROX_CUDA=0"


def die(line: str) -> None:
    """One line and no traceback: this is what pip shows to somebody who has never seen the project."""
    print(f"zerox: {line}", file=sys.stderr)
    sys.exit(1)


def check_switches() -> None:
    if CUDA not in ("auto", "0", "1"):
        die(f"ZEROX_CUDA={CUDA} is not one of auto, 0, 1")
    if not (MAX_JOBS.isdigit() and int(MAX_JOBS) > 0):
        die(f"MAX_JOBS={MAX_JOBS} is not a number of jobs")
    os.environ["MAX_JOBS"] = MAX_JOBS  # for torch, or ninja would start two more than the cores


def check_build_tools() -> None:
    try:
        from packaging.version import Version
    except ImportError:
        die("packaging is missing: pip install packaging 'setuptools>=77' wheel ninja, then try again")
    if Version(setuptools.__version__) < Version("77"):
        die(f"setuptools {setuptools.__version__} is too old: pip install 'setuptools>=77', then try again")


def check_torch_is_there() -> None:
    if not find_torch.make_torch_visible():
        die(find_torch.NO_TORCH)
    try:
        import torch  # noqa: F401
    except (ImportError, OSError) as error:
        die(f"torch is installed but does not import: {error}")


def check_torch_version() -> None:
    import torch
    from packaging.version import Version

    version, wanted = Version(torch.__version__).release[:2], find_torch.torch_requirement()
    if version < find_torch.LEAST_TORCH:
        die(f"torch {torch.__version__} is too old for zerox: pip install '{wanted}'")
    if version >= find_torch.NEXT_TORCH and not find_torch.any_torch():
        die(
            f"torch {torch.__version__} is newer than zerox was tried with: pip install '{wanted}', or build for it all"
            " the same with ZEROX_ANY_TORCH=1"
        )


def check_compiler() -> str:
    """Returns the first line of --version. Sets CXX so that all that compiles uses the same one."""
    found = build_cuda.compilers()
    if not found:
        sought = os.environ.get("CXX") or ", ".join(build_cuda.COMPILERS)
        die(f"no C++ compiler ({sought} not found): install g++ 11+ or clang++ 14+, or set CXX")
    os.environ["CXX"] = found[0]
    command = shlex.split(found[0])
    probe = "#include <concepts>\n#include <span>\nstatic_assert(__cplusplus >= 202002L);\n"
    python_h = f"-I{sysconfig.get_path('include')}"
    with tempfile.TemporaryDirectory() as folder:
        source = Path(folder, "probe.cpp")
        for code, flags, missing in (
            (probe, [], f"{found[0]} does not compile C++20: install g++ 11+ or clang++ 14+, or set CXX"),
            ("#include <Python.h>\n", [python_h], "Python.h is missing: install python3-dev (python3-devel)"),
        ):
            source.write_text(code)
            compile_it = [*command, "-std=c++20", *flags, "-fsyntax-only", str(source)]
            if subprocess.run(compile_it, capture_output=True).returncode:
                die(missing)
    version = subprocess.run([*command, "--version"], capture_output=True, text=True).stdout
    return version.partition("\n")[0]


def make_compiler_one_word() -> None:
    """torch 2.13 takes CXX for the name of one program, whatever words it has ('ccache g++', 'g++ -m64'), and puts a
    ccache of its own in front: it gets a program of that name. Of CC it replaces the first word and leaves the rest,
    which compiles nothing here."""
    os.environ.pop("CC", None)
    words = shlex.split(os.environ["CXX"])
    if len(words) == 1:
        return
    name = Path([word for word in words if not word.startswith("-")][-1]).name
    program = ROOT / "build" / f"cxx-{hashlib.sha256(repr(words).encode()).hexdigest()[:8]}" / name
    program.parent.mkdir(parents=True, exist_ok=True)
    program.write_text(f'#!/bin/sh\nexec {shlex.join(words)} "$@"\n')
    program.chmod(0o755)
    os.environ["CXX"] = str(program)
    os.environ["TORCH_NO_COMPILER_WRAPPER"] = "1"  # the words may have a wrapper already


def choose_cuda() -> tuple[CudaBuild | None, str]:
    """How to build the CUDA kernels, or None and the reason."""
    import torch

    if CUDA == "0":
        return None, "ZEROX_CUDA=0"
    try:
        if torch.version.hip:
            raise build_cuda.NoCuda(f"torch {torch.__version__} is a build for ROCm")
        if CUDA == "auto" and not torch.version.cuda:
            return None, f"torch {torch.__version__} is a CPU build; ZEROX_CUDA=1 builds kernels all the same"
        cuda = build_cuda.plan_build(ROOT, CUDA_ARCHS, WERROR)
    except build_cuda.NoCuda as reason:
        if CUDA == "1":
            die(f"ZEROX_CUDA=1, but {reason}; {WITHOUT_CUDA}")
        return None, str(reason)
    except build_cuda.BuildError as error:
        die(f"{error}; {WITHOUT_CUDA}")
    release, of_torch = cuda.toolkit.release, torch.version.cuda
    if of_torch and of_torch.partition(".")[0] != release.partition(".")[0]:
        major = of_torch.partition(".")[0]
        die(
            f"{cuda.toolkit.nvcc} is of CUDA {release}, torch {torch.__version__} of CUDA {of_torch}: "
            f"put an nvcc of CUDA {major} on the PATH or set CUDA_HOME; {WITHOUT_CUDA}"
        )
    return cuda, ""


def git_commit() -> str:
    """The commit, with -dirty where the tree has changes; '' outside a clone of this very project."""
    if not (ROOT / ".git").exists():
        return ""
    describe = ["git", "describe", "--always", "--dirty", "--abbrev=40", "--exclude=*"]
    try:
        return subprocess.run(describe, cwd=ROOT, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return ""


def openmp_flags() -> list[str]:
    """at::parallel_for is a template: where torch's threads are OpenMP's, it runs on one thread without this flag.

    Nothing is linked for it: the runtime has to be torch's own, which comes with libtorch, and not a second one.
    """
    import torch

    return ["-fopenmp"] if "parallel backend: OpenMP" in torch.__config__.parallel_info() else []


def build_info(version: str, compiler: str, cuda: CudaBuild | None) -> dict:
    import torch

    epoch = os.environ.get("SOURCE_DATE_EPOCH")
    now = datetime.datetime.now(datetime.timezone.utc)
    date = datetime.datetime.fromtimestamp(int(epoch), datetime.timezone.utc) if epoch else now
    return {
        "version": version,
        "torch": str(torch.__version__),
        "torch_cxx11_abi": bool(torch.compiled_with_cxx11_abi()),
        "cuda": cuda.toolkit.release if cuda else False,
        "cuda_archs": " ".join(cuda.archs) if cuda else "",
        "nvcc_flags": " ".join(cuda.flags) if cuda else "",
        "compiler": compiler,
        "flags": " ".join([*CXX_FLAGS, *openmp_flags()]),
        "git_commit": git_commit(),
        "python": sysconfig.get_python_version(),
        "build_date": date.strftime("%Y-%m-%dT%H:%M:%SZ"),
    }


def extension(torch_too: bool, cuda: CudaBuild | None) -> setuptools.Extension:
    if not torch_too:  # enough for sdist, which MANIFEST.in gives the files
        return setuptools.Extension("zerox._C", SOURCES, language="c++")
    from torch.utils.cpp_extension import CppExtension, include_paths

    # -isystem after -I of the same folder makes it a system one, searched in this order: torch first, so that its own
    # pybind11 wins over a stray one (types such as ProcessGroup are only registered with torch's), and no warnings.
    system = [*include_paths(), sysconfig.get_path("include")]
    if sys.prefix != sys.base_prefix:
        system.append(os.path.join(sys.prefix, "include"))  # setuptools adds it where there is a virtual environment
    return CppExtension(
        "zerox._C",
        SOURCES + (CUDA_SOURCES if cuda else []),
        include_dirs=[str(ROOT / "csrc")],
        define_macros=[("ZEROX_CUDA", "1" if cuda else "0")],
        extra_compile_args=[*CXX_FLAGS, *openmp_flags(), *(f"-isystem{path}" for path in system)],
    )


def by_folder(sources: list[str], folder: Path) -> list[str]:
    """Files in `folder` that each include all files of a folder of csrc: torch's headers take most of the time.

    The kernels stay as they are: each has target pragmas of its own, and no torch.
    """
    by_name: dict[str, list[str]] = {}
    apart = []
    for source in sources:
        path = Path(source)
        if path.name == "isa.cpp" or path.name.startswith("kernels_"):
            apart.append(source)
        else:
            name = {"csrc": "cpu", "workers": "params"}.get(path.parent.name, path.parent.name)
            by_name.setdefault(name, []).append(path.relative_to("csrc").as_posix())
    folder.mkdir(parents=True, exist_ok=True)
    for name, files in by_name.items():
        text = "".join(f'#include "{file}"\n' for file in files)
        together = folder / f"{name}.cpp"
        if not together.exists() or together.read_text() != text:
            together.write_text(text)
        apart.append(together.as_posix())
    return apart


def build_ext_command(compiler: str, cuda: CudaBuild | None, why_not: str) -> type:
    import torch
    from torch.utils.cpp_extension import BuildExtension

    key = hashlib.sha256(f"{torch.__version__} {compiler}".encode()).hexdigest()[:8] + ("-cuda" if cuda else "")

    class BuildExt(BuildExtension):
        def finalize_options(self) -> None:
            super().finalize_options()
            # pip builds editable installs in a temporary folder; a lasting one lets ninja skip what is up to date.
            # Named after torch and compiler, whose upgrade ninja would not notice, and CUDA, which all files know of.
            self.build_temp = os.path.join("build", f"obj-{sys.implementation.cache_tag}-{key}")
            # Left to itself setuptools compares dates of sources only, and does not link again where a switch changed.
            self.force = True

        def run(self) -> None:
            info = build_info(self.distribution.get_version(), compiler, cuda)
            count = sum(len(each.sources) for each in self.extensions)
            print(f"zerox {info['version']}: {count} C++ files, MAX_JOBS={MAX_JOBS}")
            print(f"  torch     {info['torch']} (cxx11 abi: {info['torch_cxx11_abi']}), Python {info['python']}")
            if find_torch.any_torch():
                print("  torch     of any version: ZEROX_ANY_TORCH=1")
            print(f"  compiler  {info['compiler']}")
            print(f"  flags     {info['flags']}")
            if cuda:
                count = len(build_cuda.kernel_sources(ROOT))
                print(f"  CUDA      nvcc {info['cuda']}, archs {info['cuda_archs']}, {count} .cu files")
                print(f"  flags     {info['nvcc_flags']}", flush=True)
                self.add_kernels(cuda)
            else:
                print(f"  CUDA      no: {why_not}", flush=True)
            for each in self.extensions:
                each.sources = by_folder(each.sources, Path(self.build_temp, "folders"))
            super().run()
            # Beside the library it describes, and only once that exists.
            folders = [Path(self.build_lib, "zerox")]
            if self.inplace or self.editable_mode:
                folders.append(ROOT / "zerox")
            for folder in folders:
                folder.mkdir(parents=True, exist_ok=True)
                text = "# Written by setup.py for the extension beside it.\nBUILD_INFO = "
                (folder / "_build_info.py").write_text(text + pprint.pformat(info, sort_dicts=False, width=118) + "\n")

        def add_kernels(self, cuda: CudaBuild) -> None:
            try:
                objects = cuda.compile(ROOT, int(MAX_JOBS))
            except build_cuda.BuildError as error:
                die(f"{error}; {WITHOUT_CUDA}")
            for each in self.extensions:
                each.extra_objects += map(str, objects)
                each.extra_link_args += cuda.link_flags()

    return BuildExt


building = not BUILD_COMMANDS.isdisjoint(sys.argv)
cmdclass = {}
cuda = None
if building:
    check_torch_is_there()  # first, since it is what most people will lack
check_build_tools()
if building:
    # The environment's ninja, also when the environment is not activated.
    os.environ["PATH"] = sysconfig.get_path("scripts") + os.pathsep + os.environ.get("PATH", "")
    check_switches()
    check_torch_version()
    compiler = check_compiler()
    cuda, why_not = choose_cuda()
    make_compiler_one_word()  # last: nvcc looks for the compiler among the words
    cmdclass["build_ext"] = build_ext_command(compiler, cuda, why_not)
if "bdist_wheel" in sys.argv:
    for stale in ROOT.glob("build/lib.*"):  # or modules that the source has lost would still be packed
        shutil.rmtree(stale)

setuptools.setup(
    ext_modules=[extension(building, cuda)],
    cmdclass=cmdclass,
    install_requires=["packaging", find_torch.torch_requirement()],
)
