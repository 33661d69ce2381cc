#include <pybind11/chrono.h>
#include <pybind11/stl.h>

#include <memory>
#include <optional>
#include <string>
#include <tuple>
#include <vector>

#include "bindings/bindings.h"
#include "bindings/destroyed_without_gil.h"
#include "exchange/collectives.h"
#include "exchange/exchange.h"
#include "exchange/state_tensors.h"
#include "peers/failure_detector.h"
#include "peers/linger.h"
#include "peers/long_waits.h"
#include "peers/neighbours.h"
#include "peers/peer_states.h"
#include "peers/published_state.h"
#include "peers/readers_by_message.h"
#include "peers/readers_in_memory.h"
#include "peers/state_questions.h"
#include "peers/state_server.h"
#include "peers/states_in_memory.h"

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
  m.def("close_connections", &close_connections, py::arg("group"), Release());
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
      .def("add_group", &FailureDetector::add_group, py::arg("group"), py::arg("for_questions") = false, Release())
      .def(
          "await_", [](FailureDetector& self, Work work) { self.await({std::move(work)}, {}, kUnknownRank); },
          py::arg("work"), Release())
      .def("stand_outside", &FailureDetector::stand_outside, py::arg("where"), Release())
      .def("leave", &FailureDetector::leave, py::arg("what"), Release());
  py::enum_<StateChange>(m, "StateChange")
      .value("OF_THIS_RANK", StateChange::of_this_rank)
      .value("OF_ALL", StateChange::of_all)
      .value("STEP", StateChange::step)
      .value("LOAD", StateChange::load);
  py::class_<PublishedState, std::shared_ptr<PublishedState>>(m, "PublishedState")
      .def(py::init<>())
      .def_property_readonly("address", &PublishedState::address)
      .def_property_readonly("version", &PublishedState::version)
      .def("begin_change", &PublishedState::begin_change)
      .def("follow_change", &PublishedState::follow_change)
      .def(
          "end_change",
          [](PublishedState& self, StateChange what, bool is_whole, std::optional<std::vector<at::Tensor>> tensors) {
            self.end_change(what, is_whole, tensors ? std::make_shared<StateTensors>(std::move(*tensors)) : nullptr);
          },
          py::arg("what"), py::arg("is_whole"), py::arg("tensors"));
  py::class_<StateServer, std::shared_ptr<StateServer>>(m, "StateServer")
      .def(py::init([](const Group& group, bool is_pinned) {
             return destroyed_without_gil(new StateServer(group, is_pinned), /*also_at_exit=*/false);
           }),
           py::arg("group"), py::arg("is_pinned"))
      .def("serve", [](StateServer& self, const std::shared_ptr<PublishedState>& state) { self.serve(state); });
  py::class_<StateSource, std::shared_ptr<StateSource>>(m, "StateSource");
  py::class_<StateQuestions, StateSource, std::shared_ptr<StateQuestions>>(m, "StateQuestions")
      .def(py::init<const Group&>(), py::arg("group"));
  py::class_<StatesInMemory, StateSource, std::shared_ptr<StatesInMemory>>(m, "StatesInMemory")
      .def(py::init([](std::vector<int64_t> processes, std::vector<uint64_t> control_blocks) {
             return std::make_shared<StatesInMemory>(StateReader(std::move(processes), std::move(control_blocks)));
           }),
           py::arg("processes"), py::arg("control_blocks"));
  py::class_<Linger, std::shared_ptr<Linger>>(m, "Linger")
      .def(py::init<const std::shared_ptr<FailureDetector>&, std::vector<int64_t>, int>(), py::arg("failure_detector"),
           py::arg("processes"), py::arg("rank"))
      .def(
          "read_in_memory",
          [](const std::shared_ptr<Linger>& self, std::vector<uint64_t> control_blocks) {
            self->set_readers(
                std::make_unique<ReadersInMemory>(self->processes(), std::move(control_blocks), self->control_block()));
            Linger::list(self);
          },
          py::arg("control_blocks"))
      .def(
          "tell_by_message",
          [](const std::shared_ptr<Linger>& self, const Group& group, std::shared_ptr<StateServer> server,
             std::shared_ptr<StateQuestions> questions) {
            self->set_readers(std::make_unique<ReadersByMessage>(group, std::move(server), std::move(questions)));
            Linger::list(self);
          },
          py::arg("group"), py::arg("server"), py::arg("questions"))
      .def_property_readonly("address", [](const Linger& self) { return self.control_block()->address(); })
      .def_property_readonly("rank", &Linger::rank)
      .def_property_readonly("processes", &Linger::processes)
      .def_property_readonly("timeout", &Linger::timeout)
      .def_property_readonly("has_given_up", &Linger::has_given_up)
      .def("readers", &Linger::readers, Release())
      .def("end", &Linger::end, Release())
      .def("end_waits", &Linger::end_waits, Release())
      .def_static("all", &Linger::all)
      .def_static("free_no_more", &Linger::free_no_more, Release())
      .def_static("come_no_more", &Linger::come_no_more, Release());
  py::class_<PeerStates, std::shared_ptr<PeerStates>>(m, "PeerStates")
      .def(py::init([](std::shared_ptr<PublishedState> own, std::shared_ptr<FailureDetector> failure_detector,
                       std::shared_ptr<Linger> linger, std::shared_ptr<StateSource> others) {
             auto* const made =
                 new PeerStates(std::move(own), std::move(failure_detector), std::move(linger), std::move(others));
             return destroyed_without_gil(made, /*also_at_exit=*/false);  // then others may still read the state
           }),
           py::kw_only(), py::arg("own"), py::arg("failure_detector"), py::arg("linger"), py::arg("others"))
      .def("await_pulls", &PeerStates::await_pulls, Release())
      .def("read", &PeerStates::read, py::kw_only(), py::arg("rank"), py::arg("version"), py::arg("num_places"),
           py::arg("place"), py::arg("start"), py::arg("into"), Release());
  using PyPull = Within<PeerStates::Pull, std::reference_wrapper<PeerStates>>;
  py::class_<PyPull>(m, "StatePull")
      .def(py::init([](PeerStates& states) { return std::make_unique<PyPull>(std::ref(states)); }), py::arg("states"),
           py::keep_alive<1, 2>())
      .def("__enter__", &PyPull::enter)
      .def("__exit__", &PyPull::exit);
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
