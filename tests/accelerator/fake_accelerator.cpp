// An accelerator without hardware, to see whether streams are ordered: its "kernels" run on the host at once, so
// results are always those of the program's order, but each access to memory is checked against the order that streams
// and events really promise, as a race detector would.
//
// Every stream has a vector clock. An operation ticks its stream's; an event is a copy of a clock, and a stream that
// waits for it takes the maximum; the host takes the clock of a stream that it synchronizes with, and hands its own to
// what it submits. Two accesses to a storage, one of them a write, must be ordered by these clocks, or a race is noted.
// Memory is freed to the stream that allocated it and reused by that stream's next allocation at once, like a caching
// allocator at its worst, so memory that is freed too early is written while others still use it.
//
// Registered as PrivateUse1: whatever has no kernel here falls back to the CPU's, through copies that are accesses.
#include <ATen/EmptyTensor.h>
#include <ATen/detail/PrivateUse1HooksInterface.h>
#include <ATen/native/CPUFallback.h>
#include <ATen/ops/as_strided_native.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/from_blob.h>
#include <ATen/ops/view_native.h>
#include <c10/core/Allocator.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <torch/csrc/utils/pybind.h>
#include <torch/library.h>
#include <torch/csrc/distributed/c10d/Backend.hpp>

#include <array>
#include <condition_variable>
#include <cstring>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

namespace {

constexpr auto kFake = c10::DeviceType::PrivateUse1;
constexpr int kDevices = 4;
constexpr int kStreamsEach = 16;
constexpr int kStreams = kDevices * kStreamsEach;

using Clock = std::array<uint64_t, kStreams>;

void join(Clock& into, const Clock& other) {
  for (int i = 0; i < kStreams; ++i) into[i] = std::max(into[i], other[i]);
}

struct Block {
  Clock read{};   // when each stream last read
  Clock wrote{};  // and wrote
  size_t bytes = 0;
  int owner = 0;
  std::vector<int> users{};  // streams that the allocator was told of: memory is not reused before they are done
  Clock reusable{};          // when that was
};

// All of the machine's state, under one lock.
struct Machine {
  std::recursive_mutex mutex;
  std::array<Clock, kStreams> clocks{};
  std::map<void*, Block> blocks{};                             // live storages
  std::map<int, std::vector<std::pair<void*, Block>>> free{};  // by owner, latest last
  std::vector<std::string> races{};
  std::array<int, kDevices> next_stream{};
};

Machine& machine() {
  static auto* one = new Machine;  // tensors may outlive statics
  return *one;
}

thread_local Clock host_clock{};
thread_local int current_device = 0;
thread_local std::array<int, kDevices> current_stream{};

int index_of(c10::Stream stream) {
  return std::max<int>(stream.device_index(), 0) * kStreamsEach + static_cast<int>(stream.id());
}
int index_of_current(int device) { return device * kStreamsEach + current_stream[device]; }

void note(const Block& block, const char* what, int stream, int other) {
  machine().races.push_back(std::string(what) + ": stream " + std::to_string(stream) + " beside stream " +
                            std::to_string(other) + ", storage of " + std::to_string(block.bytes) + " bytes");
}

void check_ordered(const Block& block, const Clock& times, const char* what, int stream) {
  for (int other = 0; other < kStreams; ++other) {
    if (times[other] > machine().clocks[stream][other]) note(block, what, stream, other);
  }
}

// One access of the stream that is current on the tensor's device.
void access(const at::Tensor& tensor, bool write) {
  if (tensor.device().type() != kFake || tensor.numel() == 0) return;
  Machine& m = machine();
  const std::lock_guard lock(m.mutex);
  const auto found = m.blocks.find(tensor.storage().mutable_data());
  if (found == m.blocks.end()) return;
  Block& block = found->second;
  const int stream = index_of_current(std::max<int>(tensor.device().index(), 0));
  join(m.clocks[stream], host_clock);
  const uint64_t now = ++m.clocks[stream][stream];
  check_ordered(block, block.wrote, write ? "write after write" : "read after write", stream);
  if (write) check_ordered(block, block.read, "write after read", stream);
  (write ? block.wrote : block.read)[stream] = now;
}

// ---- memory

void free_block(void* data) {
  Machine& m = machine();
  const std::lock_guard lock(m.mutex);
  const auto found = m.blocks.find(data);
  Block& block = found->second;
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
    auto& freed = m.free[owner];
    for (auto it = freed.rbegin(); it != freed.rend(); ++it) {
      if (it->second.bytes < bytes || it->second.bytes > 2 * bytes) continue;
      auto [data, block] = *it;  // its accesses stay in the account
      freed.erase(std::next(it).base());
      join(m.clocks[owner], block.reusable);
      m.blocks.emplace(data, block);
      return {data, data, &free_block, device};
    }
    void* data = std::aligned_alloc(64, (bytes + 63) / 64 * 64);
    m.blocks.emplace(data, Block{{}, {}, bytes, owner, {}, {}});
    return {data, data, &free_block, device};
  }
  c10::DeleterFnPtr raw_deleter() const override { return &free_block; }
  void copy_data(void* to, const void* from, size_t bytes) const override { std::memcpy(to, from, bytes); }
};
FakeAllocator allocator;

