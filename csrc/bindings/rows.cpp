#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "bindings/bindings.h"
#include "bindings/destroyed_without_gil.h"
#include "op_arguments.h"
#include "peers/peer_messages.h"
#include "rows/row_flow.h"

namespace zx {
namespace {

std::shared_ptr<PeerMessages> make_messages(const std::optional<Group>& group,
                                            std::shared_ptr<FailureDetector> failure_detector) {
  if (group && !failure_detector) {
    failure_detector = std::make_shared<FailureDetector>(std::vector<Group>{}, nullptr, (*group)->getRank(),
                                                         (*group)->getSize(), kProcessGroupDefaultTimeout);
  }
  return destroyed_without_gil(new PeerMessages({group.value_or(Group()), std::move(failure_detector)}));
}

std::string rule_name(RuleKind kind) {
  return with_rule(kind, [](auto type) { return decltype(type)::type::kName; });
}

// Gradients that it has seen may belong to Python.
std::shared_ptr<RowFlow> make_flow(std::shared_ptr<PeerMessages> messages, std::vector<int64_t> neighbours) {
  return destroyed_without_gil(new RowFlow(std::move(messages), Neighbours(std::move(neighbours))));
}

}  // namespace

void bind_rows(py::module_& m) {
  py::class_<PeerMessages, std::shared_ptr<PeerMessages>>(m, "PeerMessages")
      .def(py::init(&make_messages), py::arg("group"), py::arg("failure_detector"))
      .def("swap", &PeerMessages::swap, py::arg("sent"), py::arg("numels"), Release())
      .def("to_all", &PeerMessages::to_all, py::arg("message"), Release())
      .def_property_readonly("are_in_memory", &PeerMessages::are_in_memory)
      .def_property_readonly("traffic", [](const PeerMessages& self) {
        return std::pair<int64_t, int64_t>(self.traffic().messages, self.traffic().bytes);
      });
  py::class_<ReducedRows>(m, "ReducedRows")
      .def_readonly("rows", &ReducedRows::rows)
      .def_readonly("places", &ReducedRows::places)
      .def_readonly("values", &ReducedRows::values);
  py::class_<RowRule>(m, "RowRule")
      .def(py::init(&RowRule::named), py::arg("name"), py::arg("options"), py::kw_only(), py::arg("scale"),
           py::arg("limit"))
      .def_property_readonly("name", [](const RowRule& self) { return rule_name(self.kind); })
      .def_readonly("options", &RowRule::options)
      .def_readonly("scale", &RowRule::scale)
      .def_readonly("limit", &RowRule::limit);
  py::enum_<RowChange>(m, "RowChange")
      .value("UNCHANGED", RowChange::unchanged)
      .value("ADDED", RowChange::added)
      .value("REPLACED", RowChange::replaced);
  py::class_<RowFlow, std::shared_ptr<RowFlow>>(m, "RowFlow")
      .def(py::init(&make_flow), py::arg("messages"), py::arg("neighbours"))
      .def(
          "add",
          [](RowFlow& self, at::Tensor param, int64_t number, at::Tensor of_block, std::vector<at::Tensor> states,
             std::vector<at::Tensor> scales, std::optional<at::Tensor> master, at::Tensor step, double divisor,
             std::optional<at::Tensor> own) {
            const int64_t num_rows = param.size(0);
            const int64_t width = param.size(1);
            const DType dtype = dtype_of(param, "RowFlow", "param");
            self.add({num_rows, width, std::move(of_block), RowStates::of(std::move(states), std::move(scales), number),
                      master.value_or(at::Tensor()), std::move(step), divisor, dtype, false},
                     std::move(param), own.value_or(at::Tensor()));
          },
          py::kw_only(), py::arg("param"), py::arg("number"), py::arg("of_block"), py::arg("states"), py::arg("scales"),
          py::arg("master"), py::arg("step"), py::arg("divisor"), py::arg("own"))
      .def("pack", &RowFlow::pack, Release())
      .def("forget", &RowFlow::forget, Release())
      .def("note_seen", &RowFlow::note_seen, Release())
      .def("header", &RowFlow::header, Release())
      .def("exchange", &RowFlow::exchange, py::arg("headers"), py::arg("goes_on"), Release())
      .def_property_readonly("reduced", &RowFlow::reduced)
      .def("update", &RowFlow::update, py::arg("rules"), Release())
      .def("close", &RowFlow::close, Release());
}

}  // namespace zx
