#include <memory>
#include <optional>
#include <utility>
#include <vector>

#include "bindings/bindings.h"
#include "bindings/destroyed_without_gil.h"
#include "exchange/peer_messages.h"
#include "rows/row_tables.h"

namespace zx {
namespace {

std::shared_ptr<PeerMessages> make_messages(const std::optional<Group>& group,
                                            std::shared_ptr<Whereabouts> whereabouts) {
  if (group && !whereabouts) {
    whereabouts = std::make_shared<Whereabouts>(std::vector<Group>{}, nullptr, (*group)->getRank(), (*group)->getSize(),
                                                kProcessGroupDefaultTimeout);
  }
  return destroyed_without_gil(new PeerMessages({group.value_or(Group()), std::move(whereabouts)}));
}

}  // namespace

void bind_rows(py::module_& m) {
  py::class_<PeerMessages, std::shared_ptr<PeerMessages>>(m, "PeerMessages")
      .def(py::init(&make_messages), py::arg("group"), py::arg("whereabouts"))
      .def("swap", &PeerMessages::swap, py::arg("sent"), py::arg("numels"), Release());
  py::class_<LocalRows>(m, "LocalRows")
      .def(py::init<at::Tensor, at::Tensor, bool>(), py::arg("rows"), py::arg("values"), py::arg("is_summed"));
  py::class_<Packed>(m, "Packed").def_readonly("words", &Packed::words).def_readonly("counts", &Packed::counts);
  py::class_<LandedRows>(m, "LandedRows")
      .def(py::init<at::Tensor, at::Tensor, at::Tensor>(), py::arg("rows"), py::arg("places"), py::arg("values"))
      .def_readonly("rows", &LandedRows::rows)
      .def_readonly("places", &LandedRows::places)
      .def_readonly("values", &LandedRows::values);
  py::class_<RowStep>(m, "RowStep")
      .def(py::init<double, double, double, double, int64_t, bool, double>(), py::kw_only(), py::arg("lr"),
           py::arg("beta1"), py::arg("beta2"), py::arg("eps"), py::arg("step"), py::arg("maximize"), py::arg("scale"));
  py::class_<RowTables>(m, "RowTables")
      .def(py::init<int64_t, int64_t>(), py::arg("rank"), py::arg("world"))
      .def(
          "add",
          [](RowTables& self, int64_t num_rows, int64_t width, at::Tensor of_block, at::Tensor exp_avg,
             at::Tensor exp_avg_sq, double divisor) {
            self.add({num_rows, width, std::move(of_block), std::move(exp_avg), std::move(exp_avg_sq), divisor});
          },
          py::kw_only(), py::arg("num_rows"), py::arg("width"), py::arg("of_block"), py::arg("exp_avg"),
          py::arg("exp_avg_sq"), py::arg("divisor"))
      .def("pack", &RowTables::pack, py::arg("grads"), Release())
      .def(
          "words_from_each",
          [](const RowTables& self, const at::Tensor& counts) {
            std::vector<std::pair<int64_t, int64_t>> found;
            for (const auto& [start, count] : self.words_from_each(counts)) found.emplace_back(start, count);
            return found;
          },
          py::arg("counts"))
      .def("land", &RowTables::land, py::arg("words"), py::arg("counts"), Release())
      .def("update", &RowTables::update, py::arg("params"), py::arg("steps"), py::arg("counts"), Release())
      .def("updated_words",
           py::overload_cast<const std::vector<bool>&, const at::Tensor&>(&RowTables::updated_words, py::const_),
           py::arg("present"), py::arg("counts"))
      .def("put", &RowTables::put, py::arg("params"), py::arg("present"), py::arg("counts"), py::arg("words"),
           Release());
}

}  // namespace zx
