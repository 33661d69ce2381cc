#include <pybind11/chrono.h>

#include <memory>
#include <optional>
#include <utility>
#include <vector>

#include "bindings/bindings.h"
#include "bindings/destroyed_without_gil.h"
#include "grads/backward.h"
#include "params/own_storage.h"
#include "residency/address_range.h"
#include "residency/digest.h"
#include "residency/residency.h"
#include "residency/unseen.h"

namespace zx {
namespace {

// `group`: null if all ranks read each other's memory. `faults`: whether reads that nothing announces may fault.
std::shared_ptr<Residency> make_residency(std::optional<Group> group, std::shared_ptr<FailureDetector> failure_detector,
                                          std::shared_ptr<Linger> linger, std::vector<int64_t> processes,
                                          std::vector<int> ranks, int num_holders, int rank,
                                          std::chrono::milliseconds timeout, bool faults) {
  if (!faults && !can_forbid_reads()) throw py::value_error("ZEROX_FAULTS=0 needs torch 2.12 or newer");
  Residents::keep_for_others(nullptr);
  auto peers = std::make_shared<PeerShards>(Communicator{group.value_or(Group()), std::move(failure_detector)},
                                            std::move(linger), std::move(processes), std::move(ranks), num_holders,
                                            rank, timeout);
  Linger::before_end(peers, [at = peers.get()] { at->come_no_more(); });
  auto* const made = new Residency(std::move(peers), faults ? HiddenReads::fault : HiddenReads::raise);
  const auto shared = destroyed_without_gil(made, /*also_at_exit=*/false);  // then others may still read its shards
  Residency::list(shared);
  return shared;
}

}  // namespace

void bind_residency(py::module_& m) {
  m.def("digest", [](const at::Tensor& flat) {  // of a tensor anywhere, but the host reads it
    const at::Tensor here = flat.cpu();
    return digest(here.const_data_ptr(), here.nbytes());
  });
  // An operator that a guard sees would fetch the bucket.
  m.def(
      "view_unseen",
      [](const at::Tensor& flat, const std::vector<int64_t>& sizes, const std::vector<int64_t>& strides,
         int64_t start) {
        const Unseen unseen;
        return flat.as_strided(sizes, strides, start);
      },
      py::arg("flat"), py::arg("sizes"), py::arg("strides"), py::arg("start"));
  m.def(
      "wait_until_awaited",
      [](Backward& backward, std::chrono::milliseconds most) {
        backward.wait_longer(most, &Residency::is_any_awaited);
      },
      py::arg("backward"), py::arg("most"));
  m.def("has_address_ranges", &has_address_ranges);
  m.def("room_bytes", &AddressRange::bytes_in_use);
  m.def("most_room_bytes", &AddressRange::most_in_use);
  py::class_<Room, std::shared_ptr<Room>>(m, "Room")
      .def("tensor", &Room::tensor, py::arg("dtype"))
      .def("with_own_storage", &Room::with_own_storage, py::arg("view"))
      .def(
          "has", [](const Room& self, uint64_t address) { return self.has(reinterpret_cast<const void*>(address)); },
          py::arg("address"))
      .def_property_readonly("address", [](const Room& self) { return reinterpret_cast<uint64_t>(self.address()); })
      .def_property_readonly("nbytes", &Room::bytes);
  py::class_<ShardPlace>(m, "ShardPlace")
      .def(py::init([](uint64_t shard, uint64_t stamps, std::optional<at::Tensor> mapped) {
             return ShardPlace{shard, stamps, mapped.value_or(at::Tensor())};
           }),
           py::arg("shard"), py::arg("stamps"), py::arg("mapped"))
      .def_readonly("shard", &ShardPlace::shard)
      .def_readonly("stamps", &ShardPlace::stamps);
  py::class_<ResidentCounts>(m, "ResidentCounts")
      .def_readonly("fetches", &ResidentCounts::fetches)
      .def_readonly("fetched_bytes", &ResidentCounts::fetched_bytes)
      .def_readonly("faults", &ResidentCounts::faults)
      .def_readonly("waits", &ResidentCounts::waits)
      .def_readonly("prefetches", &ResidentCounts::prefetches)
      .def_readonly("waited_ns", &ResidentCounts::waited_ns);
  py::class_<ResidencyEvent> event(m, "ResidencyEvent");
  py::enum_<ResidencyEvent::Kind>(event, "Kind")
      .value("FETCH", ResidencyEvent::Kind::fetch)
      .value("ARRIVE", ResidencyEvent::Kind::arrive)
      .value("RELEASE", ResidencyEvent::Kind::release)
      .value("WAIT", ResidencyEvent::Kind::wait)
      .value("GO_ON", ResidencyEvent::Kind::go_on)
      .value("STEP", ResidencyEvent::Kind::step);
  event.def_readonly("kind", &ResidencyEvent::kind)
      .def_readonly("bucket", &ResidencyEvent::bucket)
      .def_readonly("time_ns", &ResidencyEvent::time_ns)
      .def_readonly("resident_bytes", &ResidencyEvent::resident_bytes);
  py::class_<Residency, std::shared_ptr<Residency>>(m, "Residency")
      .def(py::init(&make_residency), py::kw_only(), py::arg("group"), py::arg("failure_detector"), py::arg("linger"),
           py::arg("processes"), py::arg("ranks"), py::arg("num_holders"), py::arg("rank"), py::arg("timeout"),
           py::arg("faults"))
      .def(
          "set_limit",
          [](Residency& self, double bytes) { self->set_limit(bytes < 9e18 ? static_cast<size_t>(bytes) : SIZE_MAX); },
          py::arg("nbytes"), Release())
      .def(
          "set_state", [](Residency& self, const std::shared_ptr<PublishedState>& state) { self->set_state(state); },
          py::arg("state"))
      .def(
          "make_room", [](Residency& self, size_t bytes, at::Device device) { return self.make_room(bytes, device); },
          py::arg("nbytes"), py::arg("device"), Release())
      .def(
          "add",
          [](Residency& self, std::string name, std::shared_ptr<Room> room, at::Tensor shard,
             const std::vector<int64_t>& shard_starts, bool is_served) {
            return self->add(std::move(name), std::move(room), std::move(shard), shard_starts, is_served);
          },
          py::arg("name"), py::arg("room"), py::arg("shard"), py::arg("shard_starts"), py::arg("is_served"), Release())
      .def(
          "make_table_room",
          [](Residency& self, size_t bytes, at::Device device) { return self.make_table_room(bytes, device); },
          py::arg("nbytes"), py::arg("device"), Release())
      .def(
          "add_table",
          [](Residency& self, std::string name, std::shared_ptr<Room> room, at::Tensor shard, bool is_served,
             int64_t num_rows, const at::Tensor& of_block) {
            return self->add_table(std::move(name), std::move(room), std::move(shard), is_served, num_rows, of_block);
          },
          py::arg("name"), py::arg("room"), py::arg("shard"), py::arg("is_served"), py::arg("num_rows"),
          py::arg("of_block"), Release())
      .def(
          "watch_added", [](Residency& self) { self->watch_added(); }, Release())
      .def(
          "place", [](Residency& self, int64_t bucket) { return self->place(bucket); }, py::arg("bucket"), Release())
      .def(
          "begin_fill", [](Residency& self, int64_t bucket) { self->filling().begin(bucket); }, py::arg("bucket"),
          Release())
      .def(
          "end_fill",
          [](Residency& self, int64_t bucket, std::vector<ShardPlace> by_rank) {
            self->filling().end(bucket, std::move(by_rank));
          },
          py::arg("bucket"), py::arg("by_rank"), Release())
      .def(
          "await_filled", [](Residency& self) { self->filling().await_filled(); }, Release())
      .def(
          "give_up_filling", [](Residency& self) { self->filling().give_up(); }, Release())
      .def(
          "begin_update", [](Residency& self) { self->begin_update(); }, Release())
      .def(
          "publish",
          [](Residency& self, int64_t bucket, const std::optional<at::Tensor>& rows) {
            self->publish(bucket, rows.value_or(at::Tensor()));
          },
          py::arg("bucket"), py::arg("rows") = std::nullopt, Release())
      .def(
          "end_update",
          [](Residency& self, bool is_update, bool any_written) { self->end_update(is_update, any_written); },
          py::arg("is_update"), py::arg("any_written"), Release())
      .def(
          "enter_whole", [](Residency& self) { self->enter_whole(); }, Release())
      .def(
          "leave_whole", [](Residency& self) { self->leave_whole(); }, Release())
      .def(
          "refresh_whole", [](Residency& self) { self->refresh_whole(); }, Release())
      .def(
          "written_inside", [](Residency& self) { return self->written_inside(); }, Release())
      .def(
          "keep_written", [](Residency& self, const std::vector<int64_t>& buckets) { self->keep_written(buckets); },
          py::arg("buckets"), Release())
      .def(
          "drop_written", [](Residency& self, const std::vector<int64_t>& buckets) { self->drop_written(buckets); },
          py::arg("buckets"), Release())
      .def(
          "stand_by", [](Residency& self, bool does) { self->stand_by(does); }, py::arg("does"), Release())
      .def_property_readonly("kept", py::cpp_function([](Residency& self) { return self->kept(); }, Release()))
      .def(
          "take_back", [](Residency& self) { return self->take_back(); }, Release())
      .def(
          "come", [](Residency& self) { self->come(); }, Release())
      .def(
          "let_kept_go", [](Residency& self) { self->let_kept_go(); }, Release())
      .def_readwrite("identity", &Residency::identity)
      .def_property_readonly("has_shards", &Residency::has_shards)
      .def_property_readonly("version", [](Residency& self) { return self->handover().version(); })
      .def_property_readonly("kind", [](Residency& self) { return self->kind(); })
      .def_static("left_with", &Residency::left_with, py::arg("tensor"), Release())
      .def("leave_to_params", &Residency::leave_to_params, Release())
      .def(
          "bucket_of", [](Residency& self, const at::Tensor& tensor) { return self->handover().bucket_of(tensor); },
          py::arg("tensor"), Release())
      .def(
          "room", [](Residency& self, int64_t bucket) { return self->handover().room(bucket); }, py::arg("bucket"))
      .def(
          "shard", [](Residency& self, int64_t bucket) { return self->handover().shard(bucket); }, py::arg("bucket"))
      .def(
          "is_free", [](Residency& self, int64_t bucket) { return self->handover().is_free(bucket); },
          py::arg("bucket"), Release())
      .def(
          "begin_handover",
          [](Residency& self, const std::vector<int64_t>& buckets) { return self->handover().begin(buckets); },
          py::arg("buckets"), Release())
      .def("take", &Residency::take, py::arg("source"), py::arg("bucket"), py::arg("name"), py::arg("shard_starts"),
           py::arg("is_served"), Release())
      .def(
          "end_handover", [](Residency& self) { self->handover().end(); }, Release())
      .def("let_shards_go", &Residency::let_shards_go, Release())
      .def(
          "take_failure", [](Residency& self) { return self->take_failure(); }, Release())
      .def(
          "set_hostile", [](Residency& self, bool hostile) { self->set_hostile(hostile); }, py::arg("hostile"))
      .def(
          "release_all", [](Residency& self) { self->release_all(); }, Release())
      .def(
          "record", [](Residency& self, bool on) { self->record(on); }, py::arg("on"), Release())
      .def(
          "take_events", [](Residency& self) { return self->take_events(); }, Release())
      .def(
          "take_most_bytes", [](Residency& self) { return self->take_most_bytes(); }, Release())
      .def_property_readonly("counts", py::cpp_function([](Residency& self) { return self->counts(); }, Release()))
      .def_property_readonly("resident_bytes",
                             py::cpp_function([](Residency& self) { return self->resident_bytes(); }, Release()))
      .def_property_readonly("room_bytes",
                             py::cpp_function([](Residency& self) { return self->room_bytes(); }, Release()))
      .def_property_readonly("served_bytes",
                             py::cpp_function([](Residency& self) { return self->served_bytes(); }, Release()))
      .def_property_readonly("resident", py::cpp_function([](Residency& self) { return self->resident(); }, Release()))
      .def_property_readonly("failure", py::cpp_function([](Residency& self) { return self->failure(); }, Release()))
      .def_property_readonly("num_calls",
                             py::cpp_function([](Residency& self) { return self->num_calls(); }, Release()));
}

}  // namespace zx
