#include <pybind11/chrono.h>

#include <memory>
#include <optional>
#include <string>
#include <tuple>
#include <vector>

#include "bindings/bindings.h"
#include "bindings/destroyed_without_gil.h"
#include "exchange/collectives.h"
#include "exchange/exchange.h"
#include "peers/failure_detector.h"
#include "peers/long_waits.h"
#include "peers/neighbours.h"

namespace zx {
namespace {

// The object may hold the last reference to the groups.
std::shared_ptr<FailureDetector> make_failure_detector(std::vector<Group> groups, c10::intrusive_ptr<c10d::Store> store,
                                                       int rank, int world, std::chrono::milliseconds timeout,
                                                       std::chrono::milliseconds say_after) {
  return destroyed_without_gil(
      new FailureDetector(std::move(groups), std::move(store), rank, world, timeout, say_after));
}

// For Python's with statement.
template <class Inside, class... Arguments>
class Within {
 public:
  explicit Within(Arguments... arguments) : arguments_(std::move(arguments)...) {}
  void enter() {
    std::apply([this](auto&... each) { inside_.emplace(each...); }, arguments_);
  }
  void exit(const py::args& /*error*/) { inside_.reset(); }

 private:
  std::tuple<Arguments...> arguments_;
  std::optional<Inside> inside_;
};

struct NamedDoing : Doing {
  NamedDoing(const std::string& what, bool per_batch) : Doing([what] { return what; }, per_batch) {}
};

struct NamedWait : LongWait {
  NamedWait(const WaitingFor& waiting, std::chrono::milliseconds say_after)
      : LongWait(say_after, [waiting] { return waiting; }) {}
};

}  // namespace

void bind_exchange(py::module_& m) {
  m.def("let_siblings_read", &let_siblings_read);
  m.def("read_memory", [](pid_t pid, uint64_t address, at::Tensor into) {
    return read_memory(pid, address, into.mutable_data_ptr(), into.nbytes());
  });
  m.def("start_all_reduce", &start_all_reduce, py::arg("group"), py::arg("values"), py::arg("op"), Release());
  m.def("start_broadcast", &start_broadcast, py::arg("group"), py::arg("values"), py::arg("root"), Release());
  m.def("start_gather", &start_gather, py::arg("group"), py::arg("received"), py::arg("sent"), py::arg("root"),
        Release());
  m.def("start_all_gather", &start_all_gather, py::arg("group"), py::arg("received"), py::arg("sent"), Release());
  m.def("start_all_to_all", &start_all_to_all, py::arg("group"), py::arg("received"), py::arg("sent"),
        py::arg("from_each"), py::arg("to_each"), Release());
  py::class_<ExchangeKind>(m, "ExchangeKind")
      .def(py::init<bool, bool, bool, std::vector<int64_t>>(), py::kw_only(), py::arg("direct"),
           py::arg("single_messages"), py::arg("via_host"), py::arg("neighbours"));
  py::class_<FailureDetector, std::shared_ptr<FailureDetector>>(m, "FailureDetector")
      .def(py::init(&make_failure_detector), py::kw_only(), py::arg("groups"), py::arg("store"), py::arg("rank"),
           py::arg("world"), py::arg("timeout"), py::arg("say_after"))
      .def("set_processes", &FailureDetector::set_processes, py::arg("processes"), Release())
      .def("add_group", &FailureDetector::add_group, py::arg("group"), Release())
      .def(
          "await_", [](FailureDetector& self, Work work) { self.await({std::move(work)}, {}, kUnknownRank); },
          py::arg("work"), Release())
      .def("stand_outside", &FailureDetector::stand_outside, py::arg("where"), Release())
      .def("leave", &FailureDetector::leave, py::arg("what"), Release());
  using PyDoing = Within<NamedDoing, std::string, bool>;
  py::class_<PyDoing>(m, "Doing")
      .def(py::init<std::string, bool>(), py::arg("what"), py::arg("per_batch") = false)
      .def("__enter__", &PyDoing::enter)
      .def("__exit__", &PyDoing::exit);
  m.def(
      "say_wait",
      [](int rank, const std::string& doing, const std::string& whom, std::chrono::milliseconds waited,
         std::chrono::milliseconds timeout) {
        say(WaitingFor{rank, whom, "", timeout}.line(doing, std::chrono::duration_cast<std::chrono::seconds>(waited)));
      },
      py::kw_only(), py::arg("rank"), py::arg("doing"), py::arg("whom"), py::arg("waited"), py::arg("timeout"));
  using PyWait = Within<NamedWait, WaitingFor, std::chrono::milliseconds>;
  py::class_<PyWait>(m, "LongWait")
      .def(py::init(
               [](int rank, std::string whom, std::chrono::milliseconds timeout, std::chrono::milliseconds say_after) {
                 return std::make_unique<PyWait>(WaitingFor{rank, std::move(whom), "", timeout}, say_after);
               }),
           py::kw_only(), py::arg("rank"), py::arg("whom"), py::arg("timeout"), py::arg("say_after"))
      .def("__enter__", &PyWait::enter)
      .def("__exit__", &PyWait::exit);
}

}  // namespace zx
