#include "params/rooms.h"

#include <c10/core/impl/VirtualGuardImpl.h>

#include "params/device_room.h"

namespace zx {

std::shared_ptr<Room> Rooms::make(size_t bytes, c10::Device device) {
  if (device.is_cpu()) return AddressRange::make(bytes, spare_);
  if (!fetches_) {
    fetches_ = c10::impl::VirtualGuardImpl(device.type()).getStreamFromGlobalPool(device, /*isHighPriority=*/true);
  }
  return DeviceRoom::make(bytes, *fetches_);
}

}  // namespace zx
