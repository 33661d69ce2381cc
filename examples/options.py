"""The command line of train_gpt.py: its options, and the checks that need nothing else."""

import argparse
import math
import os
from dataclasses import replace
from pathlib import Path
from typing import NoReturn

import torch
from command import find_matplotlib
from corpus import BadInput
from gpt_model import SHAPES
from optimizers import FUSED, STATE_DTYPES, checked, default_lr

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}


def parse_options(arguments: list[str] | None, description: str) -> argparse.Namespace:
    """Options checked against each other, with `shape`, `device` and `dtype` resolved; BadInput says what is wrong."""
    options = _parser(description).parse_args(arguments)
    asked = {name: getattr(options, name) for name in ("layers", "width", "heads", "context")}
    options.shape = replace(SHAPES[options.preset], **{name: value for name, value in asked.items() if value})
    if options.shape.width % options.shape.heads:
        raise BadInput(f"--heads {options.shape.heads} does not divide --width {options.shape.width}")
    checked(options.optimizer)
    if options.lr is None:
        options.lr = default_lr(options.optimizer, options.shape.width)
    if options.adamw_lr is not None and options.optimizer != "muon":
        raise BadInput("--adamw-lr is for --optimizer muon, which leaves to AdamW what is no matrix: take --lr")
    if options.adamw_lr is None:
        options.adamw_lr = default_lr("adamw", options.shape.width)
    if options.compare and options.optimizer == "lion":
        raise BadInput("--compare trains torch's own optimizer beside zerox's, and torch.optim has no Lion")
    if options.state_dtype != "fp32" and options.optimizer not in FUSED:
        raise BadInput(f"--state-dtype is for {', '.join(FUSED)}: {options.optimizer} keeps its state as it likes")
    if not 0 <= options.seed < 2**32:
        raise BadInput(f"--seed {options.seed} is outside 0 to 2**32 - 1")
    options.device = _device(options.device, options.ranks or 1)
    if options.resume and not options.save_dir:
        raise BadInput("--resume goes on from a checkpoint in --save-dir, which is not given")
    if options.compare and options.save_dir:
        raise BadInput("--compare trains a second model, which --save-dir would not save: choose one of them")
    if options.compare:
        find_matplotlib("--compare")
        _prepare("--out", options.out)
    if options.compare and options.meta:
        raise BadInput("--compare copies the model, which has no values to copy with --meta: choose one of them")
    if options.uneven and (options.compare or options.save_dir):
        raise BadInput(
            f"--uneven does not go with {'--compare' if options.compare else '--save-dir'}: a rank that has run out of "
            "batches can't take part in it"
        )
    if options.save_dir:
        _prepare("--save-dir", options.save_dir)
    if options.losses:
        _prepare("--losses", options.losses.parent)
    if options.log_dir:
        _find_tensorboard()
        _prepare("--log-dir", options.log_dir)
    return options


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise BadInput(message)  # argparse would print its usage first, on every rank


