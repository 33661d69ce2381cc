"""Each rank's own parameters in a checkpoint, under the rank's number: Note [Each rank's own] in unwrapped_params.py.

Ranks have one name for different tensors. So keys begin with the rank, and host.pt has a record of each rank: options
of its param groups, and what of the state are no tensors. Beside own parameters of the optimizer there are those that
no wrapper has, and no optimizer of zerox of several ranks, if they are not the same on all: torch.optim may train them.
Where there are such parameters, everything else of the model that no wrapper has, as running means beside them, is a
rank's own too. Without them all is as it always was.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

from zerox import _C as C
from zerox.checkpoint.everyone import Everyone
from zerox.checkpoint.groups import groups_by_name
from zerox.checkpoint.manifest import OWN, CheckpointError
from zerox.checkpoint.names import MODEL, OPTIMIZER, naming_in
from zerox.engine import Engine
from zerox.ranks.dtensors import is_dtensor
from zerox.ranks.holders import holders_of
from zerox.ranks.wrapped import has_wrapped, modules_in_wrappers, tensors_in_wrappers
from zerox.sliced_tensor import SlicedTensor

Saved = Mapping[str, TensorStorageMetadata]
Said = tuple[bool, dict[str, str]] | None
RANK = "rank."
PLAIN = (int, float, str, bool, type(None))


class RanksOwn:
    """This rank's own part of model and optimizer. ``tensors``: of the model, by their keys in the checkpoint;
    ``others``: what its modules have that are no tensors; ``names``: of the optimizer's own parameters, by id.
    """

    def __init__(self, model: nn.Module, optimizer: Engine, shared: Mapping[int, str], ranks: Everyone) -> None:
        """``shared``: names of the parameters that ranks share. CheckpointError if own ones have the same."""
        own = optimizer.inside.calls.own
        self.optimizer = optimizer
        self.shared = shared
        self.rank = ranks.rank
        self.are_some = own.are_some
        self.is_asked = not ranks.has_own_params and has_wrapped(member.param for member in optimizer.inside.members)
        self.params = dict(own.params) if own.are_some else {}
        self.names = _names(model, optimizer, self.params)
        self.tensors: dict[str, Tensor] = {}
        self.others: dict[str, Any] = {}
        self._read: dict[str, dict[str, Tensor]] = {}  # by name: state that is read
        known = [*shared.values(), *self.names.values()]
        if twice := sorted({name for name in self.names.values() if known.count(name) > 1}):
            raise CheckpointError(
                f"two parameters of the optimizer have one name, and one of them is not in the model: {twice}"
            )

    def take_out(self, model: nn.Module, tensors: dict[str, Tensor], others: dict[str, Any]) -> None:
        """Takes what is this rank's own out of what the model has: ``tensors`` by their keys, ``others`` by names."""
        if not self.are_some:
            return
        is_own = _finds_own(model, self.optimizer)
        of_model = {key: value for key, value in tensors.items() if key.startswith(MODEL)}
        own = {key: value for key, value in of_model.items() if is_own(key.removeprefix(MODEL), value)}
        for key in own:
            del tensors[key]
        self.others = {name: others.pop(name) for name in list(others) if is_own(name, None)}
        in_model = {id(param) for param in model.parameters()}
        apart = {MODEL + name: self.params[number] for number, name in self.names.items() if number not in in_model}
        for key, value in (own | apart).items():
            if isinstance(value, SlicedTensor) or is_dtensor(value):
                raise CheckpointError(
                    f"{key.removeprefix(MODEL)} is this rank's own (no DistributedDataParallel has it) and a DTensor, "
                    "which checkpoints do not have: save its optimizer's state_dict() on each rank, with "
                    "ZEROX_STATE_PULL=0"
                )
            self.tensors[_prefix(self.rank) + key] = value.detach()

    # ---- saving

    def describe(self, model: nn.Module) -> Said:
        """What this rank tells others before a save: whether the optimizer has own parameters; and if not, by name a
        line about each that no wrapper and no optimizer of several ranks has. None from a rank of another optimizer."""
        if self.are_some or not self.is_asked:
            return (True, {}) if self.are_some else None
        bare, params = naming_in(model), dict(model.named_parameters())
        holders = [each.inside for each in holders_of({id(param) for param in params.values()})]
        known = {id(member.param) for each in holders if each.ranks.size > 1 for member in each.members}
        known |= tensors_in_wrappers()
        outside = {bare(name): param for name, param in params.items() if id(param) not in known}
        return False, {name: _line(param) for name, param in outside.items() if _has_values(param)}

    def learn(self, everyones: Sequence[Said]) -> None:
        """The same on all ranks, from what all said."""
        given = [each for each in everyones if each is not None]
        self.are_some = any(are_some or lines != given[0][1] for are_some, lines in given)

    def to_save(self) -> tuple[dict[str, Tensor], dict[str, Any]]:
        """Its tensors, and this rank's record. Raises CheckpointError."""
        tensors, state = dict(self.tensors), {}
        for number, name in self.names.items():
            param = self.params[number]
            live = self.optimizer.state.get(param) or {}
            kept = {key: value for key, value in live.items() if isinstance(value, Tensor)}
            rest = {key: value for key, value in live.items() if key not in kept}
            if strange := [key for key, value in rest.items() if not _is_plain(value)]:
                raise CheckpointError(
                    f"{strange[0]} in the state of {name}, this rank's own parameter, is of the class "
                    f"{type(rest[strange[0]]).__qualname__}: checkpoints have tensors, numbers and strings there"
                )
            beside = [key for key, value in kept.items() if not value.dim() and value.device.type != "cpu"]
            tensors |= {self._key(name, key): value for key, value in kept.items()}
            if live:
                state[name] = {"tensors": list(kept), "on_device": beside, "rest": rest}
        groups = groups_by_name(self.optimizer, self.shared, self.names)
        own = set(self.names.values())
        alone = [group for group in groups if group["names"] and own.issuperset(group["names"])]
        mixed = [group["names"] for group in groups if 0 < len(own.intersection(group["names"])) < len(group["names"])]
        # A shared parameter comes first in groups_by_name(): its group is in host.pt, with options for all ranks.
        beside_shared = {name: names[0] for names in mixed for name in names if name in own}
        empty = {index: {**group, "names": []} for index, group in enumerate(groups) if not group["names"]}
        of_groups = {"groups": alone, "beside": beside_shared, "empty": empty}
        return tensors, {"state": state, "model": self.others, **of_groups}

    # ---- loading

    def learn_from(self, host: Mapping[str, Any], saved: Saved, ranks: Everyone, strict: bool) -> None:
        """CheckpointError if what is each rank's own was saved by another number of ranks.

        Without ``strict`` an optimizer that has nothing of the kind takes the rest.
        """
        records = host.get(OWN)
        if records is None:
            return
        if len(records) == ranks.size:
            self.are_some = True
        elif strict or self.are_some:
            keys = sorted(key for key in saved if key.startswith(RANK))
            first = next((key.partition(f".{MODEL}")[2] for key in keys if f".{MODEL}" in key), "")
            raise CheckpointError(
                f"it has parameters that are each rank's own (no DistributedDataParallel had them)"
                f"{', as ' + first if first else ''}, of {len(records)} ranks, and this is a run of {ranks.size}: load "
                f"it on {len(records)} ranks"
            )

    def groups(self, host: Mapping[str, Any]) -> list[dict[str, Any]]:
        """All param groups that were saved of this rank, with own parameters beside those that they were with."""
        record = self._record(host)
        beside: dict[str, list[str]] = {}
        for name, shared in record.get("beside", {}).items():
            beside.setdefault(shared, []).append(name)
        found = []
        for group in host["groups"]:
            added = [name for shared in group["names"] for name in beside.get(shared, ())]
            found.append({**group, "names": [*group["names"], *added]})
        return [*found, *record.get("groups", ())]

    def empty_groups(self, host: Mapping[str, Any]) -> list[tuple[dict[str, Any], dict[str, Any]]]:
        """Groups without parameters on this rank, each with what it was: a schedule goes on from their options too."""
        empty, rules = self._record(host).get("empty", {}), self.optimizer.inside.rules
        live = [(index, group) for index, group in enumerate(self.optimizer.param_groups) if not group["params"]]
        pairs = [(group, empty[index]) for index, group in live if index in empty]
        return [(group, saved) for group, saved in pairs if not rules.misfit(group, saved)]

    def names_differ(self, host: Mapping[str, Any], saved: Saved) -> list[str]:
        """Lines for what is missing of this rank's own, and for what else there is of it."""
        prefix = _prefix(self.rank)
        here = f"rank {self.rank}'s own"
        found = {key for key in saved if key.startswith(prefix + MODEL)} if host.get(OWN) is not None else set()
        record, live = self._record(host), set(self.names.values())
        then = {name for group in record.get("groups", ()) for name in group["names"]} | set(record.get("beside", ()))
        now_and_then = live & {key.removeprefix(prefix + MODEL) for key in found}
        missing = sorted(key.removeprefix(prefix) for key in self.tensors.keys() - found)
        missing += [OPTIMIZER + name for name in sorted(now_and_then - then)]  # another optimizer trained it
        others = sorted(key.removeprefix(prefix) for key in found - self.tensors.keys())
        others += [OPTIMIZER + name for name in sorted(then - live)]
        return [f"missing: {name}, {here}" for name in missing] + [f"unexpected: {name}, {here}" for name in others]

    def to_read(self, host: Mapping[str, Any], saved: Saved) -> dict[str, Tensor]:
        """The tensors of this rank's own by their keys: those that are there, and memory for state. CheckpointError if
        the record names one that there is not."""
        found = {key: tensor for key, tensor in self.tensors.items() if key in saved}
        for number, name in self.names.items():
            param = self.params[number]
            about = self._record(host).get("state", {}).get(name)
            self._read[name] = {}
            for key in about["tensors"] if about else ():
                full = self._key(name, key)
                if full not in saved:
                    raise CheckpointError(f"it does not have {full}")
                then = saved[full]
                device = param.device if len(then.size) or key in about["on_device"] else torch.device("cpu")
                live = (self.optimizer.state.get(param) or {}).get(key)
                self._read[name][key] = _place(live, param, then, device)
                found[full] = self._read[name][key]
        return found

    def take_state(self, host: Mapping[str, Any], saved: Saved) -> None:
        """Puts what was read where torch keeps it. Of a parameter that was saved without state there is none."""
        record = self._record(host).get("state", {})
        for number, name in self.names.items():
            param = self.params[number]
            if self._read[name] or name in record:
                self.optimizer.state[param] = {**self._read[name], **record[name]["rest"]}
            elif self._is_saved(name, saved):
                self.optimizer.state.pop(param, None)

    def others_saved(self, host: Mapping[str, Any]) -> dict[str, Any]:
        saved = self._record(host).get("model", {})
        return {name: value for name, value in saved.items() if name in self.others}

    # ---- inside

    def _record(self, host: Mapping[str, Any]) -> dict[str, Any]:
        """This rank's, if there is one."""
        saved = host.get(OWN) or ()
        return saved[self.rank] if self.are_some and self.rank < len(saved) else {}

    def _is_saved(self, name: str, saved: Saved) -> bool:
        return _prefix(self.rank) + MODEL + name in saved

    def _key(self, name: str, what: str) -> str:
        return f"{_prefix(self.rank)}{OPTIMIZER}{name}.{what}"


