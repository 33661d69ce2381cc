// The bindings that Python sees. No other files know Python.
#pragma once

#include <torch/csrc/utils/pybind.h>

namespace zx {

namespace py = pybind11;
using Release = py::call_guard<py::gil_scoped_release>;

void bind_exchange(py::module_& m);
void bind_params(py::module_& m);
void bind_residency(py::module_& m);
void bind_rows(py::module_& m);      // after exchange, whose types it takes
void bind_grads(py::module_& m);     // after the others, whose types it takes
void bind_backward(py::module_& m);  // a part of it

}  // namespace zx
