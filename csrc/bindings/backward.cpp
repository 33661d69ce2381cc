#include "grads/backward.h"

#include <memory>

#include "bindings/bindings.h"

namespace zx {

void bind_backward(py::module_& m) {
  py::class_<Decision, std::shared_ptr<Decision>>(m, "Decision")
      .def(py::init())
      .def("note_forward", &Decision::note_forward, py::arg("syncs"))
      .def("set_static", &Decision::set_static, py::arg("is_static"))
      .def_property_readonly("keeps", &Decision::keeps);
  py::class_<Backward, std::shared_ptr<Backward>>(m, "Backward")
      .def("set_sync", &Backward::set_sync, py::arg("sync"), Release())
      .def("set_decision", &Backward::set_decision, py::arg("bucket"), py::arg("slot"), py::arg("decision"), Release())
      .def("begin", &Backward::begin, py::arg("decision"), py::arg("accumulates") = false, py::arg("inside") = false,
           Release())
      .def("set_stays_inner", &Backward::set_stays_inner, py::arg("stays"), Release())
      .def("set_before_next", &Backward::set_before_next, py::arg("call"), Release())
      .def_property_readonly("has_failed", py::cpp_function(&Backward::has_failed, Release()))
      .def_property_readonly("synced", py::cpp_function(&Backward::is_synced, Release()))
      .def_property_readonly(
          "sums_wait",
          py::cpp_function([](const Backward& self) { return self.progress().rounds().inner.has_left; }, Release()))
      .def("set_order", &Backward::set_order, py::arg("order"), Release())
      .def_property_readonly("launch_order",
                             py::cpp_function([](const Backward& self) { return self.order().order(); }, Release()));
}

}  // namespace zx
