"""What torch keeps private (zerox/_torch.py, csrc/torch_internals.h): each name taken away, and what that means."""

from __future__ import annotations

import functools
import importlib.util
import io
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any, NamedTuple

import pytest
import torch
import torch._dynamo.callback
import torch.distributed as dist
import torch.distributed.checkpoint.filesystem
import torch.distributed.checkpoint.state_dict as dcp
import torch.distributed.tensor._utils
from torch import Tensor, nn
from torch.distributed.algorithms.join import Joinable
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

import zerox
from zerox import _C as C
from zerox import _torch
from zerox.residency.residency import Residency, check_operators
from zerox.rules.probe import no_messages

ROOT = Path(__file__).parents[1]
SOURCE = ROOT / "zerox/_torch.py"
RAISES = object()


class Use(NamedTuple):
    """A function of _torch.py, and what it returns without the name: ``RAISES`` is an error that has the name."""

    of: Any  # a module, a class or an object, which has the name
    name: str
    function: str
    call: Callable[[], Any]
    without: Any = RAISES

    def take_away(self, monkeypatch: pytest.MonkeyPatch) -> None:
        if not isinstance(self.of, type | ModuleType):
            monkeypatch.delitem(vars(self.of), self.name)
        elif self.name in vars(self.of):
            monkeypatch.delattr(self.of, self.name)
        else:  # a class in C has it, from which nothing can be taken
            monkeypatch.setattr(self.of, self.name, Gone(self.name))


class Gone:
    def __init__(self, name: str) -> None:
        self.name = name

    def __get__(self, *_: object) -> Any:
        raise AttributeError(self.name)


def dtensor() -> Any:
    made = Tensor._make_wrapper_subclass(DTensor, (1,))  # type: ignore[attr-defined]
    made._spec, made._local_tensor = "spec", torch.zeros(1)
    return made


def ignoring() -> nn.Module:
    module = nn.Linear(2, 2)
    DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(module, ["bias"])
    return module


def updated_inside() -> nn.Parameter:
    from torch.distributed.optim import _apply_optimizer_in_backward

    param = nn.Parameter(torch.zeros(1))
    _apply_optimizer_in_backward(torch.optim.SGD, [param], {"lr": 1.0})
    return param


def of_torch(name: str) -> ModuleType:
    return sys.modules[f"torch.{name}"]


def group() -> dist.ProcessGroup:
    return dist.ProcessGroup(dist.HashStore(), 0, 1)


CPU = torch.device("cpu")
GLOO = dist.ProcessGroup.BackendType.GLOO
MODULE, IGNORING, UPDATED, CUT = nn.Linear(2, 2), ignoring(), updated_inside(), dtensor()
OPTIMIZER = torch.optim.SGD(MODULE.parameters(), lr=1.0)
ATTENTION, ON_META = nn.MultiheadAttention(2, 1), torch.empty(1, device="meta")
ROWS = torch.sparse_coo_tensor([[1]], [[2.0]], (3, 1), check_invariants=False)
MESH = SimpleNamespace(get_coordinate=lambda: None, _is_current_rank_part_of_mesh=lambda: False)
NOWHERE: Any = SimpleNamespace(shape=(2,), placements=[], device_mesh=MESH)
FRAMES = torch._C._dynamo.eval_frame
TIMES = SimpleNamespace(_timeout=1)
MUL = torch.ops.aten.mul_.Scalar


def from_file() -> Tensor:
    file = io.BytesIO()
    torch.save(torch.zeros(3), file)
    file.seek(0)
    found = torch.load(file, map_location="meta", weights_only=True)
    assert isinstance(found, Tensor)
    return found


FROM_FILE = from_file()
IN_FILE = FROM_FILE.untyped_storage()


def own_backend() -> None:
    _torch.set_backend(made := group(), CPU, GLOO, dist.ProcessGroupGloo(dist.HashStore(), 0, 1))
    assert _torch.backend_of(made, CPU).name() == "gloo"