// ---- streams and events

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
  void destroyEvent(void* event, c10::DeviceIndex /*device*/) const noexcept override {
    delete static_cast<Clock*>(event);
  }
  void record(void** event, const c10::Stream& stream, c10::DeviceIndex /*device*/,
              c10::EventFlag /*flag*/) const override {
    const std::lock_guard lock(machine().mutex);
    if (*event == nullptr) *event = new Clock;
    Clock& clock = machine().clocks[index_of(stream)];
    join(clock, host_clock);
    *static_cast<Clock*>(*event) = clock;
  }
  void block(void* event, const c10::Stream& stream) const override {
    if (event == nullptr) return;
    const std::lock_guard lock(machine().mutex);
    join(machine().clocks[index_of(stream)], *static_cast<Clock*>(event));
  }
  bool queryEvent(void* /*event*/) const override { return true; }
  void synchronizeEvent(void* event) const override {
    if (event != nullptr) join(host_clock, *static_cast<Clock*>(event));
  }
  bool queryStream(const c10::Stream& /*stream*/) const override { return true; }
  void synchronizeStream(const c10::Stream& stream) const override {
    const std::lock_guard lock(machine().mutex);
    join(host_clock, machine().clocks[index_of(stream)]);
  }
  void recordDataPtrOnStream(const c10::DataPtr& data, const c10::Stream& stream) const override {
    const std::lock_guard lock(machine().mutex);
    const auto found = machine().blocks.find(data.get());
    if (found != machine().blocks.end()) found->second.users.push_back(index_of(stream));
  }
  c10::DeviceIndex deviceCount() const noexcept override { return kDevices; }

 private:
  static c10::Stream stream(int device, int id) {
    return c10::Stream(c10::Stream::UNSAFE, {kFake, static_cast<c10::DeviceIndex>(device)}, id);
  }
};
C10_REGISTER_GUARD_IMPL(PrivateUse1, FakeGuard)

struct FakeHooks final : at::PrivateUse1HooksInterface {
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
  bool hasPrimaryContext(c10::DeviceIndex /*device*/) const override { return true; }
};

// ---- kernels

at::Tensor empty_like_options(at::IntArrayRef size, std::optional<at::ScalarType> dtype, std::optional<at::Layout>,
                              std::optional<at::Device> device, std::optional<bool>,
                              std::optional<at::MemoryFormat> format) {
  const c10::DeviceGuard guard(device.value_or(c10::Device(kFake)));
  return at::detail::empty_generic(size, &allocator, c10::DispatchKeySet(c10::DispatchKey::PrivateUse1),
                                   dtype.value_or(at::kFloat), format);
}

