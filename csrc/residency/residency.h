// All that it takes to read the sharded parameters of one optimizer.
#pragma once

#include <ATen/core/Tensor.h>

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <string>

#include "params/read_guard.h"
#include "residency/residents.h"

namespace zx {

// Belongs to the optimizer and to its parameters: see Note [A model outlives its optimizer].
class Residency : public std::enable_shared_from_this<Residency> {
 public:
  Residency(std::shared_ptr<const PeerShards> peers, HiddenReads hidden);
  // The last parameter is gone: fetches nothing.
  ~Residency();
  Residency(const Residency&) = delete;
  Residency& operator=(const Residency&) = delete;

  // Throws after let_shards_go().
  Residents* operator->() const;

  // Memory for a bucket's parameters, or a table's, which keeps this object.
  std::shared_ptr<Room> make_room(size_t bytes, c10::Device device);
  std::shared_ptr<Room> make_table_room(size_t bytes, c10::Device device);

  // Other ranks have the same; of the optimizer's caller.
  std::string identity;

  // To be called once it is shared. left_with() finds it from then on.
  static void list(const std::shared_ptr<Residency>& made);
  // Whether another rank is known to wait until this one writes parameters of any optimizer, or comes to synchronize.
  static bool is_any_awaited();
  // That which the parameters of a tensor's bucket belong to, if their optimizer was deleted; else null.
  static std::shared_ptr<Residency> left_with(const at::Tensor& tensor);
  // Its optimizer is gone.
  void leave_to_params();
  // A bucket of another one's that its handover() has begun to give away: see Note [Shards are handed over].
  int64_t take(Residency& from, int64_t bucket, std::string name, const std::vector<int64_t>& shard_starts,
               bool is_served);

  // All is whole, on all ranks, and stays so without this object.
  void let_shards_go();
  bool has_shards() const { return residents_ != nullptr; }

 private:
  std::shared_ptr<Room> let(std::shared_ptr<Room> room);

  std::shared_ptr<Residents> residents_;
  std::optional<ReadGuard> guard_;
  std::atomic<bool> is_left_ = false;
};

}  // namespace zx