def of_each(name: str, *others: Any) -> float:
    """Of a tensor of one 2, which the operators with an underscore write."""
    tensors = [torch.full((1,), 2.0)]
    made = _torch.for_each(name, tensors, *others)
    return float((tensors if name.endswith("_") else made)[0])


USES = [
    Use(Tensor, "_version", "version_of", lambda: _torch.version_of(torch.zeros(1))),
    Use(Tensor, "_indices", "rows_of", lambda: _torch.rows_of(ROWS)),
    Use(Tensor, "_values", "values_of", lambda: _torch.values_of(ROWS)),
    Use(Tensor, "_nnz", "num_rows_of", lambda: _torch.num_rows_of(ROWS)),
    Use(DTensor, "_local_tensor", "local_tensor_of", lambda: _torch.local_tensor_of(CUT)),
    Use(DTensor, "_spec", "spec_of", lambda: _torch.spec_of(CUT)),
    Use(MUL, "_schema", "written_by", lambda: _torch.written_by(MUL, [1], {"other": 2}), without=[1, 2]),
    Use(MUL, "_schema", "returns_views", lambda: _torch.returns_views(MUL), without=True),
    Use(MODULE, "_parameters", "own_params_of", lambda: _torch.own_params_of(MODULE)),
    Use(MODULE, "_modules", "children_of", lambda: _torch.children_of(MODULE)),
    Use(
        of_torch("distributed.tensor._utils"),
        "compute_local_shape_and_global_offset",
        "offsets_of",
        lambda: _torch.offsets_of(NOWHERE),
    ),
    Use(torch.UntypedStorage, "_cdata", "storage_of", lambda: _torch.storage_of(ON_META), id(ON_META)),
    Use(IN_FILE, "_checkpoint_offset", "offset_in_file", lambda: _torch.offset_in_file(FROM_FILE), None),
    Use(nn.MultiheadAttention, "_reset_parameters", "reset_of", lambda: _torch.reset_of(ATTENTION), None),
    Use(Tensor, "_make_wrapper_subclass", "make_wrapper", lambda: _torch.make_wrapper(DTensor, (1,), (1,))),
    Use(
        of_torch("autograd.grad_mode"),
        "_unsafe_preserve_version_counter",
        "keep_versions",
        lambda: _torch.keep_versions([torch.zeros(1)]),
    ),
    Use(torch._C, "_current_graph_task_id", "in_backward", _torch.in_backward),
    Use(UPDATED, "_in_backward_optimizers", "is_updated_inside", lambda: _torch.is_updated_inside(UPDATED), False),
    Use(
        torch,
        "_amp_foreach_non_finite_check_and_unscale_",
        "unscale",
        lambda: _torch.unscale([torch.ones(1)], torch.zeros(1), torch.ones(1)),
    ),
    *(
        Use(torch, f"_foreach_{name}", "for_each", functools.partial(of_each, name, *others), found)
        for name, others, found in (
            ("norm", (), 2.0),
            ("mul", (torch.tensor(3.0),), 6.0),
            ("mul_", (3.0,), 6.0),
            ("add_", ([torch.ones(1)],), 3.0),
            ("copy_", ([torch.ones(1)],), 1.0),
            ("lerp", ([torch.ones(1)], 0.25), 1.75),
            ("lerp_", ([torch.ones(1)], 0.25), 1.75),
        )
    ),
    Use(of_torch("utils._python_dispatch"), "TorchDispatchMode", "each_operator", lambda: _torch.each_operator(print)),
    Use(of_torch("autograd.profiler"), "_is_profiler_enabled", "profiler_is_on", _torch.profiler_is_on, True),
    *(
        Use(OPTIMIZER, name, "has_own_step_hooks", lambda: _torch.has_own_step_hooks(OPTIMIZER), True)
        for name in ("_optimizer_step_pre_hooks", "_optimizer_step_post_hooks")
    ),
    *(
        Use(of_torch("optim.optimizer"), name, "has_step_hooks", lambda: _torch.has_step_hooks(OPTIMIZER), True)
        for name in ("_global_optimizer_pre_hooks", "_global_optimizer_post_hooks")
    ),
    Use(Optimizer, "_optimizer_step_code", "trace_step", lambda: _torch.trace_step(OPTIMIZER), None),
    Use(
        OPTIMIZER,
        "_zero_grad_profile_name",
        "zero_grad_name",
        lambda: _torch.zero_grad_name(OPTIMIZER),
        "Optimizer.zero_grad#SGD.zero_grad",
    ),
    Use(dist.distributed_c10d, "_world", "listed_groups", _torch.listed_groups),
    Use(type(dist.distributed_c10d._world), "pg_map", "listed_groups", _torch.listed_groups),
    Use(dist.distributed_c10d, "_world", "groups_before_fork", _torch.groups_before_fork, {}),
    Use(type(dist.distributed_c10d._world), "pg_map", "groups_before_fork", _torch.groups_before_fork, {}),
    Use(dist.ProcessGroup, "_get_backend", "backend_of", lambda: _torch.backend_of(group(), CPU)),
    Use(dist.ProcessGroup, "_register_backend", "set_backend", own_backend),
    Use(dist.ProcessGroup, "_set_default_backend", "set_backend", own_backend),
    Use(TIMES, "_timeout", "timeout_in", lambda: _torch.timeout_in(TIMES), None),
    Use(TIMES, "_timeout", "set_timeout", lambda: _torch.set_timeout(TIMES, 1), None),
    Use(torch.UntypedStorage, "_share_cuda_", "share_cuda", lambda: _torch.share_cuda(torch.zeros(1))),
    Use(torch.UntypedStorage, "_new_shared_cuda", "open_cuda", lambda: _torch.open_cuda()),
    Use(torch.UntypedStorage, "_release_ipc_counter_cuda", "decline_cuda", lambda: _torch.decline_cuda(b"", 0), None),
    Use(
        IGNORING,
        "_ddp_params_and_buffers_to_ignore",
        "ignored_by_ddp",
        lambda: _torch.ignored_by_ddp(IGNORING),
        frozenset(),
    ),
    Use(DistributedDataParallel, "_active_ddp_module", "set_active_ddp", lambda: _torch.set_active_ddp(None), None),
    Use(of_torch("_utils"), "_get_device_index", "device_index", lambda: _torch.device_index(0)),
    Use(of_torch("distributed.utils"), "_to_kwargs", "move_to", lambda: _torch.move_to((1,), {}, CPU)),
    Use(of_torch("utils._pytree"), "tree_leaves", "leaves_of", lambda: _torch.leaves_of([1])),
    Use(
        of_torch("distributed.checkpoint.filesystem"),
        "_StorageInfo",
        "storage_info",
        lambda: _torch.storage_info("file", 0, 1),
    ),
    Use(of_torch("distributed.checkpoint.metadata"), "_MEM_FORMAT_ENCODING", "memory_formats", _torch.memory_formats),
    *(
        Use(FRAMES, name, "skip_frames", lambda: _torch.skip_frames(own_backend.__code__, True), False)
        for name in ("_FrameExecStrategy", "_FrameAction", "set_code_exec_strategy")
    ),
    Use(of_torch("_dynamo.callback"), "callback_handler", "note_start", lambda: _torch.note_start(print), True),
]


