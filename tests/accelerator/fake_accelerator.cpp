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
// zerox's ops are those of csrc/cuda with its kernels compiled for the host, under a key of their own behind the
// account.
#include <ATen/EmptyTensor.h>
#include <ATen/detail/PrivateUse1HooksInterface.h>
#include <ATen/native/CPUFallback.h>
#include <ATen/ops/as_strided_native.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/view_native.h>
#include <ATen/record_function.h>
#include <torch/csrc/utils/pybind.h>
#include <torch/library.h>

#include <functional>

#include "clocks.h"
#include "cuda/kernels.h"
#include "stream_backend.h"

namespace fake {

inline bool capturing = false;  // what a test says

namespace {

C10_REGISTER_GUARD_IMPL(PrivateUse1, FakeGuard)

struct FakeHooks final : at::PrivateUse1HooksInterface {
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
  bool hasPrimaryContext(c10::DeviceIndex /*device*/) const override { return true; }
  c10::Allocator* getPinnedMemoryAllocator() const override { return c10::GetAllocator(c10::kCPU); }
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

thread_local bool inside_fallback = false;

// The host has waited for a result.
void hear_current(c10::Device device) {
  if (device.type() != kFake) return;
  const std::lock_guard lock(machine().mutex);
  join(machine().heard, machine().clocks[index_of_current(std::max<int>(device.index(), 0))]);
}

void count_copied(const at::Tensor& from, const at::Tensor& to) {
  const std::lock_guard lock(machine().mutex);
  const at::Device device = from.is_cpu() ? to.device() : from.device();
  if (device.type() != kFake) return;
  Copied& of_device = machine().copied[static_cast<size_t>(std::max<int>(device.index(), 0))];
  (to.is_cpu() ? of_device.to_host : of_device.to_device) += to.nbytes();
}

at::Tensor copy_from(const at::Tensor& self, const at::Tensor& to, bool non_blocking) {
  const bool leaves_or_enters = self.is_cpu() || to.is_cpu();
  if (leaves_or_enters && !non_blocking && !inside_fallback)
    host_waits(self.is_cpu() ? to.device() : self.device(), "copy between host and device");
  if (leaves_or_enters && !inside_fallback) count_copied(self, to);
  access(self, /*write=*/false);
  access(to, /*write=*/true);
  if (to.is_cpu() && non_blocking && !inside_fallback) {  // until the host has waited, something else lies there
    const std::lock_guard lock(machine().mutex);
    const at::Tensor now = on_host(self).clone();
    std::memset(to.mutable_data_ptr(), 0xcd, to.nbytes());
    const int stream = index_of_current(std::max<int>(self.device().index(), 0));
    machine().arriving[stream].push_back([to, now] { to.copy_(now); });
    return to;
  }
  const at::Tensor target = on_host(to);
  target.copy_(on_host(self));
  if (to.is_cpu() && !inside_fallback) hear_current(self.device());
  return to;
}

// `to` is an operator's result, which the fallback made without knowing how large it will be.
at::Tensor copy_from_and_resize(const at::Tensor& self, const at::Tensor& to) {
  if (to.sizes() != self.sizes()) {
    const auto made = empty_like_options(self.sizes(), to.scalar_type(), {}, to.device(), {}, {});
    to.unsafeGetTensorImpl()->set_storage_keep_dtype(made.storage());
    to.unsafeGetTensorImpl()->set_sizes_contiguous(self.sizes());
  }
  return copy_from(self, to, false);
}

void for_each_tensor(const c10::IValue& value, const std::function<void(const at::Tensor&)>& body) {
  if (value.isTensor()) body(value.toTensor());
  if (value.isTensorList()) {
    for (const at::Tensor& tensor : value.toTensorVector()) body(tensor);
  }
}

// The CPU's kernel, as if it were the device's: what it copies for itself does not count as the host's waiting, but
// that a number or a shape comes back does.
void fallback(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  const std::string& name = op.schema().name();
  std::vector<c10::Device> awaited;
  if (name == "aten::_local_scalar_dense" || name == "aten::equal" || name == "aten::nonzero") {
    for_each_tensor(stack->front(), [&](const at::Tensor& tensor) { awaited.push_back(tensor.device()); });
  }
  for (const c10::Device device : awaited) host_waits(device, name);
  inside_fallback = true;
  at::native::cpu_fallback(op, stack);
  inside_fallback = false;
  for (const c10::Device device : awaited) hear_current(device);
}

// As CUDA's: the allocator ignores what it did not hand out itself.
void record_stream(at::Tensor& self, c10::Stream stream) {
  const c10::DataPtr& data = self.storage().data_ptr();
  if (data.get_deleter() == &free_block) FakeGuard().recordDataPtrOnStream(data, stream);
}

TORCH_LIBRARY_IMPL(aten, PrivateUse1, m) {
  m.impl("empty.memory_format", &empty_like_options);
  m.impl("empty_strided", &empty_strided);
  m.impl("_copy_from", &copy_from);
  m.impl("_copy_from_and_resize", &copy_from_and_resize);
  m.impl("as_strided", &at::native::as_strided_tensorimpl);
  m.impl("view", &at::native::view);
  m.impl("record_stream", &record_stream);
}
TORCH_LIBRARY_IMPL(_, PrivateUse1, m) { m.fallback(torch::CppFunction::makeFromBoxedFunction<&fallback>()); }

void zerox_op(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  const auto& arguments = op.schema().arguments();
  const auto values = torch::jit::last(*stack, arguments.size());
  for (size_t i = 0; i < arguments.size(); ++i) {
    const auto* alias = arguments[i].alias_info();
    const bool write = alias != nullptr && alias->isWrite();
    for_each_tensor(values[i], [write](const at::Tensor& tensor) {
      access(tensor, /*write=*/false);
      if (write) access(tensor, /*write=*/true);
    });
  }
  op.redispatchBoxed(c10::DispatchKeySet(c10::DispatchKey::PrivateUse2), stack);
}

TORCH_LIBRARY_IMPL(zerox, PrivateUse1, m) {
  for (const char* name : {"flatten_", "read_flags_", "reduce_", "norm_", "norm_value", "update_", "update_rows_"}) {
    m.impl(name, torch::CppFunction::makeFromBoxedFunction<&zerox_op>());
  }
}

// Another rank's memory as a tensor of a device of this one. It does not keep that memory: a read after its owner has
// freed it is noted.
at::Tensor open_shared(uint64_t address, int64_t bytes, int device) {
  const c10::Device here(kFake, static_cast<c10::DeviceIndex>(device));
  return at::for_blob(reinterpret_cast<void*>(address), {bytes})
      .deleter([](void* /*data*/) {
        const std::lock_guard lock(machine().mutex);
        --machine().num_shared;
      })
      .target_device(here)
      .options(at::TensorOptions(here).dtype(at::kByte))
      .make_tensor();
}

struct CompiledRegion {
  at::RecordFunction function{at::RecordScope::FUNCTION};
};

}  // namespace
}  // namespace fake

namespace zx::cuda {
const char* error_text(int /*error*/) { return "not on the host"; }
bool is_capturing(Stream /*stream*/) { return fake::capturing; }
}  // namespace zx::cuda

PYBIND11_MODULE(TORCH_EXTENSION_NAME, m) {
  using namespace fake;
  c10::SetAllocator(kFake, &allocator);
  at::RegisterPrivateUse1HooksInterface(new FakeHooks);
  m.def("take_races", [] {
    const std::lock_guard lock(machine().mutex);
    return std::exchange(machine().races, {});
  });
  m.def("take_waits", [](int device) {
    const std::lock_guard lock(machine().mutex);
    return std::exchange(machine().waits[static_cast<size_t>(device)], {});
  });
  m.def("set_capturing", [](bool now) { capturing = now; });
  // A kernel that no operator shows: copies to the host's memory, read on the current stream.
  m.def("read_by_address", [](const std::vector<at::Tensor>& tensors) {
    std::vector<at::Tensor> read;
    for (const at::Tensor& tensor : tensors) {
      access(tensor, /*write=*/false);
      read.push_back(on_host(tensor).clone());
    }
    return read;
  });
  // While it lives, the thread is in code that torch.compile made, as Dynamo announces it.
  pybind11::class_<CompiledRegion>(m, "CompiledRegion")
      .def(pybind11::init<>())
      .def("__enter__", [](CompiledRegion& self) { self.function.before("Torch-Compiled Region: 0/0"); })
      .def("__exit__", [](CompiledRegion& self, const pybind11::args&) { self.function.end(); });
  // Memory for other ranks, which are threads: (address, bytes) for open() or decline().
  m.def("share", [](const at::Tensor& tensor) {
    const std::lock_guard lock(machine().mutex);
    ++machine().num_shared;
    return std::pair(reinterpret_cast<uint64_t>(tensor.const_data_ptr()), static_cast<int64_t>(tensor.nbytes()));
  });
  m.def("open", &open_shared);
  m.def("decline", [] {
    const std::lock_guard lock(machine().mutex);
    --machine().num_shared;
  });
  m.def("num_shared", [] { return machine().num_shared; });
  m.def("set_busy_us",
        [](int device, int64_t us) { machine().busy[static_cast<size_t>(device)] = std::chrono::microseconds(us); });
  // This thread has synchronized with all others that have waited for a device.
  m.def("hear", [] {
    const std::lock_guard lock(machine().mutex);
    join(host_clock, machine().heard);
  });
  // Bytes to the host and from it.
  m.def("take_copied", [](int device) {
    const std::lock_guard lock(machine().mutex);
    const Copied copied = std::exchange(machine().copied[static_cast<size_t>(device)], {});
    return std::pair(copied.to_host, copied.to_device);
  });
  // The most bytes of live storages since the last call.
  m.def("take_most_bytes", [](int device) {
    const std::lock_guard lock(machine().mutex);
    Taken& taken = machine().taken[static_cast<size_t>(device)];
    return std::exchange(taken.most, taken.now);
  });
  m.def("live_bytes", [] {
    const std::lock_guard lock(machine().mutex);
    size_t bytes = 0;
    for (const auto& [data, block] : machine().blocks) bytes += block.asked_bytes;
    return bytes;
  });
  m.def("new_stream",
        [](int device) { return FakeGuard().getNewStream({kFake, static_cast<c10::DeviceIndex>(device)}, 0).id(); });
  // Makes a stream current; returns the one that was.
  m.def("set_stream",
        [](int device, int64_t id) { return std::exchange(current_stream[device], static_cast<int>(id)); });
  // As torch.Tensor.record_stream(), for streams that Python has no class for.
  m.def("record_stream", [](at::Tensor tensor, int device, int64_t id) {
    tensor.record_stream(FakeGuard().stream(static_cast<c10::DeviceIndex>(device), id));
  });
  // The stream `id` waits for what the stream `other` was given so far.
  m.def("wait_stream", [](int device, int64_t id, int64_t other) {
    const std::lock_guard lock(machine().mutex);
    auto& clocks = machine().clocks;
    join(clocks[device * kStreamsEach + id], clocks[device * kStreamsEach + other]);
  });
  pybind11::class_<SyncPoint, std::shared_ptr<SyncPoint>>(m, "SyncPoint").def(pybind11::init<int>());
  pybind11::class_<StreamBackend, c10d::Backend, c10::intrusive_ptr<StreamBackend>>(m, "StreamBackend")
      .def(pybind11::init([](int rank, int size, std::shared_ptr<SyncPoint> sync_point) {
        return c10::make_intrusive<StreamBackend>(rank, size, std::move(sync_point));
      }));
}
