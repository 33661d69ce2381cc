// The only file that knows Python: op schemas, and the bucket manager's class.
#include <pybind11/chrono.h>
#include <torch/csrc/utils/pybind.h>
#include <torch/library.h>
#include <array>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>
#include <torch/csrc/distributed/c10d/reducer.hpp>

#include "bucket_manager/bucket_manager.h"
#include "bucket_manager/neighbours.h"
#include "bucket_manager/other_reducers.h"
#include "bucket_manager/own_storage.h"
#include "bucket_manager/process.h"
#include "bucket_manager/ranges.h"
#include "bucket_manager/whereabouts.h"
#include "cpu/isa.h"
#include "cpu/large_pages.h"
#include "math/dynamic_map.h"
#include "math/exact_sum.h"
#include "math/segment.h"

namespace py = pybind11;

// Notation: W ranks; a shard has n elements of which s segments are parameters' parts.
TORCH_LIBRARY(zerox, m) {
  // flat[piece.flat_start : + numel] = sources[piece.source][piece.source_start : + numel], cast to flat's dtype, for
  // each row (source, source_start, flat_start, numel) of `pieces`, by flat_start; flat[flags] = 1; 0 elsewhere.
  m.def("flatten_(Tensor(a!) flat, Tensor[] sources, Tensor pieces, Tensor flags) -> ()");
  // Flags behind the shard in each slice: present |= or replaced by any slice's, replaced = any slice's; uint8 [s].
  m.def("read_flags_(Tensor(a!) present, Tensor(b!) replaced, Tensor[] slices, int shard_numel) -> ()");
  // shard = sum(slices) / world, in slice order, plus the old shard if `accumulate` and not replaced; adds the sum of
  // squares to `words`, an exact sum (csrc/math/exact_sum.h).
  m.def(
      "reduce_(Tensor(a!) shard, Tensor(b!) words, Tensor[] slices, Tensor segments, Tensor replaced, int "
      "world, "
      "bool accumulate) -> ()");
  // Adds sum |x|^p over the segments to `words`; for p = inf keeps the largest |x|.
  m.def("norm_(Tensor(a!) words, Tensor shard, Tensor segments, float p) -> ()");
  // float64 [2]: the norm, and 1 if every element was finite.
  m.def("norm_value(Tensor words, float p) -> Tensor");
  // One step of `rule` ("adam": torch.optim.Adam or AdamW) on shards of the same types, in few launches: on their
  // segments that are present. Of each list one tensor a shard; no master where none is kept; of `state`, and of
  // `scales` (float32 [ceil(n / 256)], for uint8 state), as many as the rule keeps, shard by shard. `steps` int64 [s];
  // `options` float64 [groups, columns], rows as Options of the rule (csrc/math); `grad_scale` float64 scalar.
  m.def(
      "update_(str rule, Tensor(a!)[] param, Tensor(b!)[] master, Tensor[] grad, Tensor(c!)[] state, "
      "Tensor(d!)[] scales, Tensor[] segments, Tensor[] present, Tensor(e!)[] steps, Tensor options, "
      "Tensor? grad_scale) -> ()");
}

namespace zx {
namespace {

using Release = py::call_guard<py::gil_scoped_release>;

// Lanes and gloo's threads may need the GIL to free a tensor that Python has seen, so nobody may hold it while waiting
// for them, as destructors do. A forked child leaks what it has: see Note [Forks].
template <class T>
std::shared_ptr<T> destroyed_without_gil(T* made) {
  return {made, [owner = Process()](T* object) {
            if (!owner.is_this()) return;
            std::optional<py::gil_scoped_release> release;
            if (PyGILState_Check() != 0) release.emplace();
            delete object;
          }};
}

std::shared_ptr<BucketManager> make_manager(const std::optional<Group>& group, const std::optional<Group>& control,
                                            std::shared_ptr<Whereabouts> whereabouts, ExchangeKind exchange,
                                            ManagerOptions options) {
  if (group && !whereabouts) {
    whereabouts = std::make_shared<Whereabouts>(std::vector<Group>{}, nullptr, (*group)->getRank(), (*group)->getSize(),
                                                kProcessGroupDefaultTimeout);
  }
  return destroyed_without_gil(new BucketManager(group ? make_exchange(exchange, {*group, whereabouts}) : nullptr,
                                                 {control.value_or(Group()), whereabouts}, options));
}

// It may be the last that has the groups.
std::shared_ptr<Whereabouts> make_whereabouts(std::vector<Group> groups, c10::intrusive_ptr<c10d::Store> store,
                                              int rank, int world, std::chrono::milliseconds timeout) {
  return destroyed_without_gil(new Whereabouts(std::move(groups), std::move(store), rank, world, timeout));
}

py::object tensor_or_none(const at::Tensor& tensor) { return tensor.defined() ? py::cast(tensor) : py::none(); }

// A range for a with statement of Python's.
class PyRange {
 public:
  PyRange(std::string what, int64_t bucket) : what_(std::move(what)), bucket_(bucket) {}
  void enter() { range_.emplace(what_.c_str(), bucket_); }
  void exit(const py::args& /*error*/) { range_.reset(); }