@pytest.mark.parametrize("use", USES, ids=lambda use: f"{use.function} without {use.name}")
def test_a_name_that_is_missing_is_done_without_or_named(use: Use, monkeypatch: pytest.MonkeyPatch) -> None:
    try:
        use.call()
    except (ImportError, AttributeError):
        raise
    except Exception:  # as CUDA's do on a host: it was there
        pass
    use.take_away(monkeypatch)
    if use.without is RAISES:
        with pytest.raises((ImportError, AttributeError), match=use.name):
            use.call()
    else:
        assert use.call() == use.without


@pytest.mark.parametrize("use", USES, ids=lambda use: use.name)
def test_the_module_imports_without_a_name(use: Use, monkeypatch: pytest.MonkeyPatch) -> None:
    use.take_away(monkeypatch)
    spec = importlib.util.spec_from_file_location("zerox._torch_anew", SOURCE)
    assert spec is not None
    assert spec.loader is not None
    spec.loader.exec_module(importlib.util.module_from_spec(spec))


def test_what_is_there_means_what_zerox_takes_it_for() -> None:
    """Of names whose loss would only show in what they do."""
    assert _torch.is_updated_inside(UPDATED)
    assert not _torch.is_updated_inside(MODULE.weight)
    assert _torch.ignored_by_ddp(IGNORING) == {"bias"}
    assert not _torch.has_step_hooks(OPTIMIZER)
    assert _torch.zero_grad_name(OPTIMIZER) == OPTIMIZER._zero_grad_profile_name
    state_dict: Any = Optimizer.state_dict
    assert _torch.without_dynamo(state_dict) is state_dict.__wrapped__
    assert _torch.without_dynamo(own_backend) is own_backend
    options = dist.ProcessGroupGloo._Options()
    _torch.set_timeout(options, dist.default_pg_timeout)
    assert _torch.timeout_in(options) == dist.default_pg_timeout
    made = dtensor()
    _torch.set_local_tensor(made, ROWS)
    assert _torch.local_tensor_of(made) is ROWS
    assert _torch.overloads("_foreach_mul_.Scalar", "_foreach_mul_.Number") == (torch.ops.aten._foreach_mul_.Scalar,)
    _torch.end_graphs_at(own := lambda: None, "why")
    assert torch._dynamo.trace_rules.is_callable_disallowed(own) or own._torchdynamo_disable


