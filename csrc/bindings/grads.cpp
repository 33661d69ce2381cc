#include <array>
#include <memory>
#include <optional>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include <pybind11/functional.h>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>

#include "bindings/bindings.h"
#include "bindings/destroyed_without_gil.h"
#include "grads/bucket_manager.h"
#include "grads/local_grad.h"
#include "grads/named_errors.h"
#include "grads/other_reducers.h"
#include "torch_internals.h"

namespace zx {
namespace {

void bind_backward_functions(py::module_& m) {
  m.def("expects_gradients", &internals::Expects::gradients, py::arg("reducer"));
  m.def(
      "set_backward_functions",
      [](py::function find_reduced, py::function name_params) {
        // Leaked: threads may ask until the process is gone.
        set_find_reduced([find = new py::function(std::move(find_reduced))](const HookedByOthers& hooked) {
          const py::gil_scoped_acquire acquire;
          return (*find)(hooked.params, hooked.counts).cast<int64_t>();
        });
        set_name_params([name = new py::function(std::move(name_params))](const std::string& text, const auto& names,
                                                                          const auto& params) {
          const py::gil_scoped_acquire acquire;
          return (*name)(text, names, params).template cast<std::string>();
        });
      },
      py::arg("find_reduced"), py::arg("name_params"));
}

// Without a call of a Python function, which takes several times as long. `plain`: the class torch.Tensor.
at::Tensor local_if_alike(const py::object& plain, const at::Tensor& param, const at::Tensor& grad) {
  const py::gil_scoped_acquire acquire;
  static PyObject* const spec = PyUnicode_InternFromString(internals::kOfDTensor);
  static PyObject* const placements = PyUnicode_InternFromString("placements");
  static PyObject* const local_tensor = PyUnicode_InternFromString(internals::kLocalTensor);
  const auto get = [](const py::object& from, PyObject* name) {
    auto found = py::reinterpret_steal<py::object>(from ? PyObject_GetAttr(from.ptr(), name) : nullptr);
    if (!found) PyErr_Clear();
    return found;
  };
  const py::object object = py::cast(grad);
  const py::object have = get(get(object, spec), placements);
  const py::object want = get(get(py::cast(param), spec), placements);
  const py::object local = get(object, local_tensor);
  if (!have || !want || !local || !py::type::of(local).is(plain)) return {};
  const int same = PyObject_RichCompareBool(have.ptr(), want.ptr(), Py_EQ);
  if (same < 0) PyErr_Clear();
  return same == 1 ? local.cast<at::Tensor>() : at::Tensor();
}

// Each function waits for the GIL, which no thread holds that waits for a lock: see Note [Locks].
void bind_dtensors(py::module_& m) {
  m.def(
      "set_dtensor_functions",
      [](py::function find, py::function values_of, py::function wrap) {
        auto* found = new py::function(std::move(find));  // leaked, as above
        auto* values = new py::function(std::move(values_of));
        auto* wrapped = new py::function(std::move(wrap));
        set_dtensor_functions(
            {.alike = [plain = new py::object(py::module_::import("torch").attr("Tensor"))](
                          const at::Tensor& param,
                          const at::Tensor& grad) { return local_if_alike(*plain, param, grad); },
             .find =
                 [found](const at::Tensor& param, const at::Tensor& grad) {
                   const py::gil_scoped_acquire acquire;
                   auto [local, partial, replicated, refusal] =
                       (*found)(param, grad)
                           .cast<std::tuple<std::optional<at::Tensor>, uint8_t, uint8_t, std::string>>();
                   return DTensorGrad{std::move(local).value_or(at::Tensor()),
                                      {.partial = partial, .replicated = replicated},
                                      refusal};
                 },
             .values_of =
                 [values](const at::Tensor& grad) {
                   const py::gil_scoped_acquire acquire;
                   return (*values)(grad).cast<at::Tensor>();
                 },
             .wrap =
                 [wrapped](const at::Tensor& param, const at::Tensor& grad, const at::Tensor& local, int64_t partial) {
                   const py::gil_scoped_acquire acquire;
                   const auto had = grad.defined() ? std::optional(grad) : std::nullopt;
                   return (*wrapped)(param, had, local, partial).cast<at::Tensor>();
                 }});
      },
      py::arg("find"), py::arg("values_of"), py::arg("wrap"));
}

std::optional<at::Tensor> optional(at::Tensor tensor) {
  return tensor.defined() ? std::optional(std::move(tensor)) : std::nullopt;
}

void bind_flights(py::module_& m) {
  py::class_<Flights>(m, "Flights")
      .def("await_all", &Flights::await_all, Release())
      .def("hold_back", &Flights::hold_back, py::arg("hold"))
      .def_property_readonly("num_launched", &Flights::num_launched)
      .def_property_readonly("num_reduced", &Flights::num_reduced)
      .def_property_readonly("waited_ns", &Flights::waited_ns);
}

void bind_mean_grads(py::module_& m) {
  py::enum_<Move>(m, "Move").value("REDUCE_SCATTER", Move::reduce_scatter).value("ALL_GATHER", Move::all_gather);
  py::class_<InPlace>(m, "InPlace")
      .def(py::init([](int64_t bucket, int64_t start, int64_t stop, std::string name,
                       std::vector<std::optional<double>> numbers, const std::optional<at::Tensor>& factor) {
             // A copy that Python does not know: another thread will free it.
             return InPlace{bucket,
                            start,
                            stop,
                            std::move(name),
                            std::move(numbers),
                            factor ? factor->detach().clone() : at::Tensor()};
           }),
           py::arg("bucket"), py::arg("start"), py::arg("stop"), py::arg("name"), py::arg("numbers"),
           py::arg("factor") = std::nullopt);
  py::class_<MeanGrads>(m, "MeanGrads")
      .def("do_in_place", &MeanGrads::do_in_place, py::arg("calls"), Release())
      .def("mark_zeroed", &MeanGrads::mark_zeroed, py::arg("bucket"), py::arg("slot"), Release())
      .def("is_zeroed", &MeanGrads::is_zeroed, py::arg("bucket"), py::arg("slot"), Release())
      .def("show_all", &MeanGrads::show_all)
      .def("mark_scaled", &MeanGrads::mark_scaled, Release())
      .def("scale", &MeanGrads::scale, py::arg("bucket"), py::arg("factor"), py::arg("slots"), Release())
      .def("forget_limbs", &MeanGrads::forget_limbs, py::arg("bucket"))
      .def(
          "shard", [](MeanGrads& self, int64_t i) { return optional(self.shard(i)); }, py::arg("bucket"), Release())
      .def(
          "shard_by_part",
          [](MeanGrads& self, int64_t i) {
            std::vector<std::optional<at::Tensor>> tensors;
            for (at::Tensor& part : self.shard_by_part(i)) tensors.push_back(optional(std::move(part)));
            return tensors;
          },
          py::arg("bucket"), Release())
      .def("reduced", &MeanGrads::reduced, py::arg("bucket"))
      .def("version", &MeanGrads::version, py::arg("bucket"))
      .def("partial", &MeanGrads::partial, py::arg("bucket"), Release())
      .def("present", &MeanGrads::present, py::arg("bucket"))
      .def("limbs", [](MeanGrads& self, int64_t i) { return optional(self.limbs(i)); }, py::arg("bucket"));
}

void bind_synchronizer(py::module_& m) {
  py::enum_<SyncPoint>(m, "SyncPoint")
      .value("FOLLOW", SyncPoint::follow)
      .value("STEP", SyncPoint::step)
      .value("CLIP", SyncPoint::clip)
      .value("SYNCHRONIZE", SyncPoint::synchronize)
      .value("UNSCALE", SyncPoint::unscale)
      .value("MEAN_OVER", SyncPoint::mean_over)
      .value("SCALE_GRADS", SyncPoint::scale_grads)
      .value("CLIP_TOGETHER", SyncPoint::clip_together)
      .value("SKIP_STEP", SyncPoint::skip_step)
      .value("CLIP_VALUE", SyncPoint::clip_value)
      .value("GRAD_NORM", SyncPoint::grad_norm)
      .value("ADD_PARAM_GROUP", SyncPoint::add_param_group)
      .value("SAVE", SyncPoint::save)
      .value("FULL_STATE", SyncPoint::full_state)
      .value("BROADCAST_BUFFERS", SyncPoint::broadcast_buffers)
      .value("FULL_GRAD", SyncPoint::full_grad)
      .value("MASKS", SyncPoint::masks)
      .value("BROADCAST_PARAMETERS", SyncPoint::broadcast_parameters);
  m.attr("NUM_ARGUMENTS") = std::tuple_size_v<Arguments>;
  py::class_<SyncResult>(m, "SyncResult")
      .def_readonly("adopts", &SyncResult::adopts)
      .def_readonly("sync_point", &SyncResult::sync_point)
      .def_readonly("arguments", &SyncResult::arguments)
      .def_readonly("has_same_options", &SyncResult::has_same_options)
      .def_readonly("has_same_operators", &SyncResult::has_same_operators)
      .def_readonly("has_same_params", &SyncResult::has_same_params)
      .def_readonly("operators", &SyncResult::operators)
      .def_readonly("followed", &SyncResult::followed)
      .def_readonly("num_active", &SyncResult::num_active)
      .def_readonly("speaker", &SyncResult::speaker);
  py::enum_<Combine>(m, "Combine").value("SUM", Combine::sum).value("MAX", Combine::max);
  py::class_<Synchronizer>(m, "Synchronizer")
      .def(
          "sync",
          [](Synchronizer& self, SyncPoint sync_point, const Arguments& arguments, const std::array<double, 3>& digests,
             int64_t adoptions, std::string refusal) {
            return self.sync(
                {sync_point, arguments, digests[0], digests[1], digests[2], adoptions, std::move(refusal)});
          },
          py::arg("sync_point"), py::arg("arguments") = Arguments{}, py::arg("digests") = std::array<double, 3>{},
          py::arg("adoptions") = 0, py::arg("refusal") = "", Release())
      .def("set_piggyback", &Synchronizer::set_piggyback, py::arg("piggyback"), Release())
      .def_property_readonly("piggybacks", py::cpp_function(&Synchronizer::piggybacks, Release()))
      .def("set_before_backward_end", &Synchronizer::set_before_backward_end, py::arg("call"))
      .def("set_following", &Synchronizer::set_following, py::arg("by_backward"), py::arg("by_active"), Release())
      .def("set_after_backward_end", &Synchronizer::set_after_backward_end, py::arg("call"))
      .def("zero", &Synchronizer::zero, py::arg("set_to_none"), Release())
      .def("all_reduce", &Synchronizer::all_reduce, py::arg("values"), py::arg("combine"), Release())
      .def("bump_versions", &Synchronizer::bump_versions, Release())
      .def_property_readonly("num_added", &Synchronizer::num_added)
      .def_property_readonly("waited_ns", &Synchronizer::waited_ns)
      .def_property_readonly("holds_scaled", py::cpp_function(&Synchronizer::holds_scaled, Release()));
}

// One axis of the ranks' mesh: `members` as in Communicator.
struct Axis {
  std::optional<Group> group;
  ExchangeKind kind;
  std::vector<int> members;
};

std::shared_ptr<Exchange> exchange_over(const Axis& axis, const std::shared_ptr<FailureDetector>& failure_detector) {
  return make_exchange(axis.kind, {axis.group.value_or(Group()), failure_detector, axis.members});
}

std::shared_ptr<BucketManager> make_manager(const std::vector<Axis>& axes, const std::optional<Group>& control,
                                            std::shared_ptr<FailureDetector> failure_detector,
                                            const ManagerOptions& options) {
  if (control && !failure_detector) {
    failure_detector = std::make_shared<FailureDetector>(std::vector<Group>{}, nullptr, (*control)->getRank(),
                                                         (*control)->getSize(), kProcessGroupDefaultTimeout);
  }
  BucketManager::Axes made;
  for (const Axis& axis : axes) made.push_back(exchange_over(axis, failure_detector));
  return destroyed_without_gil(new BucketManager(made, {control.value_or(Group()), failure_detector}, options));
}

void remember_class(const at::Tensor& placeholder) {
  static PyObject* known = nullptr;  // leaked, as above
  if (known != nullptr) return;
  known = py::type::of(py::cast(placeholder)).release().ptr();
  set_placeholder_test([](const at::Tensor& tensor) {
    const py::gil_scoped_acquire acquire;
    return py::type::of(py::cast(tensor)).ptr() == known;
  });
}

int64_t add_bucket(BucketManager& self, const std::vector<std::string>& names, const std::vector<at::Tensor>& params,
                   const std::vector<at::Tensor>& locals, const std::vector<at::Tensor>& homes, at::Tensor flat,
                   const std::optional<std::vector<at::Tensor>>& placeholders, const std::vector<int64_t>& offsets,
                   at::ScalarType wire_dtype, at::ScalarType grad_dtype, std::vector<int64_t> shard_starts,
                   int64_t trailer_numel, at::Tensor segments, int64_t num_zero_copy,
                   std::vector<int64_t> zero_copy_numels, double divisor, const Subgroup& subgroup) {
  Shards shards(std::move(shard_starts), trailer_numel);
  BucketSpec spec{{},
                  std::move(flat),
                  wire_dtype,
                  grad_dtype,
                  divisor,
                  std::move(shards),
                  std::move(segments),
                  subgroup,
                  num_zero_copy,
                  std::move(zero_copy_numels)};
  if (placeholders && !placeholders->empty()) remember_class(placeholders->front());
  for (size_t i = 0; i < params.size(); ++i) {
    const at::Tensor placeholder = placeholders ? placeholders->at(i) : at::Tensor();
    spec.slots.push_back({names.at(i), params[i], locals.at(i), homes.at(i), placeholder, offsets.at(i)});
  }
  const py::gil_scoped_release release;  // see Note [Locks]
  return self.add_bucket(std::move(spec));
}

int64_t add_subgroup(BucketManager& self, const Axis& axis, const std::shared_ptr<FailureDetector>& failure_detector) {
  return self.add_subgroup(exchange_over(axis, failure_detector));
}

// Over each axis of the ranks' mesh, the inner one first, then in each smaller subgroup.
std::vector<std::pair<int64_t, int64_t>> traffic_by_axis(const BucketManager& self) {
  std::vector<std::pair<int64_t, int64_t>> found;
  for (const auto& exchange : self.exchanges()) {
    for (const Traffic* axis : exchange->traffic()) found.emplace_back(axis->messages, axis->bytes);
  }
  return found;
}

void bind_manager(py::module_& m) {
  py::class_<Axis>(m, "Axis").def(py::init<std::optional<Group>, ExchangeKind, std::vector<int>>(), py::kw_only(),
                                  py::arg("group"), py::arg("kind"), py::arg("members"));
  py::class_<Subgroup>(m, "Subgroup")
      .def(py::init<int64_t, int64_t, int64_t, int64_t, int64_t>(), py::kw_only(), py::arg("exchange"), py::arg("rank"),
           py::arg("world"), py::arg("number"), py::arg("count"))
      .def_readonly("exchange", &Subgroup::exchange)
      .def_readonly("number", &Subgroup::number)
      .def_readonly("count", &Subgroup::count);
  py::class_<ManagerOptions>(m, "ManagerOptions")
      .def(py::init<std::vector<Move>, bool, at::Device, bool, bool>(), py::kw_only(), py::arg("route"),
           py::arg("keeps_shards"), py::arg("device"), py::arg("sharded_params"), py::arg("divides"));
  py::class_<BucketManager, std::shared_ptr<BucketManager>>(m, "BucketManager")
      .def(py::init(&make_manager), py::arg("axes"), py::arg("control"), py::arg("failure_detector"),
           py::arg("options"))
      .def("add_bucket", &add_bucket, py::arg("names"), py::arg("params"), py::arg("locals"), py::arg("homes"),
           py::arg("flat"), py::arg("placeholders"), py::arg("offsets"), py::arg("wire_dtype"), py::arg("grad_dtype"),
           py::arg("shard_starts"), py::arg("trailer_numel"), py::arg("segments"), py::arg("num_zero_copy"),
           py::arg("zero_copy_numels"), py::arg("divisor"), py::arg("subgroup"))
      .def("add_subgroup", &add_subgroup, py::arg("axis"), py::arg("failure_detector"), Release())
      .def_property_readonly("backward", &BucketManager::backward)
      .def_property_readonly("flights", &BucketManager::flights)
      .def_property_readonly("grads", &BucketManager::grads)
      .def_property_readonly("synchronizer", &BucketManager::synchronizer)
      .def_property_readonly("params", &BucketManager::params)
      .def_property_readonly("num_buckets", [](BucketManager& self) { return self.buckets().all.size(); })
      .def(
          "parts",
          [](BucketManager& self, int64_t i) {
            std::vector<std::tuple<int64_t, int64_t, at::Tensor>> parts;
            for (const Part& part : self.parts(i)) parts.emplace_back(part.start, part.first_row, part.segments);
            return parts;
          },
          py::arg("bucket"))
      .def_property_readonly("traffic",
                             [](BucketManager& self) {
                               std::pair<int64_t, int64_t> found;
                               for (const auto& [messages, bytes] : traffic_by_axis(self)) {
                                 found.first += messages;
                                 found.second += bytes;
                               }
                               return found;
                             })
      .def_property_readonly("traffic_by_axis", &traffic_by_axis);
}

}  // namespace

void bind_grads(py::module_& m) {
  bind_backward_functions(m);
  bind_dtensors(m);
  bind_backward(m);
  bind_flights(m);
  bind_mean_grads(m);
  bind_synchronizer(m);
  bind_manager(m);
}

}  // namespace zx
