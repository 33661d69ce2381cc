#include <optional>
#include <string>
#include <vector>

#include "bindings/bindings.h"
#include "buckets/address.h"
#include "cpu/large_pages.h"
#include "params/own_storage.h"
#include "params/params.h"
#include "params/read_guard.h"
#include "peers/failure_detector.h"
#include "torch_internals.h"

namespace zx {
namespace {

// The class of what can't be raised where it happens: Python takes a class, and makes the error of it itself, without
// arguments. Then its message is that of the thread. It has a place in the module, without which it could not be
// pickled on its way from the workers of loaders and pools.
thread_local std::string late_message;
PyObject* late_error = nullptr;  // leaked: threads may ask until the process is gone

void define_late_error(py::module_& m) {
  const py::object base = py::reinterpret_borrow<py::object>(PyExc_RuntimeError);
  py::dict members;
  members["__module__"] = m.attr("__name__");
  members["__doc__"] = "A read or write of sharded parameters failed, and could not be stopped: see stage=3.";
  members["__init__"] = py::cpp_function(
      [base](const py::object& self, const py::args& args) {
        base.attr("__init__")(self, *(args.empty() ? py::make_tuple(late_message) : py::tuple(args)));
      },
      py::is_method(py::none()));
  const py::object made = py::module_::import("builtins").attr("type")("LateError", py::make_tuple(base), members);
  m.attr("LateError") = made;
  late_error = py::object(made).release().ptr();
}

// Python raises it in this thread as soon as it runs Python code again. Runs none itself, which would raise an earlier
// one here.
bool raise_soon(const std::string& message) {
  if (PyGILState_GetThisThreadState() == nullptr) return false;
  const py::gil_scoped_acquire acquire;
  late_message = message;
  PyThreadState_SetAsyncExc(PyThread_get_thread_ident(), late_error);
  return true;
}

// Of a collective that the script calls. Null if it says none, and for those that zerox itself has made by new_group(),
// which are called in hooks: these need no GIL.
Group scripts_group_of(c10::ArrayRef<const c10::IValue> inputs) {
  for (const c10::IValue& input : inputs) {
    if (!input.isCustomClass() || *input.type() != *c10::getCustomClassType<Group>()) continue;
    const Group group = input.toCustomClass<c10d::ProcessGroup>();
    return group->getGroupDesc().rfind("zerox", 0) == 0 ? nullptr : group;
  }
  return nullptr;
}

// Ctrl-C, say, which a handler of signals has raised where it can't go up.
void raise_again(const py::error_already_set& error) {
  if (error.matches(PyExc_Exception)) {
    raise_soon(error.what());
  } else {
    PyThreadState_SetAsyncExc(PyThread_get_thread_ident(), error.type().ptr());
  }
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
  m.def(
      "set_before_collective",
      [](py::function before_collective) {
        auto* function = new py::function(std::move(before_collective));  // leaked as above
        ReadGuard::set_before_collective([function](c10::ArrayRef<const c10::IValue> inputs) {
          const Group group = scripts_group_of(inputs);
          if (group == nullptr) return;
          const py::gil_scoped_acquire acquire;
          try {
            (*function)(group);
          } catch (const py::error_already_set& error) {
            raise_again(error);  // the collective can't be stopped
          }
        });
      },
      py::arg("before_collective"));
  m.def("before_fork", &ReadGuard::before_fork, Release());
  m.def("operator_names", &internals::operator_names);
  m.def("missing_operators", &internals::missing_operators, py::arg("names"));
}

}  // namespace

void bind_params(py::module_& m) {
  m.def("advise_large_pages", &advise_large_pages);
  m.def("with_own_storage", &with_own_storage);
  m.def("has_own_storage", &has_own_storage);
  m.def("has_accumulator", [](const at::Tensor& param) { return internals::known_accumulator_of(param) != nullptr; });
  m.def("set_data", &set_data, py::arg("param"), py::arg("values"));
  m.def("address_of", [](const at::Tensor& tensor) { return reinterpret_cast<uint64_t>(address_of(tensor)); });
  define_late_error(m);
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
