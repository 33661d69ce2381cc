// The extension: op schemas, and the bindings that belong to no other file.
#include <torch/library.h>

#include <array>

#include "bindings/bindings.h"
#include "cpu/isa.h"
#include "math/dynamic_map.h"
#include "math/exact_sum.h"
#include "math/segment.h"
#include "workers/process.h"
#include "workers/ranges.h"

// Notation: there are W ranks. A shard has n elements, and s segments, which are parts of parameters.
TORCH_LIBRARY(zerox, m) {
  // flat[piece.flat_start : + numel] = sources[piece.source][piece.source_start : + numel], cast to flat's dtype, for
  // each row (source, source_start, flat_start, numel) of `pieces`. Rows are in the order of flat_start, and `flags`
  // ascend. flat[flags] = 1, and all other elements are 0.
  m.def("flatten_(Tensor(a!) flat, Tensor[] sources, Tensor pieces, Tensor flags) -> ()");
  // Reads the flags after the shard in each slice into uint8 [s]: replaced if any slice says so; present if any slice
  // says so, or if it was before and is not replaced.
  m.def("read_flags_(Tensor(a!) present, Tensor(b!) replaced, Tensor[] slices, int shard_numel) -> ()");
  // shard = sum(slices) / divisor, in slice order, plus the old shard if `accumulate` and not replaced; adds the sum of
  // squares to `limbs`, an exact sum (csrc/math/exact_sum.h).
  m.def(
      "reduce_(Tensor(a!) shard, Tensor(b!) limbs, Tensor[] slices, Tensor segments, Tensor replaced, "
      "float divisor, bool accumulate) -> ()");
  // Adds sum |x|^p over the segments to `limbs`, or of each to a row of them; for p = inf keeps the largest |x|.
  // Of the elements that `mask` keeps: uint8 [ceil(n / 8) + 4], element i is bit i % 8 of byte i / 8.
  m.def("norm_(Tensor(a!) limbs, Tensor shard, Tensor segments, float p, Tensor? mask=None) -> ()");
  // float64 [2], or [n, 2] of n sums: the norm, and 1 if every element was finite.
  m.def("norm_value(Tensor limbs, float p) -> Tensor");
  // Does one step of `rule` (the kName of one in csrc/math) on shards of the same types, in few launches, for the
  // segments that are present. Every list has one tensor per shard, with exceptions: `master` is empty if no master
  // is kept, and `masks` if all elements are, and a mask without elements keeps all of its shard's; `state`, and
  // `scales` (float32 [ceil(n / 256)], for uint8 state), have as many per shard as the rule keeps, shard by shard.
  // `steps` is int64 [s]; `options` is float64 [groups, columns], with rows as the rule's Options (csrc/math);
  // `grad_scale` is a float64 scalar.
  m.def(
      "update_(str rule, Tensor(a!)[] param, Tensor(b!)[] master, Tensor[] grad, Tensor(c!)[] state, "
      "Tensor(d!)[] scales, Tensor[] segments, Tensor[] present, Tensor(e!)[] steps, Tensor options, "
      "Tensor? grad_scale, Tensor[] masks) -> ()");
  // Does one lazy step of `rule` on n rows of a table [R, D]: row rows[i] (int64 [n], no row twice) has its gradient in
  // grads[i] (float32 [n, D]), and its master and its states, as many as the rule keeps, at places[i] of [P, D].
  // `step`, int64 on the host, counts up if the rule counts. Gradients are multiplied by `scale`, then cut at `limit`.
  m.def(
      "update_rows_(str rule, Tensor(a!) values, Tensor(b!)? master, Tensor grads, Tensor(c!)[] states, "
      "Tensor(d!) step, Tensor rows, Tensor places, float[] options, float scale, float limit) -> ()");
}

namespace zx {
namespace {

// A range for Python's with statement.
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

// Whether a dict of dicts has the very objects that it had when `seen` was made of it, in order: each key, its value,
// and of a value that is a dict the values. step() asks every time, and in Python that takes 0.2 us a parameter.
bool dict_has_same_objects(const py::dict& found, const py::list& seen) {
  const Py_ssize_t count = PyList_GET_SIZE(seen.ptr());
  Py_ssize_t next = 0;
  const auto is_next = [&](PyObject* object) { return next < count && PyList_GET_ITEM(seen.ptr(), next++) == object; };
  Py_ssize_t outer = 0;
  for (PyObject *key = nullptr, *value = nullptr; PyDict_Next(found.ptr(), &outer, &key, &value) != 0;) {
    if (!is_next(key) || !is_next(value)) return false;
    Py_ssize_t inner = 0;
    PyObject* kept = nullptr;
    while (PyDict_Check(value) && PyDict_Next(value, &inner, nullptr, &kept) != 0) {
      if (!is_next(kept)) return false;
    }
  }
  return next == count;
}

// Whether two lists have the very same objects in order. Tensors have no == that says so.
bool list_has_same_objects(const py::list& found, const py::list& seen) {
  const Py_ssize_t count = PyList_GET_SIZE(seen.ptr());
  if (PyList_GET_SIZE(found.ptr()) != count) return false;
  for (Py_ssize_t index = 0; index < count; ++index) {
    if (PyList_GET_ITEM(found.ptr(), index) != PyList_GET_ITEM(seen.ptr(), index)) return false;
  }
  return true;
}

void bind_constants(py::module_& m) {
  m.attr("EXACT_LIMBS") = kExactLimbs;
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
  m.def("has_same_objects", &dict_has_same_objects, py::arg("found"), py::arg("seen"));
  m.def("has_same_objects", &list_has_same_objects, py::arg("found"), py::arg("seen"));
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
  zx::bind_rows(m);
  zx::bind_params(m);
  zx::bind_residency(m);
  zx::bind_grads(m);
}
