"""Without a wrapper: the first step() raises if ranks have other parameters, and names what is around the optimizer."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from tests.ranks import Once, run_ranks
from zerox import FusedShardedAdam, ShardedOptimizer
from zerox.optimizer.first_look import squares_of
from zerox.options import OptimizerOptions


def net(rank: int = 0) -> nn.Sequential:
    torch.manual_seed(rank)
    return nn.Sequential(nn.Linear(16, 300), nn.Tanh(), nn.Linear(300, 4))


def stepped(model: nn.Module, optimizer: Any) -> str:
    """What the step said: its error, or its warnings."""
    optimizer.zero_grad()
    model(torch.ones(4, 16)).square().mean().backward()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            optimizer.step()
        except RuntimeError as error:
            return f"error: {error}"
    return "".join(f"warning: {each.message}" for each in caught if "zerox" in str(each.message))


def write(rank: int, model: nn.Sequential) -> None:
    if rank == 1:
        with torch.no_grad():
            model[2].weight[3, 7] += 1e-3


def move(rank: int, model: nn.Sequential) -> None:
    if rank == 1:
        model[2].weight.data = model[2].weight.detach() + 1e-3


def finds(rank: int, world_size: int) -> dict[str, str]:
    found = {}
    for stage in (1, 2, 3):
        for change in (write, move):
            if stage == 3 and change is write:
                continue  # it waits for the others
            model = net(rank)
            optimizer = FusedShardedAdam(model.named_parameters(), stage=stage)
            change(rank, model)
            before = float(model[0].weight.detach().double().sum())
            found[f"{change.__name__}, stage {stage}"] = stepped(model, optimizer)
            assert float(model[0].weight.detach().double().sum()) == before, "nothing was updated"
            optimizer.broadcast_parameters()
            found[f"{change.__name__}, stage {stage}, then broadcast"] = stepped(model, optimizer)
            change(rank, model)
            found[f"{change.__name__}, stage {stage}, later"] = "" if stage == 3 else stepped(model, optimizer)
            optimizer.load_state_dict(optimizer.state_dict())
            if change is write:
                write(rank, model)
                found[f"{change.__name__}, stage {stage}, after a load"] = stepped(model, optimizer)
    model = net(rank)
    optimizer = FusedShardedAdam(model.named_parameters(), stage=3)
    model[2].weight.data = model[2].weight.detach() + rank  # on all ranks, but other values
    found["moved on all, stage 3"] = stepped(model, optimizer)
    model = net(rank)
    guest = ShardedOptimizer(model.parameters(), torch.optim.SGD, lr=0.1)
    write(rank, model)
    found["write, of torch's kind"] = stepped(model, guest)
    model = net(rank)
    model[2].requires_grad_(False)
    optimizer = FusedShardedAdam(model.named_parameters())
    write(rank, model)
    found["write, frozen"] = stepped(model, optimizer)
    return found


FINDS = Once(finds, 2)


def test_it_raises_on_all_ranks_and_names_the_first() -> None:
    for found in FINDS():
        for what, said in found.items():
            if what.endswith(("broadcast", "later")):
                assert said == "", what
            else:
                assert said.startswith("error: zerox: ranks have different parameters"), what
                assert "2.weight'" in said, what
                assert "optimizer.broadcast_parameters()" in said
                assert "zerox.DistributedDataParallel" in said


def before_a_capture(rank: int, world_size: int) -> list[str]:
    """Of a step() that is captured later: synchronize() comes before it."""
    said = []
    model = net(rank)
    optimizer = FusedShardedAdam(model.named_parameters())
    optimizer.inside.groups.options = OptimizerOptions(capturable=True)  # the constructor takes it on GPUs alone
    for change in (write, None, write, None):
        if change is not None:
            change(rank, model)
        model(torch.ones(4, 16)).square().mean().backward()
        try:
            optimizer.synchronize()
            said.append("")
        except RuntimeError as error:
            said.append(str(error))
            optimizer.zero_grad()
            optimizer.broadcast_parameters()
    return said


def test_synchronize_looks_for_a_step_that_will_be_captured() -> None:
    for first, after, later, last in run_ranks(before_a_capture, 2):
        assert first.startswith("zerox: ranks have different parameters")
        assert after == later == last == "", "it has looked"


def alike(rank: int, world_size: int) -> list[str]:
    """What is as good as the same: signs of zero, payloads of NaN, masters, parameters that lie elsewhere on one."""
    said = []
    for stage in (1, 2, 3):
        model = net(rank)
        optimizer = FusedShardedAdam(model.parameters(), stage=stage)
        if rank == 1:
            for param in model.parameters():
                param.data = param.detach().clone()
        said.append(stepped(model, optimizer))
    model = net(rank)
    optimizer = FusedShardedAdam(model.parameters())
    with torch.no_grad():
        model[2].weight[0, 0] = -0.0 if rank else 0.0
        model[2].bias[0] = math.nan
        if rank == 1:
            model[2].bias.view(torch.int32)[0] += 1  # another NaN
    said.append(stepped(model, optimizer))
    narrow = net(rank).bfloat16()
    kept = FusedShardedAdam(narrow.parameters(), master_weights="fp32")
    for _ in range(2):
        kept.zero_grad()
        narrow(torch.ones(4, 16).bfloat16()).float().square().mean().backward()
        kept.step()
    kept.load_state_dict(kept.state_dict())
    kept.step()
    return said


def test_no_false_alarm() -> None:
    assert run_ranks(alike, 2) == [["", "", "", ""]] * 2


def experts(rank: int, world_size: int) -> list[str]:
    """Each pair of ranks has an expert of its own; those of one pair must be the same."""
    pairs = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    said = []
    for differs in (False, True):
        torch.manual_seed(rank // 2)
        shared, expert = nn.Linear(16, 16), nn.Linear(16, 16)
        model = nn.Sequential(shared, expert)
        groups = [{"params": shared.parameters()}, {"params": expert.parameters(), "process_group": pairs[rank // 2]}]
        optimizer = FusedShardedAdam(groups)
        if differs and rank == 3:
            with torch.no_grad():
                expert.weight[0, 0] += 1
        try:
            said.append(stepped(model, optimizer))
        except ValueError as error:
            said.append(str(error))
    return said


def test_experts_are_compared_in_their_own_group() -> None:
    for alone, differs in run_ranks(experts, 4):
        assert alone == ""
        assert "ranks must agree" in differs


class Around(nn.Module):
    def __init__(self, rank: int) -> None:
        super().__init__()
        torch.manual_seed(rank)
        self.frozen = nn.Linear(16, 16).requires_grad_(False)
        self.trained = nn.Linear(16, 4)
        self.head = nn.Linear(4, 4)
        self.register_buffer("table", torch.randn(16))

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.head(self.trained(self.frozen(x + self.table)))
        return found


def same(module: nn.Module) -> None:
    for tensor in (*module.parameters(), *module.buffers()):
        dist.broadcast(tensor.detach(), 0)


def warned(rank: int, world_size: int) -> dict[str, list[str]]:
    found = {}

    def case(name: str, change: Callable[[Around], object], params: Callable[[Around], Any]) -> None:
        model = Around(rank)
        change(model)
        optimizer = FusedShardedAdam(params(model))
        found[name] = [stepped(model, optimizer), stepped(model, optimizer)]

    def trained(model: Around) -> list[nn.Parameter]:
        return [param for param in model.parameters() if param.requires_grad]

    case("nothing", same, trained)
    case("frozen", lambda model: same(model) if rank < 0 else same_but(model, "frozen"), trained)
    case("buffer", lambda model: same_but(model, "buffer"), trained)
    case("head", same, lambda model: model.trained.parameters())
    case("sync", lambda model: (same(model), setattr(model, "require_backward_grad_sync", True)), trained)
    model = Around(rank)
    same(model)
    optimizer = FusedShardedAdam(trained(model) if rank == 0 else [nn.Parameter(p.detach()) for p in trained(model)])
    optimizer.step()  # rank 1 finds no model
    found["one rank alone"] = ["", ""]
    return found


def same_but(model: Around, what: str) -> None:
    same(model)
    if dist.get_rank() == 1:
        with torch.no_grad():
            (model.frozen.weight if what == "frozen" else model.table)[0] += 1


def test_what_is_around_it_is_named_once() -> None:
    wanted = {
        "frozen": "parameter 'frozen.weight' is in no optimizer of zerox and not the same on all ranks",
        "buffer": "buffer 'table' is in no optimizer of zerox and not the same on all ranks",
        "head": "nobody averages the gradient of parameter 'head.weight' and 1 more",
        "sync": "attribute require_backward_grad_sync, which only a wrapper heeds",
    }
    for found in run_ranks(warned, 2):
        for name, (first, second) in found.items():
            assert second == "", name
            assert (wanted[name] in first) if name in wanted else first == "", (name, first)


def test_any_element_shows() -> None:
    values = torch.randn(5000)
    known = squares_of(values)
    for place in (0, 17, 255, 256, 4999):
        changed = values.clone()
        changed[place] *= 1 + 2**-20
        assert squares_of(changed) != known
    assert squares_of(values.clone()) == known
    for tensor in (
        torch.arange(5),
        torch.tensor([True, False]),
        torch.randn(3) * 1j,
        torch.zeros(0),
        torch.tensor(2.0),
    ):
        assert squares_of(tensor) == squares_of(tensor.clone())
    assert squares_of(torch.arange(5)) != squares_of(torch.arange(1, 6))


def joined(rank: int, world_size: int) -> str:
    """Ranks that have batches compare theirs."""
    model = net(rank)
    optimizer = FusedShardedAdam(model.named_parameters())
    said = ""
    try:
        with optimizer.join():
            write(rank, model)
            said = stepped(model, optimizer)
            raise RuntimeError("no rank follows")
    except RuntimeError:
        return said


def test_inside_join_too() -> None:
    for said in run_ranks(joined, 2):
        assert "ranks have different parameters" in said


@pytest.mark.parametrize("stage", [2, 3])
def test_one_rank_alone_looks_at_nothing(stage: int) -> None:
    model = net()
    assert stepped(model, FusedShardedAdam(model.parameters(), stage=stage)) == ""