def _parser(description: str) -> argparse.ArgumentParser:
    parser = _Parser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    model = parser.add_argument_group("model")
    model.add_argument("--size", dest="preset", choices=SHAPES, default="small", help="a preset (default: small)")
    model.add_argument("--layers", type=_count, help="instead of the preset's")
    model.add_argument("--width", type=_count, help="instead of the preset's")
    model.add_argument("--heads", type=_count, help="instead of the preset's")
    model.add_argument("--context", type=_count, help="bytes in a window, instead of the preset's")
    model.add_argument("--dtype", choices=DTYPES, default="fp32", help="of the parameters (default: fp32)")

    text = parser.add_argument_group("text")
    text.add_argument("--data", type=Path, help="a file or a folder (default: the Python standard library)")

    training = parser.add_argument_group("training")
    training.add_argument("--steps", type=_count, default=1000, help="optimizer steps (default: %(default)s)")
    training.add_argument("--batch", type=_count, default=8, help="windows a rank and backward (default: %(default)s)")
    training.add_argument("--accumulate", type=_count, default=1, help="backwards a step (default: %(default)s)")
    training.add_argument(
        "--uneven", action="store_true", help="unequal numbers of batches on ranks, of unequal sizes; mean over tokens"
    )
    training.add_argument("--clip", type=_not_negative, default=1.0, help="largest gradient norm, 0: off (default: 1)")
    training.add_argument(
        "--optimizer",
        default="adamw",
        metavar="NAME",
        help=f"{', '.join(FUSED)}, or a class of torch.optim that zerox then shards (default: %(default)s)",
    )
    training.add_argument(
        "--lr",
        type=_positive,
        help="peak learning rate (default: 0.4 / width, times 50 for sgd, 0.2 for lion; 0.02 for muon)",
    )
    training.add_argument(
        "--adamw-lr", type=_positive, help="of what --optimizer muon leaves to AdamW (default: 0.4 / width)"
    )
    training.add_argument("--weight-decay", type=_not_negative, default=0.1, help="(default: %(default)s)")
    training.add_argument("--eps", type=_positive, default=1e-6, help="of AdamW (default: %(default)s)")
    training.add_argument("--stage", type=int, default=2, help="ZeRO stage of zerox (default: %(default)s)")
    training.add_argument(
        "--resident-mb", type=_positive, help="with --stage 3: MiB of parameters whole at a time (default: zerox's)"
    )
    training.add_argument("--meta", action="store_true", help="build the model on the meta device")
    training.add_argument(
        "--state-dtype", choices=STATE_DTYPES, default="fp32", help="of zerox's state (default: %(default)s)"
    )
    training.add_argument("--seed", type=int, default=0, help="(default: %(default)s)")
    training.add_argument("--ranks", type=_count, help="start that many here, under torchrun (default: no torchrun)")
    training.add_argument("--device", choices=("auto", "cpu", "cuda"), default="auto", help="(default: cuda if any)")

    checkpoints = parser.add_argument_group("checkpoints")
    checkpoints.add_argument("--save-dir", type=Path, metavar="FOLDER", help="save there (default: nothing is saved)")
    checkpoints.add_argument(
        "--save-every", type=_count, default=100, metavar="STEPS", help="and after the last (default: %(default)s)"
    )
    checkpoints.add_argument("--resume", action="store_true", help="go on from the last checkpoint there, if any")

    output = parser.add_argument_group("output")
    output.add_argument("--losses", type=Path, metavar="FILE", help="write the loss of every step there, as JSON")
    output.add_argument(
        "--log-dir", type=Path, metavar="FOLDER", help="write figures of each step there, for TensorBoard"
    )
    output.add_argument("--compare", action="store_true", help="train DDP + torch's optimizer beside it, and draw both")
    output.add_argument("--out", type=Path, default=Path("out"), help="folder for what --compare writes (default: out)")
    output.add_argument("--quiet", action="store_true", help="no progress bar")
    return parser


def _count(text: str) -> int:
    value = int(text) if text.lstrip("+-").isdigit() else 0
    if value < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number of 1 or more")
    return value


def _number(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        return math.nan


def _positive(text: str) -> float:
    value = _number(text)
    if not 0 < value < math.inf:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number above 0")
    return value


def _not_negative(text: str) -> float:
    value = _number(text)
    if not 0 <= value < math.inf:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of 0 or more")
    return value


def _device(name: str, num_ranks: int) -> torch.device:
    """This rank's device: the CPU, or the one GPU that is its own."""
    if name == "cpu" or (name == "auto" and not torch.cuda.is_available()):
        return torch.device("cpu")
    if not torch.cuda.is_available():
        raise BadInput("--device cuda: this torch sees no CUDA device")
    local_rank, num_gpus = int(os.environ.get("LOCAL_RANK", 0)), torch.cuda.device_count()
    num_local_ranks = int(os.environ.get("LOCAL_WORLD_SIZE", num_ranks))
    if num_local_ranks > num_gpus:
        raise BadInput(f"{num_local_ranks} ranks here need a GPU each, but there are {num_gpus}; try --device cpu")
    return torch.device("cuda", local_rank)


def _find_tensorboard() -> None:
    try:
        import torch.utils.tensorboard  # noqa: F401
    except ImportError as error:
        raise BadInput("--log-dir writes for TensorBoard, which is not installed (pip install tensorboard)") from error


def _prepare(option: str, folder: Path) -> None:
    """Finds out before the training, not after it, whether files can be written there."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        if not os.access(folder, os.W_OK):
            raise PermissionError(None, "not writable")
    except OSError as error:
        raise BadInput(f"{option} {folder}: {error.strerror}") from error
