// The accelerator's side of flights: which stream waits for which, and when memory that crosses streams is free.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/Event.h>
#include <c10/core/Stream.h>

#include <deque>
#include <mutex>
#include <vector>

#include "locks.h"

namespace zx {

// Note [Streams]
// On an accelerator a flight is work on three streams:
//
//   a stream of autograd (producer) --event--> pack stream --the exchange's own--> reduce stream --> reduce()'s caller
//
// Packing waits for every stream that produced one of the gradients. Reduction has a stream of its own, since a pack
// stream that waits for the wire would leave the wire idle. Both have high priority: they are short, and the next
// bucket waits behind them. Nothing waits on the host, unless the backend itself works there (gloo).
//
// Memory that crosses streams is given back only after the stream that allocated it has waited for its last use:
// - A flight's buffers belong to the pack stream. Before a third flight gets buffers, the pack stream waits for the
//   reduction of the first, and the first one's buffers are free: so never more than two flights have buffers.
// - Gradients belong to their producers. When a flight is launched, the producers of all but the latest two flights
//   wait for their packing, and those gradients are free. So autograd's streams wait for the wire only if two more
//   buckets wait to be packed, and then the step waits for the wire anyway. Without this wait, a host that runs ahead
//   of the device would hold all gradients at once.
// - If the backend works on the host, the worker that packs waits for its stream and then frees the gradients, so that
//   their producers wait for nothing: where the wire is slow it comes to a flight late, perhaps after the last launch.
// - A shard belongs to the reduce stream. The update reads it, and zero_grad() frees it. It is written again only for
//   gradients that were produced after that update.

using Events = std::vector<c10::Event>;

// Memory to be freed once some streams have passed an event.
struct Retained {
  std::vector<at::Tensor> tensors;
  std::vector<c10::Stream> owners;
  c10::Event passed;
};

class Streams {
 public:
  explicit Streams(c10::Device device);
  ~Streams();  // afterwards the current stream can reuse the flights' memory, and our streams can reuse its memory
  Streams(const Streams&) = delete;
  Streams& operator=(const Streams&) = delete;

  c10::Stream pack() const { return pack_; }
  c10::Stream reduce() const { return reduce_; }
  c10::Stream current() const;

  void synchronize_pack() const;  // the host waits
  c10::Event record(c10::Stream stream) const;
  Events record(const std::vector<c10::Stream>& streams) const;

  // After `packed`, the gradients go back to their producers.
  void retain_gradients(std::vector<at::Tensor> gradients, std::vector<c10::Stream> producers, c10::Event packed);
  // After `reduced`, the buffers go back to the pack stream.
  void retain_buffers(std::vector<at::Tensor> buffers, c10::Event reduced);

  // Makes the owners of all but the latest `keep` wait, and frees those.
  void free_gradients(size_t keep);
  void free_buffers(size_t keep);

  // Makes the current stream wait for everything that was packed and reduced so far, and frees everything retained.
  void await_all();

 private:
  static void free(std::unique_lock<Mutex<LockRank::streams>> lock, std::deque<Retained>& retained, size_t keep);

  c10::Device device_;
  c10::Stream pack_;
  c10::Stream reduce_;
  Mutex<LockRank::streams> mutex_;  // of what follows: workers and autograd's threads meet here
  std::deque<Retained> gradients_;
  std::deque<Retained> buffers_;
};

}  // namespace zx