at::Tensor empty_strided(at::IntArrayRef size, at::IntArrayRef stride, std::optional<at::ScalarType> dtype,
                         std::optional<at::Layout>, std::optional<at::Device> device, std::optional<bool>) {
  const c10::DeviceGuard guard(device.value_or(c10::Device(kFake)));
  return at::detail::empty_strided_generic(size, stride, &allocator, c10::DispatchKeySet(c10::DispatchKey::PrivateUse1),
                                           dtype.value_or(at::kFloat));
}

// The same memory as a CPU tensor.
at::Tensor on_host(const at::Tensor& tensor) {
  if (tensor.is_cpu()) return tensor;
  return at::from_blob(const_cast<void*>(tensor.const_data_ptr()), tensor.sizes(), tensor.strides(),
                       tensor.options().device(at::kCPU).requires_grad(false));
}

at::Tensor copy_from(const at::Tensor& self, const at::Tensor& to, bool /*non_blocking*/) {
  access(self, /*write=*/false);
  access(to, /*write=*/true);
  const at::Tensor target = on_host(to);
  target.copy_(on_host(self));
  return to;
}

at::Tensor copy_from_and_resize(const at::Tensor& self, const at::Tensor& to) { return copy_from(self, to, false); }

void fallback(const c10::OperatorHandle& op, torch::jit::Stack* stack) { at::native::cpu_fallback(op, stack); }

TORCH_LIBRARY_IMPL(aten, PrivateUse1, m) {
  m.impl("empty.memory_format", &empty_like_options);
  m.impl("empty_strided", &empty_strided);
  m.impl("_copy_from", &copy_from);
  m.impl("_copy_from_and_resize", &copy_from_and_resize);
  m.impl("as_strided", &at::native::as_strided_tensorimpl);
  m.impl("view", &at::native::view);
}
TORCH_LIBRARY_IMPL(_, PrivateUse1, m) { m.fallback(torch::CppFunction::makeFromBoxedFunction<&fallback>()); }

// ---- a backend whose collectives run on a stream of their own, as NCCL's do

// The ranks' tensors of one collective; all wait for each other when they come and before they go.
class Meeting {
 public:
  explicit Meeting(int size) : size_(size), tensors_(static_cast<size_t>(size)) {}

  template <class Body>
  void meet(int rank, const at::Tensor& mine, const Body& body) {
    tensors_[static_cast<size_t>(rank)] = mine;
    arrive();
    body(tensors_);
    arrive();
  }

 private:
  void arrive() {
    std::unique_lock lock(mutex_);
    const uint64_t round = round_;
    if (++arrived_ == size_) {
      arrived_ = 0;
      ++round_;
      all_here_.notify_all();
      return;
    }
    TORCH_CHECK(all_here_.wait_for(lock, std::chrono::seconds(30), [&] { return round != round_; }),
                "a rank did not come to the collective");
  }

  std::mutex mutex_;
  std::condition_variable all_here_;
  int size_;
  int arrived_ = 0;
  uint64_t round_ = 0;
  std::vector<at::Tensor> tensors_;
};

class StreamWork final : public c10d::Work {
 public:
  StreamWork(c10::Event done, c10::Device device) : done_(std::move(done)), device_(device) {}
  bool wait(std::chrono::milliseconds /*timeout*/) override {
    done_.block(FakeGuard().getStream(device_));
    return true;
  }

 private:
  c10::Event done_;
  c10::Device device_;
};

class StreamBackend final : public c10d::Backend {
 public:
  StreamBackend(int rank, int size, std::shared_ptr<Meeting> meeting)
      : Backend(rank, size),
        meeting_(std::move(meeting)),
        stream_(FakeGuard().getNewStream({kFake, static_cast<c10::DeviceIndex>(rank)}, 0)) {}

  const std::string getBackendName() const override { return "nccl"; }