 private:
  std::string what_;
  int64_t bucket_;
  std::optional<Range> range_;
};

// What DistributedDataParallel's reducer keeps to itself: whether it waits for gradients.
struct Expects : c10d::Reducer {
  static bool gradients(const c10d::Reducer& reducer) { return reducer.*(&Expects::expect_autograd_hooks_); }
};

void bind_other_reducers(py::module_& m) {
  m.def("expects_gradients", &Expects::gradients, py::arg("reducer"));
  m.def(
      "set_find_reduced",
      [](py::function find) {
        auto* function = new py::function(std::move(find));  // leaked: threads may ask until the process is gone
        set_find_reduced([function](const HookedByOthers& hooked) {
          const py::gil_scoped_acquire acquire;
          return (*function)(hooked.params, hooked.counts).cast<int64_t>();
        });
      },
      py::arg("find"));
}

void bind(py::module_& m) {
  bind_other_reducers(m);
  m.attr("EXACT_WORDS") = kExactWords;
  m.attr("SEGMENT_COLUMNS") = kSegmentColumns;
  m.attr("SIGNED_MAP") = py::tuple(py::cast(std::to_array(kSignedMap.values)));
  m.attr("UNSIGNED_MAP") = py::tuple(py::cast(std::to_array(kUnsignedMap.values)));
  m.def("isa", [] { return std::string(kernels().name); });
  m.def("supported_isas", &supported_isas);
  m.def("select_isa", &select_isa);

  m.def("advise_large_pages", &advise_large_pages);
  m.def("with_own_storage", &with_own_storage);
  m.def("has_own_storage", &has_own_storage);
  m.def("let_siblings_read", &let_siblings_read);
  m.def("read_memory", [](pid_t pid, uint64_t address, at::Tensor into) {
    return read_memory(pid, address, into.mutable_data_ptr(), into.nbytes());
  });

  py::enum_<Place>(m, "Place")
      .value("STEP", Place::step)
      .value("CLIP", Place::clip)
      .value("SYNCHRONIZE", Place::synchronize)
      .value("UNSCALE", Place::unscale);
  py::enum_<Combine>(m, "Combine").value("SUM", Combine::sum).value("MAX", Combine::max);
  py::enum_<Settled>(m, "Settled").value("READY", Settled::ready).value("ADOPT", Settled::adopt);

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
                                        }});
      },
      py::arg("names_are_new"));

  py::class_<Process>(m, "Process").def(py::init<>()).def("check", &Process::check);
  m.def("before_fork", &ReadGuard::before_fork, Release());
  m.def("keep_forever", [](py::object kept) { kept.release(); }, py::arg("kept"));

  py::class_<PyRange>(m, "Range")
      .def(py::init<std::string, int64_t>(), py::arg("what"), py::arg("bucket"))
      .def("__enter__", &PyRange::enter)
      .def("__exit__", &PyRange::exit);

  py::class_<ExchangeKind>(m, "ExchangeKind")
      .def(py::init<bool, bool, bool, std::vector<int64_t>>(), py::kw_only(), py::arg("direct"), py::arg("messages"),
           py::arg("staged"), py::arg("neighbours"));
  py::class_<Whereabouts, std::shared_ptr<Whereabouts>>(m, "Whereabouts")
      .def(py::init(&make_whereabouts), py::kw_only(), py::arg("groups"), py::arg("store"), py::arg("rank"),
           py::arg("world"), py::arg("timeout"))
      .def("set_processes", &Whereabouts::set_processes, py::arg("processes"), Release())
      .def(
          "await_", [](Whereabouts& self, Work work) { self.await({std::move(work)}); }, py::arg("work"), Release())
      .def("leave", &Whereabouts::leave, py::arg("what"), Release());
  py::class_<ManagerOptions>(m, "ManagerOptions")
      .def(py::init<bool, bool, at::Device>(), py::kw_only(), py::arg("whole_grads"), py::arg("keeps_shards"),
           py::arg("device"));

  py::class_<BucketManager, std::shared_ptr<BucketManager>>(m, "BucketManager")
      .def(py::init(&make_manager), py::arg("group"), py::arg("control"), py::arg("whereabouts"), py::arg("exchange"),
           py::arg("options"))
      .def(
          "add_bucket",
          [](BucketManager& self, const std::vector<std::string>& names, const std::vector<at::Tensor>& params,
             const std::vector<at::Tensor>& homes, at::Tensor flat,
             const std::optional<std::vector<at::Tensor>>& placeholders, const std::vector<int64_t>& offsets,
             at::ScalarType wire_dtype, at::ScalarType grad_dtype, int64_t shard_numel, int64_t trailer_numel,
             at::Tensor segments, int64_t num_straight) {
            BucketSpec spec{{},          std::move(flat), wire_dtype,          grad_dtype,
                            shard_numel, trailer_numel,   std::move(segments), num_straight};
            for (size_t i = 0; i < params.size(); ++i) {
              spec.slots.push_back({names.at(i), params[i], homes.at(i),
                                    placeholders ? placeholders->at(i) : at::Tensor(), offsets.at(i)});
            }
            const py::gil_scoped_release release;  // who holds the manager's lock may need it to free a gradient
            return self.add_bucket(std::move(spec));
          },
          py::arg("names"), py::arg("params"), py::arg("homes"), py::arg("flat"), py::arg("placeholders"),
          py::arg("offsets"), py::arg("wire_dtype"), py::arg("grad_dtype"), py::arg("shard_numel"),
          py::arg("trailer_numel"), py::arg("segments"), py::arg("num_straight"))
      .def("settle", &BucketManager::settle, py::arg("place"), py::arg("adoptions") = 0, py::arg("refusal") = "",
           Release())
      .def(
          "land", [](BucketManager& self) { self.flights().land(); }, Release())
      .def("zero", &BucketManager::zero, py::arg("set_to_none"), Release())
      .def("set_sync", &BucketManager::set_sync, Release())
      .def("take_local_shard", &BucketManager::take_local_shard, Release())
      .def(
          "take_local_pieces",
          [](BucketManager& self, int64_t i) {
            std::vector<std::optional<at::Tensor>> pieces;
            for (at::Tensor& piece : self.take_local_pieces(i)) {
              pieces.push_back(piece.defined() ? std::optional(std::move(piece)) : std::nullopt);
            }
            return pieces;
          },
          Release())
      .def("mark_zeroed", &BucketManager::mark_zeroed, Release())
      .def("mark_scaled", &BucketManager::mark_scaled, Release())
      .def("start_gather", &BucketManager::start_gather, py::arg("bucket"), py::arg("background") = false, Release())
      .def(
          "wait_for_gathers",
          [](BucketManager& self, const std::vector<int64_t>& buckets) { self.gathers().wait(buckets); }, Release())
      .def(
          "finish_gathers", [](BucketManager& self) { self.gathers().finish(); }, Release())
      .def("guard_reads", [](BucketManager& self) { self.gathers().guard_reads(); })
      .def_property_readonly("missing_gathers", [](BucketManager& self) { return self.gathers().missing(); })
      .def_property_readonly("gathers_used", [](BucketManager& self) { return self.gathers().order_of_use(); })
      .def(
          "propose_gather_order",
          [](BucketManager& self, std::vector<int64_t> buckets) {
            self.gathers().order().proposed = std::move(buckets);
          },
          py::arg("buckets"))
      .def_property_readonly("gather_order", &BucketManager::gather_order)
      .def("hold_gathers", [](BucketManager& self, bool hold) { self.gathers().set_hold(hold); })
      .def("moved", &BucketManager::moved)
      .def("bump_versions", &BucketManager::bump_versions)
      .def("all_reduce", &BucketManager::all_reduce, Release())
      .def("shard", [](BucketManager& self, int64_t i) { return tensor_or_none(self.whole_shard(i)); })
      .def("pieces", [](BucketManager& self, int64_t i) { return self.bucket(i).landed.pieces; })
      .def("parts",
           [](BucketManager& self, int64_t i) {
             std::vector<std::tuple<int64_t, int64_t, at::Tensor>> parts;
             for (const Part& part : self.parts(i)) parts.emplace_back(part.start, part.first_row, part.segments);
             return parts;
           })
      .def("present", [](BucketManager& self, int64_t i) { return self.bucket(i).landed.present; })
      .def("words", [](BucketManager& self, int64_t i) { return tensor_or_none(self.bucket(i).landed.words); })
      .def("hold_flights", [](BucketManager& self, bool hold) { self.flights().set_hold(hold); })
      .def_property_readonly("num_launched", [](BucketManager& self) { return self.flights().num_launched(); })
      .def_property_readonly("num_added", &BucketManager::num_added)
      .def_property_readonly("holds_scaled", &BucketManager::holds_scaled)
      .def_property_readonly("num_landed", [](BucketManager& self) { return self.flights().num_landed(); })
      .def_property_readonly("num_buckets", [](BucketManager& self) { return self.launch_order().size(); })
      .def_property_readonly("settled", &BucketManager::settled)
      .def_property_readonly("launch_order", &BucketManager::launch_order)
      .def_property_readonly("traffic", [](BucketManager& self) {
        if (self.exchange() == nullptr) return std::pair<int64_t, int64_t>(0, 0);
        const Traffic& traffic = self.exchange()->traffic();
        return std::pair<int64_t, int64_t>(traffic.messages, traffic.bytes);
      });
}

}  // namespace
}  // namespace zx

PYBIND11_MODULE(_C, m) { zx::bind(m); }
