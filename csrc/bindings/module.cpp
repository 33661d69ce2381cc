// The extension: op schemas, and what belongs to no room.
#include <torch/library.h>

#include <array>

#include "bindings/rooms.h"
#include "cpu/isa.h"
#include "lanes/process.h"
#include "lanes/ranges.h"
#include "math/dynamic_map.h"
#include "math/exact_sum.h"
#include "math/segment.h"

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

void bind_constants(py::module_& m) {
  m.attr("EXACT_WORDS") = kExactWords;
  m.attr("SEGMENT_COLUMNS") = kSegmentColumns;
  m.attr("SIGNED_MAP") = py::tuple(py::cast(std::to_array(kSignedMap.values)));
  m.attr("UNSIGNED_MAP") = py::tuple(py::cast(std::to_array(kUnsignedMap.values)));
  m.def("isa", [] { return std::string(kernels().name); });
  m.def("supported_isas", &supported_isas);
  m.def("select_isa", &select_isa);
}

void bind_process(py::module_& m) {
  py::class_<Process>(m, "Process").def(py::init<>()).def("check", &Process::check);
  m.def("keep_forever", [](py::object kept) { kept.release(); }, py::arg("kept"));
  py::class_<PyRange>(m, "Range")
      .def(py::init<std::string, int64_t>(), py::arg("what"), py::arg("bucket"))
      .def("__enter__", &PyRange::enter)
      .def("__exit__", &PyRange::exit);
}

}  // namespace
}  // namespace zx

PYBIND11_MODULE(_C, m) {
  zx::bind_constants(m);
  zx::bind_process(m);
  zx::bind_exchange(m);
  zx::bind_params(m);
  zx::bind_grads(m);
}
