// The fake accelerator's memory, streams and events, and the order between them: see fake_accelerator.cpp.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/Allocator.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>

#include <algorithm>
#include <array>
#include <chrono>
#include <cstring>
#include <functional>
#include <map>
#include <mutex>
#include <string>
#include <thread>
#include <utility>
#include <vector>

namespace fake {

inline constexpr auto kFake = c10::DeviceType::PrivateUse1;
inline constexpr int kDevices = 4;
inline constexpr int kStreamsEach = 16;
inline constexpr int kStreams = kDevices * kStreamsEach;

using Clock = std::array<uint64_t, kStreams>;

inline void join(Clock& into, const Clock& other) {
  for (int i = 0; i < kStreams; ++i) into[i] = std::max(into[i], other[i]);
}

struct Block {
  Clock read{};   // when each stream last read
  Clock wrote{};  // and wrote
  size_t bytes = 0;
  int owner = 0;
  std::vector<int> users{};  // streams that the allocator was told of: memory is not reused before they are done
  Clock reusable{};          // when that was
  size_t asked_bytes = 0;    // of `bytes`, by the tensor that has it now
};

struct Taken {
  size_t now = 0;
  size_t most = 0;
};

struct Copied {
  size_t to_host = 0;
  size_t to_device = 0;
};

// All of the machine's state, under one lock.
struct Machine {
  std::recursive_mutex mutex;
  std::array<Clock, kStreams> clocks{};
  Clock heard{};                                               // what any host has waited for
  std::array<std::chrono::microseconds, kDevices> busy{};      // how long a host waits for an event of each
  std::array<Copied, kDevices> copied{};                       // bytes
  std::array<Taken, kDevices> taken{};                         // bytes of live storages, as they were asked for
  int64_t num_shared = 0;                                      // blocks given to other ranks that still have them
  std::map<void*, Block> blocks{};                             // live storages
  std::map<int, std::vector<std::pair<void*, Block>>> free{};  // by owner, latest last
  std::vector<std::string> races{};
  std::array<std::vector<std::string>, kDevices> waits{};               // what made the host wait for each
  std::array<std::vector<std::function<void()>>, kStreams> arriving{};  // copies to the host that nobody waited for yet
  std::array<int, kDevices> next_stream{};
};

inline Machine& machine() {
  static auto* one = new Machine;  // tensors may outlive statics
  return *one;
}

inline thread_local Clock host_clock{};
inline thread_local int current_device = 0;
inline thread_local std::array<int, kDevices> current_stream{};

inline int index_of(c10::Stream stream) {
  return std::max<int>(stream.device_index(), 0) * kStreamsEach + static_cast<int>(stream.id());
}
inline int index_of_current(int device) { return device * kStreamsEach + current_stream[device]; }

inline void note(const Block& block, const char* what, int stream, int other) {
  machine().races.push_back(std::string(what) + ": stream " + std::to_string(stream) + " beside stream " +
                            std::to_string(other) + ", storage of " + std::to_string(block.bytes) + " bytes");
}

// Another device's streams have no events here. What they did is over if a host has waited for it, and that host may
// have told this one: nobody here sees how ranks talk to each other.
inline void check_ordered(const Block& block, const Clock& times, const char* what, int stream) {
  const Machine& m = machine();
  for (int other = 0; other < kStreams; ++other) {
    const bool same_device = stream / kStreamsEach == other / kStreamsEach;
    const uint64_t known = std::max(m.clocks[stream][other], same_device ? 0 : m.heard[other]);
    if (times[other] > known) note(block, what, stream, other);
  }
}

inline const Block* freed_block_around(const void* data) {
  for (const auto& [owner, freed] : machine().free) {
    for (const auto& [start, block] : freed) {
      if (data >= start && data < static_cast<char*>(start) + block.bytes) return &block;
    }
  }
  return nullptr;
}

// The live block that an address lies in: a parameter's storage begins anywhere in its bucket's.
inline Block* block_around(const void* data) {
  auto& blocks = machine().blocks;
  auto after = blocks.upper_bound(const_cast<void*>(data));
  if (after == blocks.begin()) return nullptr;
  auto& [start, block] = *std::prev(after);
  return data < static_cast<char*>(start) + block.bytes ? &block : nullptr;
}

// One access of the stream that is current on the tensor's device.
inline void access(const at::Tensor& tensor, bool write) {
  if (tensor.device().type() != kFake || tensor.numel() == 0) return;
  Machine& m = machine();
  const std::lock_guard lock(m.mutex);
  Block* around = block_around(tensor.storage().data());
  const int stream = index_of_current(std::max<int>(tensor.device().index(), 0));
  if (around == nullptr) {
    const Block* freed = freed_block_around(tensor.storage().data());
    if (freed != nullptr) note(*freed, write ? "write after free" : "read after free", stream, freed->owner);
    return;
  }
  Block& block = *around;
  join(m.clocks[stream], host_clock);
  const uint64_t now = ++m.clocks[stream][stream];
  check_ordered(block, block.wrote, write ? "write after write" : "read after write", stream);
  if (write) check_ordered(block, block.read, "write after read", stream);
  (write ? block.wrote : block.read)[stream] = now;
}

inline void host_waits(c10::Device device, const std::string& why) {
  const std::lock_guard lock(machine().mutex);
  machine().waits[static_cast<size_t>(std::max<int>(device.index(), 0))].push_back(why);
}

// ---- memory

inline void free_block(void* data) {
  Machine& m = machine();
  const std::lock_guard lock(m.mutex);
  const auto found = m.blocks.find(data);
  Block& block = found->second;
  m.taken[static_cast<size_t>(block.owner / kStreamsEach)].now -= block.asked_bytes;
  for (const int user : block.users) join(block.reusable, m.clocks[user]);
  block.users.clear();
  m.free[found->second.owner].emplace_back(data, found->second);
  m.blocks.erase(found);
}

struct FakeAllocator final : c10::Allocator {
  c10::DataPtr allocate(size_t bytes) override {
    const c10::Device device(kFake, static_cast<c10::DeviceIndex>(current_device));
    if (bytes == 0) return {nullptr, nullptr, &c10::detail::deleteNothing, device};
    Machine& m = machine();
    const std::lock_guard lock(m.mutex);
    const int owner = index_of_current(current_device);
    Taken& taken = m.taken[static_cast<size_t>(current_device)];
    taken.now += bytes;
    taken.most = std::max(taken.most, taken.now);
    auto& freed = m.free[owner];
    for (auto it = freed.rbegin(); it != freed.rend(); ++it) {
      if (it->second.bytes < bytes || it->second.bytes > 2 * bytes) continue;
      auto [data, block] = *it;  // its accesses stay in the account
      block.asked_bytes = bytes;
      freed.erase(std::next(it).base());
      join(m.clocks[owner], block.reusable);
      m.blocks.emplace(data, block);
      return {data, data, &free_block, device};
    }
    void* data = std::aligned_alloc(64, (bytes + 63) / 64 * 64);
    m.blocks.emplace(data, Block{{}, {}, bytes, owner, {}, {}, bytes});
    return {data, data, &free_block, device};
  }
  c10::DeleterFnPtr raw_deleter() const override { return &free_block; }
  void copy_data(void* to, const void* from, size_t bytes) const override { std::memcpy(to, from, bytes); }
};
inline FakeAllocator allocator;

// ---- streams and events

struct Recorded {
  c10::Device device;
  Clock clock{};
};

struct FakeGuard final : c10::impl::DeviceGuardImplInterface {
  c10::DeviceType type() const override { return kFake; }
  c10::Device exchangeDevice(c10::Device device) const override {
    const c10::Device old = getDevice();
    setDevice(device);
    return old;
  }
  c10::Device getDevice() const override { return {kFake, static_cast<c10::DeviceIndex>(current_device)}; }
  void setDevice(c10::Device device) const override { current_device = std::max<int>(device.index(), 0); }
  void uncheckedSetDevice(c10::Device device) const noexcept override {
    current_device = std::max<int>(device.index(), 0);
  }
  c10::Stream getStream(c10::Device device) const override {
    const int index = device.index() < 0 ? current_device : device.index();
    return stream(index, current_stream[index]);
  }
  c10::Stream getDefaultStream(c10::Device device) const override {
    return stream(std::max<int>(device.index(), 0), 0);
  }
  c10::Stream getStreamFromGlobalPool(c10::Device device, bool /*isHighPriority*/) const override {
    return getNewStream(device, 0);
  }
  c10::Stream getNewStream(c10::Device device, int /*priority*/) const override {
    const std::lock_guard lock(machine().mutex);
    const int index = std::max<int>(device.index(), 0);
    int& next = machine().next_stream[index];
    next = next % (kStreamsEach - 1) + 1;  // 0 is the default stream
    return stream(index, next);
  }
  c10::Stream exchangeStream(c10::Stream stream) const override {
    const c10::Stream old = getStream(stream.device());
    current_stream[std::max<int>(stream.device_index(), 0)] = static_cast<int>(stream.id());
    return old;
  }
  void* getStreamNativeHandle(const c10::Stream /*stream*/) const override { return nullptr; }
  void destroyEvent(void* event, c10::DeviceIndex /*device*/) const noexcept override {
    delete static_cast<Recorded*>(event);
  }
  void record(void** event, const c10::Stream& stream, c10::DeviceIndex /*device*/,
              c10::EventFlag /*flag*/) const override {
    const std::lock_guard lock(machine().mutex);
    if (*event == nullptr) *event = new Recorded{stream.device()};
    Clock& clock = machine().clocks[index_of(stream)];
    join(clock, host_clock);
    static_cast<Recorded*>(*event)->clock = clock;
  }
  void block(void* event, const c10::Stream& stream) const override {
    if (event == nullptr) return;
    const std::lock_guard lock(machine().mutex);
    join(machine().clocks[index_of(stream)], static_cast<Recorded*>(event)->clock);
  }
  bool queryEvent(void* /*event*/) const override { return true; }
  void synchronizeEvent(void* event) const override {
    if (event == nullptr) return;
    const Recorded waited = *static_cast<Recorded*>(event);
    host_waits(waited.device, "synchronizeEvent");
    std::this_thread::sleep_for(machine().busy[static_cast<size_t>(std::max<int>(waited.device.index(), 0))]);
    hear(waited.clock);
  }
  bool queryStream(const c10::Stream& /*stream*/) const override { return true; }
  void synchronizeStream(const c10::Stream& stream) const override {
    host_waits(stream.device(), "synchronizeStream");
    const std::lock_guard lock(machine().mutex);
    for (const auto& arrive : std::exchange(machine().arriving[index_of(stream)], {})) arrive();
    hear(machine().clocks[index_of(stream)]);
  }
  void recordDataPtrOnStream(const c10::DataPtr& data, const c10::Stream& stream) const override {
    const std::lock_guard lock(machine().mutex);
    const auto found = machine().blocks.find(data.get());
    if (found != machine().blocks.end()) found->second.users.push_back(index_of(stream));
  }
  c10::DeviceIndex deviceCount() const noexcept override { return kDevices; }

  static c10::Stream stream(c10::DeviceIndex device, c10::StreamId id) {
    return c10::Stream(c10::Stream::UNSAFE, {kFake, device}, id);
  }

 private:
  static void hear(const Clock& clock) {
    const std::lock_guard lock(machine().mutex);
    join(host_clock, clock);
    join(machine().heard, clock);
  }
};

}  // namespace fake
