// At a sync point: the calls on an optimizer that all ranks make together.
#pragma once

#include <array>
#include <cstdint>
#include <string>

namespace zx {

// Note [Followers]
// A rank that has run out of batches follows the others (optimizer.join()): it meets them at SyncPoint::follow, learns
// there which call they make and with which arguments, and takes part in it without gradients of its own. It needs no
// message of its own for that, since ranks tell each other their sync points anyway. Calls that need more than these
// arguments can't be followed, and raise on all ranks.
//
// Where gradients are whole (ZeRO stage 1), a follower's p.grad is the mean too. While a step's backwards add up, it
// sends that again, as the others do: see Note [A mean that is sent again]. The others discard it in ways that send
// nothing (optimizer.zero_grad(), and also module.zero_grad() or p.grad = None), so a follower discards its own where
// another rank has lost the mean, and at the first backward after a step.
enum class SyncPoint : int64_t {
  follow = -1,
  backward_end = 0,
  step = 1,
  clip = 2,
  synchronize = 3,
  unscale = 4,
  mean_over = 5,
  scale_grads = 6,
  clip_together = 7,
  skip_step = 8,
  clip_value = 9,
  grad_norm = 10,
  // Those that can't be followed.
  add_param_group = 11,
  save = 12,
  full_state = 13,
  broadcast_buffers = 14,
  full_grad = 15,
  masks = 16,
  broadcast_parameters = 17,
};
constexpr int64_t kLastFollowed = static_cast<int64_t>(SyncPoint::grad_norm);

// The call that leads to a sync point, for errors. Where several do, Doing has the one that the user made.
const char* name_of(SyncPoint sync_point);

// Numbers that all ranks must pass alike to one call; a call with fewer leaves the last ones at 0.
using Arguments = std::array<double, 3>;

// One rank's call.
struct Call {
  SyncPoint sync_point;
  Arguments arguments{};
  double options = 0;     // a digest of the param groups' options, for step(); a follower says it everywhere
  double operators = 0;   // a digest of what was done in place to gradients that had left
  double params = 0;      // a digest of the parameters, where ranks compare them
  int64_t adoptions = 0;  // parameters that became trainable
  std::string refusal{};  // why this rank can't go on; empty if it can
};

// How ranks follow inside a join(): the same on all ranks.
struct Following {
  bool by_backward = false;  // nobody calls step(): a follower sends zeros in each backward, whatever p.grad holds
  bool by_active = false;    // where a backward ends, p.grad is a mean over the SyncResult::num_active ranks
};

// What follows from the calls of all ranks. The same on all, but that followers learn the others' `sync_point` here.
struct SyncResult {
  bool adopts;           // some rank has parameters to adopt: they come first, and then the same call again
  SyncPoint sync_point;  // of the ranks that don't follow; SyncPoint::follow if all do
  Arguments arguments;
  bool has_same_options;
  bool has_same_operators;  // those that don't follow
  bool has_same_params;     // the same
  double operators;         // theirs, if they are the same
  bool followed;            // some rank follows
  int64_t num_active;       // ranks that don't follow, or had a gradient in this step before they did
  int64_t speaker;          // one that doesn't follow
};

}  // namespace zx
