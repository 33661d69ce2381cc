"""What users write into ``optimizer.state``, beside the same writes into torch's with the same mean gradient."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.bucket_manager.rig import same_bits
from tests.ranks import run_ranks
from tests.thinned import thinned
from zerox import FusedShardedAdam, FusedShardedSGD, ShardedOptimizer, sparse_params

SHAPES = [(10,), (70, 90), (8, 3), (300,), (5, 5), (1,)]  # two ranks share the second one
Params = list[nn.Parameter]
Way = Callable[[Any, Params], object]


def some(params: Params) -> Params:
    return params[1:5]


def halved(optimizer: Any, params: Params) -> None:
    for state in optimizer.state.values():
        state["exp_avg"] = state["exp_avg"] * 0.5


def other(optimizer: Any, params: Params) -> None:
    for p in some(params):
        values = {"step": torch.tensor(3.0), "exp_avg": torch.full_like(p, 0.1)}
        optimizer.state[p] = {**values, "exp_avg_sq": torch.linspace(0.1, 0.2, p.numel()).view_as(p)}


def of_each(write: Callable[[dict[Any, Any], Tensor], object]) -> Way:
    def write_all(optimizer: Any, params: Params) -> None:
        for p in some(params):
            write(optimizer.state, p)

    return write_all


WAYS: dict[str, Way] = {
    "another state": lambda optimizer, _: setattr(optimizer, "state", defaultdict(dict)),
    "state.clear()": lambda optimizer, _: optimizer.state.clear(),
    "state[p].clear()": of_each(lambda state, p: state[p].clear()),
    "state[p] = {}": of_each(lambda state, p: state.__setitem__(p, {})),
    "del state[p]": of_each(lambda state, p: state.__delitem__(p)),
    "state.pop(p)": of_each(lambda state, p: state.pop(p)),
    "a step of 0": of_each(lambda state, p: state[p].__setitem__("step", torch.tensor(0.0))),
    "zero_()": of_each(lambda state, p: (state[p]["exp_avg"].zero_(), state[p]["exp_avg_sq"].zero_())),
    "zeros_like(p)": of_each(lambda state, p: state[p].__setitem__("exp_avg", torch.zeros_like(p))),
    "what lies here": halved,
    "all of it": other,
}


def made() -> Params:
    generator = torch.Generator().manual_seed(0)
    return [nn.Parameter(torch.randn(shape, generator=generator)) for shape in SHAPES]


def gradients(rank: int, step: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(10 * step + rank)
    return [torch.randn(shape, generator=generator) for shape in SHAPES]


def train(optimizer: Any, params: Params, rank: int, step: int) -> None:
    torch.autograd.backward([(p * g.to(p.dtype)).sum() for p, g in zip(params, gradients(rank, step), strict=True)])
    optimizer.step()
    optimizer.zero_grad()


def train_torch(optimizer: Any, params: Params, world_size: int, step: int) -> None:
    of_ranks = zip(*(gradients(rank, step) for rank in range(world_size)), strict=True)
    for p, grads in zip(params, of_ranks, strict=True):
        p.grad = torch.stack(grads).sum(0) / world_size
    optimizer.step()


def beside_torch(rank: int, world_size: int, stage: int) -> list[str]:
    """What differs from AdamW, by way."""
    wrong = []
    for name, way in WAYS.items():
        params, theirs = made(), made()
        optimizer = FusedShardedAdam(params, lr=0.1, stage=stage, bucket_cap_mb=0.01)
        twin = torch.optim.AdamW(theirs, lr=0.1)
        for step in range(6):
            if step in (2, 4):
                way(optimizer, params)
                way(twin, theirs)
            train(optimizer, params, rank, step)
            train_torch(twin, theirs, world_size, step)
        found = optimizer.full_state_dict().get("state", {})
        for number, (p, q) in enumerate(zip(params, theirs, strict=True)):
            pairs = {"the parameter": (p, q)}
            pairs |= {key: (value, twin.state[q][key]) for key, value in found.get(number, {}).items()}
            wrong += [f"{name}: {key} {number}" for key, (a, b) in pairs.items() if not torch.allclose(a, b, atol=1e-6)]
    return wrong


# How ranks cut state is the same in each stage, and whose writes count.
@pytest.mark.parametrize(("stage", "world_size"), thinned([1, 2, 3], [2], [1, 2, 3], [3]))
def test_what_is_written_is_the_state_as_in_torch(world_size: int, stage: int) -> None:
    assert run_ranks(beside_torch, world_size, stage) == [[]] * world_size


KINDS: dict[str, Callable[[Params], Any]] = {
    "8 bits": lambda params: FusedShardedAdam(params, state_dtype="8bit"),
    "bf16 moments": lambda params: FusedShardedAdam(params, state_dtype=torch.bfloat16, stage=3),
    "amsgrad": lambda params: FusedShardedAdam(params, amsgrad=True),
    "SGD": lambda params: FusedShardedSGD(params, lr=0.1, momentum=0.9),
    "a class": lambda params: ShardedOptimizer(params, torch.optim.NAdam),
    "a class that begins itself": lambda params: ShardedOptimizer(params, torch.optim.SGD, lr=0.1, momentum=0.9),
    "bf16 parameters": lambda params: FusedShardedAdam([nn.Parameter(p.detach().bfloat16()) for p in params]),
    "float32 masters": lambda params: FusedShardedAdam(
        [nn.Parameter(p.detach().bfloat16()) for p in params], master_weights="fp32"
    ),
    "a class with masters": lambda params: ShardedOptimizer(
        [nn.Parameter(p.detach().bfloat16()) for p in params], torch.optim.AdamW
    ),
}


def params_of(optimizer: Any) -> Params:
    return [p for group in optimizer.param_groups for p in group["params"]]


def all_of(optimizer: Any) -> Iterator[Tensor]:
    for p in params_of(optimizer):
        yield p.detach()
        yield from (torch.as_tensor(value) for _, value in sorted(optimizer.full_state(p).items()))


def anew(rank: int, world_size: int) -> list[str]:
    """By kind, whether state begins as set_full_state_() of zeros has it, with the masters that there were."""
    wrong = []
    for name, make in KINDS.items():
        found = []
        for by_writing in (True, False):
            optimizer = make(made())
            params = params_of(optimizer)
            for step in range(4):
                if step == 2 and by_writing:
                    optimizer.state = defaultdict(dict)
                elif step == 2:
                    for p in params:
                        kept = optimizer.full_state(p)
                        zeros = {k: v * 0 for k, v in kept.items() if k not in ("master", "mu_product")}
                        optimizer.set_full_state_(p, **zeros, **{k: 1.0 for k in kept if k == "mu_product"})
                train(optimizer, params, rank, step)
            found.append(list(all_of(optimizer)))
        wrong += [name] if not all(same_bits(a, b) for a, b in zip(*found, strict=True)) else []
    return wrong


def test_state_of_every_kind_begins_anew() -> None:
    assert run_ranks(anew, 2) == [[]] * 2


def tables(rank: int, world_size: int) -> list[str]:
    wrong = []
    for name in ("state.clear()", "state[p] = {}", "a step of 0"):
        torch.manual_seed(0)
        model, theirs = (nn.Embedding(200, 4, sparse=True) for _ in range(2))
        theirs.load_state_dict(model.state_dict())
        group = {"params": sparse_params(model), "sparse": True, "weight_decay": 0.0}
        optimizer = FusedShardedAdam([group], lr=0.1)
        twin = torch.optim.SparseAdam(theirs.parameters(), lr=0.1)
        for step in range(4):
            if step == 2:
                for each, net in ((optimizer, model), (twin, theirs)):
                    if name == "state.clear()":
                        each.state.clear()
                    elif name == "a step of 0":
                        each.state[net.weight]["step"] = 0
                    else:
                        each.state[net.weight] = {}
            rows = torch.tensor([step, 3, 70 + step])
            for each, net in ((optimizer, model), (twin, theirs)):
                net(rows).sum().backward()
                each.step()
                each.zero_grad()
        wrong += [name] if not torch.allclose(model.weight, theirs.weight, atol=1e-6) else []
    return wrong


def test_state_of_tables_begins_anew() -> None:
    assert run_ranks(tables, 2) == [[]] * 2


# ---- what ranks have to do together, and what can't be taken in


def of_rank(only: int, write: Callable[[Any, Params], object]) -> Callable[[Any, Params, int], object]:
    return lambda optimizer, params, rank: write(optimizer, params) if rank == only else None


def everywhere(write: Callable[[Any, Params], object]) -> Callable[[Any, Params, int], object]:
    return lambda optimizer, params, rank: write(optimizer, params)


DIFFER = "write the same on all ranks, or load_state_dict()"
REFUSED: dict[str, tuple[Callable[[Any, Params, int], object], str]] = {
    "rank 0 clears": (of_rank(0, lambda optimizer, _: optimizer.state.clear()), DIFFER),
    "rank 1 clears": (of_rank(1, lambda optimizer, _: optimizer.state.clear()), DIFFER),
    "rank 1 has another": (of_rank(1, lambda optimizer, _: setattr(optimizer, "state", defaultdict(dict))), DIFFER),
    "rank 0, of a cut one": (of_rank(0, lambda optimizer, params: optimizer.state.pop(params[1])), DIFFER),
    "rank 1, of a cut one": (of_rank(1, lambda optimizer, params: optimizer.state[params[1]].clear()), DIFFER),
    "rank 0, of all in turn": (
        of_rank(0, lambda optimizer, params: [optimizer.state[p].clear() for p in params]),
        DIFFER,
    ),
    "rank 1, of all in turn": (
        of_rank(1, lambda optimizer, params: [optimizer.state[p].update(exp_avg=p * 0.0) for p in params]),
        DIFFER,
    ),
    "rank 1, a number of one that it has nothing of": (
        of_rank(1, lambda optimizer, params: optimizer.state[params[-1]].update(step=torch.tensor(0.0))),
        DIFFER,
    ),
    "rank 1, values of one that it has nothing of": (
        of_rank(1, lambda optimizer, params: optimizer.state[params[-1]].update(exp_avg=params[-1] * 0.0)),
        DIFFER,
    ),
    "rank 1, all of one that it has nothing of": (
        of_rank(1, lambda optimizer, params: optimizer.state.update({params[-1]: {"exp_avg": params[-1] * 0.0}})),
        DIFFER,
    ),
    "some is missing": (
        everywhere(lambda optimizer, params: [optimizer.state[p].pop("exp_avg_sq") for p in params]),
        "lacks 'exp_avg_sq': give it all of step, exp_avg, exp_avg_sq, or {} to start anew",
    ),
    "another size": (
        everywhere(lambda optimizer, params: [optimizer.state[p].update(exp_avg=torch.zeros(2)) for p in params]),
        "has 2 elements of exp_avg instead of",
    ),
    "half a step": (
        everywhere(lambda optimizer, params: [optimizer.state[p].update(step=0.5) for p in params]),
        "it must be a whole number, 0 or more",
    ),
}


def refused(rank: int, world_size: int) -> list[str]:
    wrong = []
    for name, (write, expected) in REFUSED.items():
        params = made()
        optimizer = FusedShardedAdam(params, lr=0.1, bucket_cap_mb=0.01)
        train(optimizer, params, rank, 0)
        kept = optimizer.state_dict()
        write(optimizer, params, rank)
        for _ in range(2):  # again, until state is loaded
            try:
                train(optimizer, params, rank, 1)
                wrong.append(f"{name}: goes on")
            except RuntimeError as error:
                if expected not in str(error) or "state of parameter" not in str(error):
                    wrong.append(f"{name}: {error}")
            optimizer.zero_grad()
        optimizer.load_state_dict(kept)
        train(optimizer, params, rank, 1)
    return wrong


def test_what_can_t_be_taken_in_raises_on_all_ranks_until_state_is_loaded() -> None:
    assert run_ranks(refused, 2) == [[]] * 2


def masters(rank: int, world_size: int) -> str:
    params = [nn.Parameter(p.detach().bfloat16()) for p in made()]
    optimizer = FusedShardedAdam(params, master_weights="fp32")
    train(optimizer, params, rank, 0)
    for p in params:
        optimizer.state[p]["master"] = torch.zeros(p.shape)
    with pytest.raises(RuntimeError) as raised:
        optimizer.step()
    return str(raised.value)


def test_a_master_that_is_given_names_the_way() -> None:
    assert all("call optimizer.set_full_state_(p, master=...)" in each for each in run_ranks(masters, 2))


def moved(rank: int, world_size: int) -> list[bool]:
    """As Lightning moves state to a device and back."""
    params, theirs = made(), made()
    optimizer, twin = FusedShardedAdam(params, bucket_cap_mb=0.01), FusedShardedAdam(theirs, bucket_cap_mb=0.01)
    for step in range(3):
        for p, state in list(optimizer.state.items()) if rank == step else []:
            optimizer.state[p] = {key: value.clone() for key, value in state.items()}
        train(optimizer, params, rank, step)
        train(twin, theirs, rank, step)
    return [same_bits(a, b) for a, b in zip(all_of(optimizer), all_of(twin), strict=True)]


def test_copies_of_what_was_there_change_nothing_on_whichever_rank() -> None:
    assert all(map(all, run_ranks(moved, 2)))


def moved_after_it_diverged(rank: int, world_size: int) -> bool:
    params = [nn.Parameter(p.detach().bfloat16()) for p in made()]
    optimizer = FusedShardedAdam(params, master_weights="fp32")
    train(optimizer, params, rank, 0)
    for p in params:
        p.grad = torch.full_like(p, float("nan"))
    optimizer.step()
    for state in optimizer.state.values():
        state.update({key: value.clone() for key, value in state.items()})
    optimizer.step()
    return all(bool(state["master"].isnan().all()) for state in optimizer.state.values())


def test_copies_that_are_nan_are_copies_too() -> None:
    assert all(run_ranks(moved_after_it_diverged, 2))


def seen(rank: int, world_size: int) -> tuple[bool, bool, bool, bool]:
    params = made()
    optimizer = FusedShardedAdam(params, bucket_cap_mb=0.01)
    train(optimizer, params, rank, 0)
    entry = optimizer.state[params[1]]
    optimizer.state["of mine"] = {"count": 1}
    entry["my own"] = 7
    has_all = all({"step", "exp_avg", "exp_avg_sq"} <= optimizer.state[p].keys() for p in params)
    for p in params:
        optimizer.state[p].update(step=0.0, exp_avg=torch.zeros_like(p), exp_avg_sq=torch.zeros_like(p))
    saved = optimizer.state_dict()["state"]
    is_anew = not any(bool(value.own.any()) for number in range(len(params)) for value in saved[number].values())
    train(optimizer, params, rank, 1)
    is_live = optimizer.state[params[1]] is entry and int(entry["step"]) == 1
    return has_all, is_anew, is_live, entry["my own"] == 7 and optimizer.state["of mine"] == {"count": 1}


def test_entries_stay_what_they_are_and_state_dict_shows_what_was_written() -> None:
    assert run_ranks(seen, 2) == [(True, True, True, True)] * 2