# ---- names on which right values hang


PLANTED = [
    ("check_regions", lambda patch: patch.setitem(_torch.REGIONS, FILES[0], '"Compiled Piece: "'), "Compiled Piece: "),
    ("check_regions", lambda patch: patch.setitem(_torch.REGIONS, FILES[1], "class Compiled("), r"class Compiled\("),
    ("check_regions", lambda patch: patch.setitem(_torch.REGIONS, "moved.py", "label"), "label in torch/moved.py"),
    ("check_regions", lambda patch: patch.setattr(_torch, "BACKWARD", "Grad"), "an autograd function's backward"),
    ("check_operators", lambda patch: patch.setattr(C, "operator_names", lambda: ["aten::look_up"]), "aten::look_up"),
    ("check_dcp", lambda patch: patch.setattr(_torch, "GETTER", "_get_state"), "_get_state"),
    ("check_dcp", lambda patch: patch.setattr(_torch, "LOADER", "_load_state"), "_load_state"),
    ("check_dcp", lambda patch: patch.setattr(_torch, "OPTIONS", "options"), "options"),
    ("check_scaler", lambda patch: patch.delattr(torch.amp.GradScaler, "_maybe_opt_step"), "_maybe_opt_step"),
    ("check_scaler", lambda patch: patch.delattr(torch.amp.GradScaler, "_unscale_grads_"), "_unscale_grads_"),
    ("check_join", lambda patch: patch.setattr(Joinable, "__init__", lambda _: None), "_join_config"),
    ("message_namespaces", lambda patch: patch.setitem(_torch.MESSAGES, "c10d", "sum_up"), "c10d::sum_up"),
    ("message_namespaces", lambda patch: patch.setitem(_torch.MESSAGES, "_c10d", "sum_up"), "_c10d::sum_up"),
]
FILES = list(_torch.REGIONS)


def overlapped() -> None:
    model = nn.Linear(2, 2)
    zerox.FusedShardedAdam(model.parameters(), lr=0.1).overlap_gather(model)


def in_stage_3() -> None:
    Residency(None, None, None)  # type: ignore[arg-type]  # looks at names before all else


def given_to_dcp() -> None:
    model = nn.Linear(2, 2)
    dcp.get_optimizer_state_dict(model, zerox.FusedShardedAdam(model.parameters(), lr=0.1))


