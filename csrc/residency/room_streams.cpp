#include "residency/room_streams.h"

#include <algorithm>

#include "torch_internals.h"

namespace zx {

RoomStreams::RoomStreams(c10::Stream fetches)
    : fetches_(fetches), arrival_(std::make_shared<c10::Event>(fetches.device_type())) {}

c10::Stream RoomStreams::current() const { return internals::current_stream(fetches_.device()); }

c10::Event RoomStreams::record(c10::Stream stream) const {
  c10::Event event(fetches_.device_type());
  event.record(stream);
  return event;
}

RoomStreams::Reader& RoomStreams::reader(c10::Stream stream) {
  const auto found =
      std::find_if(readers_.begin(), readers_.end(), [&](const Reader& each) { return each.stream == stream; });
  if (found != readers_.end()) return *found;
  return readers_.emplace_back(Reader{stream, c10::Event(stream.device_type())});
}

void RoomStreams::begin_read() {
  const c10::Stream stream = current();
  if (std::find(waited_.begin(), waited_.end(), stream) != waited_.end()) return;
  arrival_->block(stream);
  waited_.push_back(stream);
}

void RoomStreams::end_read() {
  const c10::Stream stream = current();
  reader(stream).last.record(stream);
}

void RoomStreams::await_readers() {
  for (Reader& each : readers_) {
    if (each.is_lasting) each.last.record(each.stream);
    each.last.block(fetches_);
  }
  std::erase_if(readers_, [](const Reader& each) { return !each.is_lasting; });
}

void RoomStreams::note_arrival() {
  arrival_ = std::make_shared<c10::Event>(record(fetches_));
  waited_.clear();
}

c10::Event RoomStreams::record_write() const {
  c10::Event written = record(current());
  written.block(fetches_);
  return written;
}

}  // namespace zx
