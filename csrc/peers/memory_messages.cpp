#include "peers/memory_messages.h"

#include <ATen/ops/full.h>
#include <ATen/ops/zeros.h>

#include <algorithm>
#include <utility>

#include "peers/poll.h"
#include "peers/send_to_peers.h"

namespace zx {

MemoryMessages::~MemoryMessages() {
  if (own_) ControlBlock::keep_for_others(std::move(own_));
}

bool MemoryMessages::can_serve() {
  if (own_) return true;
  if (!comm_.group || !comm_.members.empty()) return false;
  std::vector<int64_t> processes = comm_.failure_detector->processes();
  const auto is_near = [](int64_t process) { return process != 0; };
  if (static_cast<int>(processes.size()) != comm_.group->getSize()) return false;
  if (!std::all_of(processes.begin(), processes.end(), is_near)) return false;
  neighbours_ = Neighbours(std::move(processes));
  return true;
}

// Collective: tells each other where the control blocks are, by messages of the group.
void MemoryMessages::exchange_addresses() {
  const int world = comm_.group->getSize();
  auto control_block = std::make_shared<ControlBlock>(addresses + world);
  comm_.failure_detector->add_control_block(control_block);
  const std::vector<at::Tensor> own(world, at::full({1}, static_cast<int64_t>(control_block->address()), at::kLong));
  const at::Tensor found = at::zeros({world, 1}, at::kLong);
  send_to_peers(comm_, tag_, own, found.unbind());
  const auto* addresses = found.const_data_ptr<int64_t>();
  control_blocks_.assign(addresses, addresses + world);
  own_ = std::move(control_block);
}

void MemoryMessages::swap(const std::vector<at::Tensor>& sent, const std::vector<at::Tensor>& into) {
  if (!own_) exchange_addresses();
  const int rank = comm_.group->getRank();
  const int world = comm_.group->getSize();
  for (int peer = 0; peer < world; ++peer) {
    (*own_)[addresses + peer] = reinterpret_cast<int64_t>(sent.at(peer).const_data_ptr());
  }
  (*own_)[published] = ++round_;
  for (int distance = 1; distance < world; ++distance) {  // not all from the same rank first
    const int peer = (rank + distance) % world;
    comm_.needing(peer, [&] { take(peer, into.at(peer)); });
  }
  (*own_)[taken] = round_;
  for (int distance = 1; distance < world; ++distance) {
    const int peer = (rank + distance) % world;
    comm_.needing(peer, [&] {
      try {
        poll_for(peer, taken);
      } catch (const GaveUp&) {  // it reads nothing any more; this rank has what it came for
      }
    });
  }
}

// Copies the message that `rank` has for this one.
void MemoryMessages::take(int rank, const at::Tensor& into) const {
  poll_for(rank, published);
  if (into.numel() == 0) return;
  const size_t own_place = addresses + comm_.group->getRank();
  const auto address = static_cast<uint64_t>(word_at(neighbours_, rank, control_blocks_[rank], own_place));
  neighbours_.read(rank, address, into.mutable_data_ptr(), into.nbytes());
  check_read(neighbours_, rank, control_blocks_[rank]);
}

// Returns when `rank` has come to this round. Throws GaveUp if it never will.
void MemoryMessages::poll_for(int rank, Word word) const {
  const auto has_come = [&] { return word_at(neighbours_, rank, control_blocks_[rank], word) == round_; };
  poll(neighbours_, rank, control_blocks_[rank], *own_, *comm_.failure_detector, has_come, [] { return false; });
}

}  // namespace zx