  c10::intrusive_ptr<c10d::Work> _allgather_base(at::Tensor& output, at::Tensor& input,
                                                 const c10d::AllgatherOptions& /*options*/) override {
    return run(input, output, [&](const std::vector<at::Tensor>& all) {
      for (int peer = 0; peer < getSize(); ++peer) part(output, peer).copy_(on_host(all[static_cast<size_t>(peer)]));
    });
  }
  c10::intrusive_ptr<c10d::Work> _reduce_scatter_base(at::Tensor& output, at::Tensor& input,
                                                      const c10d::ReduceScatterOptions& /*options*/) override {
    return run(input, output, [&](const std::vector<at::Tensor>& all) {
      at::Tensor sum = part(all[0], getRank()).clone();
      for (int peer = 1; peer < getSize(); ++peer) sum.add_(part(all[static_cast<size_t>(peer)], getRank()));
      on_host(output).copy_(sum);
    });
  }
  c10::intrusive_ptr<c10d::Work> alltoall_base(at::Tensor& output, at::Tensor& input, std::vector<int64_t>& /*out*/,
                                               std::vector<int64_t>& /*in*/,
                                               const c10d::AllToAllOptions& /*options*/) override {
    return run(input, output, [&](const std::vector<at::Tensor>& all) {
      for (int peer = 0; peer < getSize(); ++peer) {
        part(output, peer).copy_(part(all[static_cast<size_t>(peer)], getRank()));
      }
    });
  }

 private:
  at::Tensor part(const at::Tensor& flat, int index) const {
    const int64_t numel = flat.numel() / getSize();
    return on_host(flat).narrow(0, index * numel, numel);
  }

  template <class Body>
  c10::intrusive_ptr<c10d::Work> run(const at::Tensor& input, const at::Tensor& output, const Body& body) {
    const FakeGuard guard;
    c10::Event before(kFake);
    before.record(guard.getStream(stream_.device()));
    before.block(stream_);
    const c10::Stream old = guard.exchangeStream(stream_);
    access(input, /*write=*/false);
    access(output, /*write=*/true);
    meeting_->meet(getRank(), input, body);
    guard.exchangeStream(old);
    c10::Event done(kFake);
    done.record(stream_);
    return c10::make_intrusive<StreamWork>(std::move(done), stream_.device());
  }

  std::shared_ptr<Meeting> meeting_;
  c10::Stream stream_;
};

}  // namespace

PYBIND11_MODULE(TORCH_EXTENSION_NAME, m) {
  c10::SetAllocator(kFake, &allocator);
  at::RegisterPrivateUse1HooksInterface(new FakeHooks);
  m.def("take_races", [] {
    const std::lock_guard lock(machine().mutex);
    return std::exchange(machine().races, {});
  });
  m.def("live_bytes", [] {
    const std::lock_guard lock(machine().mutex);
    size_t bytes = 0;
    for (const auto& [data, block] : machine().blocks) bytes += block.bytes;
    return bytes;
  });
  m.def("new_stream",
        [](int device) { return FakeGuard().getNewStream({kFake, static_cast<c10::DeviceIndex>(device)}, 0).id(); });
  // Makes a stream current; returns the one that was.
  m.def("set_stream",
        [](int device, int64_t id) { return std::exchange(current_stream[device], static_cast<int>(id)); });
  // The stream `id` waits for what the stream `other` was given so far.
  m.def("wait_stream", [](int device, int64_t id, int64_t other) {
    const std::lock_guard lock(machine().mutex);
    auto& clocks = machine().clocks;
    join(clocks[device * kStreamsEach + id], clocks[device * kStreamsEach + other]);
  });
  pybind11::class_<Meeting, std::shared_ptr<Meeting>>(m, "Meeting").def(pybind11::init<int>());
  pybind11::class_<StreamBackend, c10d::Backend, c10::intrusive_ptr<StreamBackend>>(m, "StreamBackend")
      .def(pybind11::init([](int rank, int size, std::shared_ptr<Meeting> meeting) {
        return c10::make_intrusive<StreamBackend>(rank, size, std::move(meeting));
      }));
}