def refuse_own(host: Mapping[str, Any]) -> None:
    """CheckpointError for a checkpoint that has parameters of ranks: they can't be one model's in one file."""
    if host.get(OWN) is not None:
        raise CheckpointError(
            f"it has parameters that are each rank's own, of {len(host[OWN])} ranks, and one file has no place for "
            f"them: call zerox.load() on {len(host[OWN])} ranks, and save model.state_dict() and "
            "optimizer.full_state_dict(to=RANK) of each"
        )


def _prefix(rank: int) -> str:
    return f"{RANK}{rank}."


def _names(model: nn.Module, optimizer: Engine, own: Mapping[int, Tensor]) -> dict[int, str]:
    """As parameter_names(): in the model, else as the optimizer was given it, else "param 3" by torch's count."""
    bare = naming_in(model)
    of_model = {id(param): bare(name) for name, param in model.named_parameters()} if own else {}
    found: dict[int, str] = {}
    place = 0
    for group in optimizer.param_groups if own else ():
        given = group.get("param_names") or ()
        for index, param in enumerate(group["params"]):
            if id(param) in own:
                name = str(given[index]) if index < len(given) else f"param {place}"
                found[id(param)] = of_model.get(id(param), name)
            place += 1
    return found


def _finds_own(model: nn.Module, optimizer: Engine) -> Callable[[str, Tensor | None], bool]:
    """A function that says of a name in a checkpoint, and its tensor if it is one, whether it is each rank's own."""
    bare, inside, own = naming_in(model), modules_in_wrappers(), optimizer.inside.calls.own.params
    known = [*model.named_parameters(remove_duplicate=False), *model.named_buffers(remove_duplicate=False)]
    live = {bare(name): id(tensor) for name, tensor in known}
    shared = tensors_in_wrappers() | {id(member.param) for member in optimizer.inside.members}
    paths = [(bare(f"{path}.") if path else "", module) for path, module in model.named_modules(remove_duplicate=False)]
    of_path = dict(paths)  # of a wrapper and its module, which have one, the module

    def is_own(name: str, value: Tensor | None) -> bool:
        if name in live:
            is_part = isinstance(value, SlicedTensor) or is_dtensor(value)  # of one that ranks have together
            return live[name] in own or not (live[name] in shared or is_part)
        of = max((path for path in of_path if name.startswith(path)), key=len)
        return id(of_path[of]) not in inside

    return is_own


def _place(live: Any, param: Tensor, then: TensorStorageMetadata, device: torch.device) -> Tensor:
    """Where a tensor of the state is read: what is there, if it is alike."""
    shape, dtype = then.size, then.properties.dtype
    is_alike = isinstance(live, Tensor) and not isinstance(live, SlicedTensor)
    if is_alike and (live.shape, live.dtype, live.device) == (shape, dtype, device):
        found: Tensor = live.detach()
        return found
    if shape == param.shape:
        return torch.empty_like(param, dtype=dtype, device=device, requires_grad=False)
    return torch.empty(shape, dtype=dtype, device=device)


def _has_values(param: Tensor) -> bool:
    return not (param.is_meta or is_dtensor(param)) and param.layout is torch.strided


def _line(param: Tensor) -> str:
    return f"{tuple(param.shape)} {param.dtype} {C.digest(param.detach().contiguous())}"


def _is_plain(value: Any) -> bool:
    if isinstance(value, Mapping):
        return all(isinstance(key, PLAIN) and _is_plain(each) for key, each in value.items())
    return isinstance(value, PLAIN) or (isinstance(value, (list, tuple)) and all(map(_is_plain, value)))
