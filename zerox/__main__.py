"""Command line: python -m zerox env, python -m zerox convert, python -m zerox options"""

from __future__ import annotations

import argparse
import os
import platform
import signal
import sys
from pathlib import Path

import zerox
from zerox.plan import combinations
from zerox.plan.environment import VARIABLES

Fact = tuple[str, object]  # a name with its value, or with a function that finds it


def print_facts(title: str, facts: list[Fact]) -> None:
    """A fact that cannot be found out costs its own line only: the report is wanted most where something is broken."""
    print(title)
    for name, value in facts:
        try:
            value = value() if callable(value) else value
        except Exception as error:
            value = f"? ({type(error).__name__}: {error})"
        print(f"  {name:<22}{value}")


def cpu_model() -> str:
    lines = Path("/proc/cpuinfo").read_text().splitlines() if Path("/proc/cpuinfo").exists() else []
    models = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return models[0] if models else platform.processor() or platform.machine()


def operating_system() -> str:
    libc = " ".join(platform.libc_ver())
    try:
        return f"{platform.freedesktop_os_release()['PRETTY_NAME']}, {platform.platform()}, {libc}"
    except (OSError, KeyError):
        return f"{platform.platform()}, {libc}"


def nvidia_driver() -> str:
    version = Path("/proc/driver/nvidia/version")
    return version.read_text().partition("\n")[0] if version.exists() else "none"


def torch_facts() -> list[Fact]:
    import torch
    import torch.distributed as dist

    def backends() -> str:
        if not dist.is_available():
            return "none: torch.distributed is not in this build"
        has = {"gloo": dist.is_gloo_available(), "nccl": dist.is_nccl_available(), "mpi": dist.is_mpi_available()}
        names = [name for name, available in has.items() if available]
        if has["nccl"]:
            names[names.index("nccl")] += " " + ".".join(map(str, torch.cuda.nccl.version()))
        return ", ".join(names) or "none"

    def gpus() -> str:
        devices = [torch.cuda.get_device_properties(index) for index in range(torch.cuda.device_count())]
        names = [f"{gpu.name} (sm_{gpu.major}{gpu.minor}, {gpu.total_memory / 2**30:.0f} GiB)" for gpu in devices]
        return ", ".join(names) or "none"

    return [
        ("version", lambda: torch.__version__),
        ("commit", lambda: torch.version.git_version),
        ("CUDA", lambda: torch.version.cuda or "not in this build"),
        ("cxx11 abi", lambda: torch.compiled_with_cxx11_abi()),
        ("CPU capability", lambda: torch.backends.cpu.get_cpu_capability()),
        ("threads", lambda: f"{torch.get_num_threads()} intra-op, {torch.get_num_interop_threads()} inter-op"),
        ("backends", backends),
        ("GPUs", gpus),
    ]


def env(_: argparse.Namespace) -> int:
    """Prints what a bug report needs. Returns 1 where the extension cannot be used."""
    failure = None
    try:
        from zerox._ext import C, cuda_refusal
    except Exception as error:
        C, failure = None, error  # type: ignore[assignment]

    broken = zerox._broken if not failure else ""  # what else could not be imported
    own: list[Fact] = [("extension", f"cannot be used: {failure}" if failure else "loaded")]
    print_facts("zerox", [*own, ("package", f"cannot be used: {broken}")] if broken else own)
    try:
        from zerox._build_info import BUILD_INFO

        print_facts("build", list(BUILD_INFO.items()))
    except ImportError:
        print("build: none")
    if C is not None:
        kernels: list[Fact] = [("ISA in use", C.isa), ("ISAs supported", lambda: ", ".join(C.supported_isas()))]
        print_facts("kernels", [*kernels, ("CUDA", lambda: cuda_refusal() or "yes")])
    try:
        facts = torch_facts()
    except Exception as error:
        facts = [("version", f"does not import ({type(error).__name__}: {error})")]
    print_facts("torch", facts)
    print_facts(
        "machine",
        [
            ("Python", lambda: f"{sys.version.split()[0]} ({platform.python_implementation()}), {sys.executable}"),
            ("OS", operating_system),
            ("CPU", lambda: f"{cpu_model()}, {len(os.sched_getaffinity(0))} of {os.cpu_count()} logical cores usable"),
            ("NVIDIA driver", nvidia_driver),
        ],
    )
    print_facts("environment", [(each.name, f"{each.value:<12}  {each.when}: {each.meaning}") for each in VARIABLES])
    return 1 if failure or broken else 0


def convert(args: argparse.Namespace) -> int:
    """Returns 1 where it could not, having said why."""
    from zerox.checkpoint.convert import convert_file

    keys = (args.model_key, args.optimizer_key)
    try:
        wrote = convert_file(args.source, args.target, args.weights, args.fp32, keys, args.masks)
    except (RuntimeError, ValueError, OSError, ImportError) as error:
        print(f"zerox convert: {' '.join(str(error).split())}", file=sys.stderr)  # one line, whatever torch says
        return 1
    print(wrote)
    return 0


def options(_: argparse.Namespace) -> int:
    """Prints which options go together."""
    print(combinations.rows())
    return 0


def parser() -> argparse.ArgumentParser:
    """A subcommand is a function from the parsed arguments to the exit status, registered here."""
    top = argparse.ArgumentParser(prog="python -m zerox", description="Tools around the zerox optimizer.")
    commands = top.add_subparsers(title="commands", required=True, metavar="COMMAND")

    command = commands.add_parser("env", help="print versions, build and machine, for a bug report")
    command.set_defaults(run=env)

    command = commands.add_parser("options", help="print which of the optimizer's options go together")
    command.set_defaults(run=options)

    command = commands.add_parser(
        "convert",
        help="between a checkpoint's folder and a file of torch.save or safetensors",
        description="Makes one file of a checkpoint that zerox.save() wrote, or such a checkpoint of a file. In memory "
        "of the host, which needs room for everything that is converted.",
    )
    command.add_argument("source", type=Path, help="a checkpoint's folder, or a file with weights and AdamW's state")
    command.add_argument(
        "target", type=Path, help="*.safetensors: weights; another file: torch.save; a folder where source is a file"
    )
    command.add_argument("--weights", action="store_true", help="the model's state_dict() and nothing else")
    command.add_argument("--fp32", action="store_true", help="weights as their fp32 masters have them")
    command.add_argument("--masks", action="store_true", help="masks of zerox.Sparsity beside weights, as NAME_mask")
    command.add_argument("--model-key", default="model", metavar="KEY", help="in the file (default: %(default)s)")
    command.add_argument("--optimizer-key", default="optimizer", metavar="KEY", help="(default: %(default)s)")
    command.set_defaults(run=convert)
    return top


def main(argv: list[str] | None = None) -> int:
    args = parser().parse_args(argv)
    try:
        status = int(args.run(args))
        sys.stdout.flush()
    except BrokenPipeError:  # whoever read it has enough, as `| head` has: Python would complain once more at its exit
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 128 + signal.SIGPIPE
    return status


if __name__ == "__main__":
    sys.exit(main())