def given_to_join() -> None:
    zerox.FusedShardedAdam([torch.zeros(1, requires_grad=True)], lr=0.1).join_hook()


WHERE_IT_MATTERS = {
    "check_regions": [overlapped, in_stage_3],
    "check_operators": [in_stage_3],
    "check_dcp": [given_to_dcp],
    "check_scaler": [zerox.GradScaler],
    "check_join": [given_to_join],
    "message_namespaces": [no_messages],
}
CACHED: list[Any] = [_torch.check_regions, check_operators, _torch.check_dcp, _torch.message_namespaces]


@pytest.mark.parametrize(("check", "plant", "named"), PLANTED, ids=lambda each: each if isinstance(each, str) else "")
def test_a_changed_name_on_which_values_hang_is_refused(
    check: str, plant: Callable[[pytest.MonkeyPatch], None], named: str
) -> None:
    for use in WHERE_IT_MATTERS[check]:
        with pytest.MonkeyPatch.context() as patch:
            forget()
            plant(patch)
            with pytest.raises(ImportError, match=f"zerox: torch .* lacks .*{named}.*, or has changed it"):
                use()
    forget()


def forget() -> None:
    for check in CACHED:
        check.cache_clear()


@pytest.mark.parametrize("check", WHERE_IT_MATTERS)
def test_this_torch_has_the_names(check: str) -> None:
    getattr(_torch, check, check_operators)()


def test_both_languages_know_the_same_labels() -> None:
    text = (ROOT / "csrc/torch_names.h").read_text()
    said = dict(re.findall(r'constexpr char k(\w+)\[\] = "(.+?)"', text))
    region, function = _torch.REGIONS.values()
    assert region == f'"{said["Region"]}: "'
    assert function == f"class {said['ShowsInputs']}(torch.autograd.Function)"
    assert said["Backward"] == _torch.BACKWARD


# ---- all of them


def test_operators_with_private_names_stand_there_too() -> None:
    private = re.compile(r'"(_\w+)\.\w+"')
    found = {
        str(path.relative_to(ROOT)): names
        for path in (ROOT / "zerox").glob("**/*.py")
        if (names := {name for name in private.findall(path.read_text()) if hasattr(torch.ops.aten, name)})
    }
    assert found.keys() == {"zerox/_torch.py"}, found


def test_each_function_says_what_is_lost_without_it_and_is_tried_here() -> None:
    functions = {
        name: each
        for name, each in vars(_torch).items()
        if getattr(each, "__module__", "") == _torch.__name__ and callable(each) and not isinstance(each, type)
    }
    tried = {use.function for use in USES} | set(WHERE_IT_MATTERS) | {"set_local_tensor", "overloads", "end_graphs_at"}
    assert functions.keys() - tried == {"error_of_changed", "_needs", "without_dynamo"}
    assert not [name for name in tried & functions.keys() if "ithout" not in (functions[name].__doc__ or "")]


ALL_GONE = """
import importlib
import runpy
import sys


class Gone:
    def __get__(self, *_):
        raise AttributeError


taken = [(importlib.import_module(module), names) for module, *names in {taken}]  # all modules before the first loss
for of, (*inside, name) in taken:
    for each in inside:
        of = getattr(of, each)
    if name in vars(of):
        delattr(of, name)
    elif inside:  # from a class in C nothing can be taken
        setattr(of, name, Gone())

import zerox

for name in zerox.__all__:
    getattr(zerox, name)
sys.argv = ["zerox", "env"]
runpy.run_module("zerox", run_name="__main__")
"""


def test_zerox_imports_and_reports_without_any_of_them() -> None:
    taken = [
        [of.__name__, name] if isinstance(of, ModuleType) else [of.__module__, of.__name__, name]
        for of, name, *_ in USES
        if isinstance(of, type | ModuleType)
    ]
    script = ALL_GONE.replace("{taken}", repr(taken))
    found = subprocess.run([sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True)
    assert found.returncode == 0, found.stderr
    assert "extension             loaded" in found.stdout
    assert "cannot be used" not in found.stdout
