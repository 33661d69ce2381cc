// The tensors in which an optimizer's state lies: see Note [State is pulled].
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/Event.h>
#include <c10/core/Stream.h>

#include <map>
#include <memory>
#include <mutex>
#include <vector>

#include "locks.h"
#include "peers/published_state.h"

namespace zx {

// They may be a device's: then they are read on a stream of their own, behind what had been submitted when the change
// ended, and before the reader looks whether another change has begun. Any thread may read, without the GIL.
class StateTensors final : public PublishedState::Places {
 public:
  explicit StateTensors(std::vector<at::Tensor> tensors) : tensors_(std::move(tensors)) {}

  size_t count() const override { return tensors_.size(); }
  std::vector<int64_t> addresses() const override;
  void read(size_t place, size_t start, void* into, size_t bytes, bool follows_caller) const override;
  void note_change() override;
  void follow_change() const override;

 private:
  const at::Tensor* on_device() const;
  std::shared_ptr<c10::Event> last_change(c10::Device device) const;
  void read_from_device(const at::Tensor& values, size_t start, void* into, size_t bytes, bool follows_caller) const;

  const std::vector<at::Tensor> tensors_;
  mutable Mutex<LockRank::state_tensors> mutex_;                       // of the next one
  std::map<c10::DeviceIndex, std::shared_ptr<c10::Event>> changes_{};  // the last one on each device
};

}  // namespace zx
