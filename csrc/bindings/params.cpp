#include <optional>
#include <vector>

#include "bindings/bindings.h"
#include "cpu/large_pages.h"
#include "params/own_storage.h"
#include "params/params.h"
#include "params/read_guard.h"

namespace zx {
namespace {

// Python raises it in this thread as soon as it runs Python code again. It takes a class, which must have its message.
bool raise_soon(const std::string& message) {
  const auto* state = PyGILState_GetThisThreadState();
  if (state == nullptr) return false;
  const py::gil_scoped_acquire acquire;
  const auto thread = py::module_::import("threading").attr("get_ident")().cast<unsigned long>();
  py::dict members;
  members["__module__"] = "builtins";
  members["__init__"] = py::cpp_function(
      [message](const py::object& self) {
        py::module_::import("builtins").attr("RuntimeError").attr("__init__")(self, message);
      },
      py::is_method(py::none()));
  const py::object made =
      py::module_::import("builtins")
          .attr("type")("RuntimeError", py::make_tuple(py::module_::import("builtins").attr("RuntimeError")), members);
  PyThreadState_SetAsyncExc(thread, made.ptr());
  return true;
}

void bind_read_guard(py::module_& m) {
  m.def(
      "set_names_are_new",
      [](py::function names_are_new) {
        // Leaked: threads may ask until the process is gone.
        auto* function = new py::function(std::move(names_are_new));
        ReadGuard::set_interpreter({.knows_this_thread = [] { return PyGILState_GetThisThreadState() != nullptr; },
                                    .names_are_new =
                                        [function] {
                                          const py::gil_scoped_acquire acquire;
                                          return (*function)().cast<bool>();
                                        },
                                    .without_gil =
                                        [](const std::function<void()>& body) {
                                          std::optional<py::gil_scoped_release> release;
                                          if (PyGILState_Check() != 0) release.emplace();
                                          body();
                                        },
                                    .raise_soon = &raise_soon});
      },
      py::arg("names_are_new"));
  m.def("before_fork", &ReadGuard::before_fork, Release());
}

}  // namespace

void bind_params(py::module_& m) {
  m.def("advise_large_pages", &advise_large_pages);
  m.def("with_own_storage", &with_own_storage);
  m.def("has_own_storage", &has_own_storage);
  bind_read_guard(m);

  py::class_<Params>(m, "Params")
      .def("start", &Params::start_gather, py::arg("bucket"), py::arg("background") = false, Release())
      .def("start_of", &Params::start_gather_of, py::arg("bucket"), py::arg("part"), Release())
      .def(
          "wait", [](Params& self, const std::vector<int64_t>& buckets) { self.gathers().wait(buckets); },
          py::arg("buckets"), Release())
      .def(
          "finish", [](Params& self) { self.gathers().finish(); }, Release())
      .def("guard_reads", [](Params& self) { self.gathers().guard_reads(); })
      .def_property_readonly("waited_ns", [](Params& self) { return self.gathers().waited_ns(); })
      .def_property_readonly("missing", [](Params& self) { return self.gathers().missing(); })
      .def_property_readonly("order_of_use", [](Params& self) { return self.gathers().order_of_use(); })
      .def("propose_order", &Params::propose_order, py::arg("buckets"))
      .def_property_readonly("order", &Params::order)
      .def("moved", &Params::moved)
      .def("hold_back", [](Params& self, bool hold) { self.gathers().hold_back(hold); }, py::arg("hold"));
}

}  // namespace zx
