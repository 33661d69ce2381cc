"""What frameworks ask of parameters, models or scalers, asked of the zerox optimizers that train them."""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager

import torch
import torch.distributed as dist
from torch import Tensor, nn

from zerox.engine import Engine
from zerox.model_names import quote
from zerox.optimizer.clip_together import clip_grad_norm_ as clip_together
from zerox.ranks.wrapped import note_hand_out
from zerox.scaler import GradScaler
from zerox.wrapper.first_values import hand_out_first
from zerox.wrapper.values import give_out, named_buffers_of


def params_of(engine: Engine) -> dict[int, Tensor]:
    """The parameters that it trains, by their ids; frozen ones that were unfrozen since too."""
    inside = engine.inside
    trained = [member.param for bucket in inside.buckets for member in bucket.members]
    return {id(param): param for param in (*trained, *(m.param for m in inside.frozen if m.param.requires_grad))}


def engines_of(engines: Sequence[Engine], params: Iterable[Tensor]) -> list[Engine]:
    """Those of ``engines`` that train one of ``params``."""
    wanted = {id(param) for param in params}
    return [engine for engine in engines if not wanted.isdisjoint(params_of(engine))]


@contextmanager
def no_sync(engines: Iterable[Engine]) -> Iterator[None]:
    with ExitStack() as stack:
        for engine in engines:
            stack.enter_context(engine.no_sync())
        yield


@contextmanager
def standing_outside(engines: Iterable[Engine], where: str) -> Iterator[None]:
    """Around a wait for all ranks that is not zerox's: what one of them does alone meanwhile raises there, and soon."""
    known = [each for engine in engines if (each := engine.inside.ranks.failure_detector) is not None]
    for each in known:
        each.stand_outside(where)
    yield
    for each in known:
        each.stand_outside("")


def clip_grad_norm_(engines: Sequence[Engine], params: Sequence[Tensor], max_norm: float, norm_type: float) -> Tensor:
    """Clips the gradients of ``params`` by their common norm, and returns it. Collective.

    ``engines``: all that train one of ``params``. ValueError for a parameter with a gradient that none of them trains,
    and for a part of the parameters of several optimizers.
    """
    _check_all_trained(engines, params)
    wanted = {id(param) for param in params}
    partly = [engine for engine in engines if not params_of(engine).keys() <= wanted]
    if len(engines) > 1 and partly:
        raise ValueError(
            "zerox: one norm over a part of the parameters of several optimizers is not offered: clip the parameters "
            "of each optimizer by a call of its own, or all of them by one"
        )
    if len(engines) > 1:
        return clip_together(engines, max_norm, norm_type)
    [engine] = engines
    own = params_of(engine)
    some = [param for param in params if id(param) in own] if partly else None
    return engine.clip_grad_norm_(max_norm, norm_type, parameters=some)


def clip_grad_value_(engines: Sequence[Engine], params: Sequence[Tensor], clip_value: float) -> None:
    """Cuts each element of the gradients of ``params``. Collective. ValueError for a part of an optimizer's."""
    _check_all_trained(engines, params)
    wanted = {id(param) for param in params}
    for engine in engines:
        for place, (number, param) in enumerate(params_of(engine).items()):
            if number not in wanted:
                raise ValueError(
                    "zerox: clip_grad_value_() is about all parameters of an optimizer, and "
                    f"{quote(f'param {place}', param)} was not passed: pass all, or use an optimizer for each part"
                )
        engine.clip_grad_value_(clip_value)


def _check_all_trained(engines: Sequence[Engine], params: Iterable[Tensor]) -> None:
    """With DistributedDataParallel other gradients would count, though nothing updates them; here nobody sends them."""
    own = {number for engine in engines for number in params_of(engine)}
    for place, param in enumerate(params):
        if id(param) not in own and param.grad is not None:
            raise ValueError(
                f"zerox: parameter {quote(f'param {place}', param)} has a gradient to clip, and no optimizer of zerox "
                "trains it: freeze it (requires_grad_(False)), leave it out, or give it to the optimizer"
            )


def check_size(engine: Engine, num_processes: int, framework: str) -> None:
    """ValueError if the optimizer averages over other ranks than those that ``framework`` shares batches out to."""
    size = engine.inside.ranks.size
    if size != num_processes:
        raise ValueError(
            f"zerox: {framework} has {num_processes} processes, and the optimizer averages over {size}: build it after "
            f"{framework} has started, without process_group="
        )


WAYS_OUT = {
    "Accelerate": "give its optimizer to prepare()",
    "Fabric": "give its optimizer to fabric.setup() or fabric.setup_optimizers()",
    "Lightning": "return its optimizer from configure_optimizers()",
}


def warn_of_untrained(engines: Sequence[Engine], model: nn.Module, framework: str) -> None:
    """Warns if ``model`` is to be trained on several ranks and none of ``engines`` does: nobody averages its gradients.

    ``framework``: one of WAYS_OUT.
    """
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return
    params = [param for param in model.parameters() if param.requires_grad]
    if model.training and params and not engines_of(engines, params):
        warnings.warn(
            f"zerox: {framework} has {type(model).__name__} to train and no optimizer of zerox with its parameters: "
            "unless one that it does not know of has them, gradients are not averaged over the ranks. To average them, "
            f"{WAYS_OUT[framework]}",
            stacklevel=3,
        )


def share_buffers(engine: Engine, model: nn.Module) -> None:
    """Gives all ranks of the optimizer rank 0's buffers, as DistributedDataParallel does in forward. Collective."""
    ranks = engine.inside.ranks
    note_hand_out(model)
    if ranks.size > 1:
        buffers = list(named_buffers_of(model).values())
        give_out(buffers, lambda values: ranks.broadcast_values(values, f"buffers of {type(model).__name__}"))


def hand_out(model: nn.Module) -> None:
    """Gives all ranks rank 0's values of a model that is to be trained, as DistributedDataParallel begins, also of one
    without an optimizer (an EMA). Collective."""
    params = dict(model.named_parameters())
    if dist.is_initialized() and dist.get_world_size() > 1 and any(param.requires_grad for param in params.values()):
        hand_out_first(params, named_buffers_of(model), dist.group.WORLD, type(model).__name__)


OF_TORCH = (torch.amp.GradScaler, torch.cuda.amp.GradScaler, torch.cpu.amp.grad_scaler.GradScaler)


def takes_all_ranks(scaler: object) -> bool:
    """Makes a scaler of torch's a zerox.GradScaler, in place. False for one of another kind; None is no scaler."""
    if type(scaler) in OF_TORCH:
        scaler.__class__ = GradScaler  # it has methods only
    return scaler is None or isinstance(scaler, GradScaler)
