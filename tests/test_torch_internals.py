"""What torch does not promise to keep, csrc uses in torch_internals.h and torch_names.h only, as zerox in _torch.py."""

from __future__ import annotations

import re

import pytest

from tests.test_layering import ROOT, sources

HOME = {"torch_internals.h", "torch_names.h"}

# Headers below torch/csrc that others may include, and why.
PUBLIC_HEADERS = {
    "torch/csrc/distributed/c10d/ProcessGroup.hpp": "the interface of backends, which torch documents for extensions",
    "torch/csrc/distributed/c10d/Store.hpp": "the same of stores",
    "torch/csrc/utils/pybind.h": "what extensions bind tensors with; torch/extension.h includes it, and far more",
}
INTERNAL_HEADERS = re.compile(
    r"#include [<\"]((?:torch/csrc/|(?:ATen|c10)/(?:[\w/]*/)?(?:impl|detail|dispatch|native|boxing|functorch)/)[^>\"]+|"
    r"ATen/ops/\w+_ops\.h)[>\"]"
)

# Namespaces and classes, functions of Python's binding, and names that begin or end with an underscore.
INTERNAL_NAMES = re.compile(
    r"\b(torch::(?:autograd|dynamo|jit|utils|profiler)|c10d::Reducer|"
    r"(?:at|c10)::(?:impl|detail|internal|native|functorch|_\w+)|"
    r"c10::(?:Dispatcher|OperatorHandle|OperatorName|TypedOperatorHandle)|\w*VirtualGuardImpl|\w*DispatchKeyGuard|"
    r"THP\w+)\b|(?:\.|->)(_[a-z]\w*|\w+[a-z]_msg_|\w+_noswap)\b"
)
PUBLIC_NAMES = {
    "_version": "at::Tensor has the version under this name only",
    "_indices": "so it is with a sparse tensor's parts, where it is not coalesced",
    "_values": "the same",
}


def without_comments(text: str) -> str:
    return re.sub(r"//.*", "", text)


def internals_in(text: str) -> set[str]:
    text = without_comments(text)
    names = {each for found in INTERNAL_NAMES.findall(text) for each in found if each}
    return (names - PUBLIC_NAMES.keys()) | (set(INTERNAL_HEADERS.findall(text)) - PUBLIC_HEADERS.keys())


def test_internals_of_torch_stand_in_one_header() -> None:
    assert not {
        path.name: found for path in sources() if path.name not in HOME and (found := internals_in(path.read_text()))
    }


def test_what_is_in_the_header_would_be_noticed_elsewhere() -> None:
    assert {
        "ATen/core/dispatch/Dispatcher.h",
        "ATen/ops/record_stream_ops.h",
        "at::_ops",
        "at::detail",
        "c10/core/impl/VirtualGuardImpl.h",
        "c10::Dispatcher",
        "c10::impl",
        "c10d::Reducer",
        "clear_data_ptr_access_error_msg_",
        "set_data_ptr_noswap",
        "torch/csrc/autograd/engine.h",
        "torch/csrc/distributed/c10d/reducer.hpp",
        "torch::autograd",
        "torch::dynamo",
        "_mutable_data_ptr_no_checks",
        "_unsafe_get_target",
    } <= internals_in((ROOT / "csrc/torch_internals.h").read_text())


@pytest.mark.parametrize(
    "line",
    [
        "#include <torch/csrc/autograd/python_variable.h>",
        "#include <c10/core/impl/LocalDispatchKeySet.h>",
        "auto object = THPVariable_Wrap(grad);",
        "using Guard = c10::impl::VirtualGuardImpl;",
        "VirtualGuardImpl guard;",
        "storage->_mutable_data_ptr_no_checks();",
        "torch::autograd::impl::hooks(param)",
        "c10::Dispatcher::singleton()",
    ],
)
def test_an_internal_is_noticed(line: str) -> None:
    assert internals_in(line)


@pytest.mark.parametrize(
    "line",
    [
        "#include <torch/csrc/utils/pybind.h>",
        "#include <torch/library.h>",
        "#include <ATen/ops/_values.h>",
        "auto guard = internals::Guard(device.type());",
        "grad._version();  // c10::impl",
        "c10d::ProcessGroup& group; c10::Event event; zx::detail::f();",
    ],
)
def test_what_torch_documents_is_not(line: str) -> None:
    assert not internals_in(line)


def test_each_exception_is_used() -> None:
    texts = "".join(without_comments(path.read_text()) for path in sources() if path.name not in HOME)
    assert not [each for each in PUBLIC_HEADERS if f"<{each}>" not in texts]
    assert not [each for each in PUBLIC_NAMES if f".{each}(" not in texts]
