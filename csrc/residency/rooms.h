// Makes the rooms of one optimizer.
#pragma once

#include <c10/core/Device.h>
#include <c10/core/Stream.h>

#include <memory>
#include <optional>

#include "residency/address_range.h"
#include "residency/room.h"

namespace zx {

class Rooms {
 public:
  explicit Rooms(HiddenReads hidden) : hidden_(hidden) {}

  // Has no memory at first.
  std::shared_ptr<Room> make(size_t bytes, c10::Device device);
  // The same for a table, which may have its memory in parts.
  std::shared_ptr<Room> make_for_table(size_t bytes, c10::Device device);

  // Another optimizer's, which is released.
  void take(Room& room);

  // Of the host, for rooms to come.
  SparePages& spare() { return *spare_; }
  const SparePages& spare() const { return *spare_; }
  HiddenReads hidden_reads() const { return hidden_; }
  bool on_accelerator() const { return fetches_.has_value(); }
  bool hidden_reads_fault() const { return !on_accelerator() && hidden_ == HiddenReads::fault; }

 private:
  HiddenReads hidden_;
  std::shared_ptr<SparePages> spare_ = std::make_shared<SparePages>();
  std::optional<c10::Stream> fetches_;  // one for all, so that they use each other's memory
};

}  // namespace zx
