#include "residency/rooms.h"

#include "residency/device_room.h"
#include "torch_internals.h"

namespace zx {

std::shared_ptr<Room> Rooms::make(size_t bytes, c10::Device device) {
  if (device.is_cpu()) return AddressRange::make(bytes, spare_, hidden_);
  if (!fetches_) fetches_ = internals::high_priority_stream(device);
  return DeviceRoom::make(bytes, *fetches_);
}

std::shared_ptr<Room> Rooms::make_for_table(size_t bytes, c10::Device device) {
  return device.is_cpu() ? AddressRange::make(bytes, nullptr, hidden_) : make(bytes, device);
}

void Rooms::take(Room& room) {
  if (auto* const range = dynamic_cast<AddressRange*>(&room)) range->move_to(spare_);
  if (auto* const on_device = dynamic_cast<DeviceRoom*>(&room); on_device != nullptr && !fetches_) {
    fetches_ = on_device->fetches();
  }
}

}  // namespace zx
