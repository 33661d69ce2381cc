#include "peers/memory_messages.h"

#include <ATen/ops/full.h>
#include <ATen/ops/zeros.h>

#include <algorithm>
#include <utility>

#include "peers/look.h"
#include "peers/send_to_peers.h"

namespace zx {

MemoryMessages::~MemoryMessages() {
  if (own_) MemoryBox::keep_for_others(std::move(own_));
}

bool MemoryMessages::can_serve() {
  if (own_) return true;
  if (!line_.group || !line_.members.empty()) return false;
  std::vector<int64_t> processes = line_.whereabouts->processes();
  const auto is_near = [](int64_t process) { return process != 0; };
  if (static_cast<int>(processes.size()) != line_.group->getSize()) return false;
  if (!std::all_of(processes.begin(), processes.end(), is_near)) return false;
  neighbours_ = Neighbours(std::move(processes));
  return true;
}

// Collective: tells each other where the boxes are, by messages of the group.
void MemoryMessages::meet() {
  const int world = line_.group->getSize();
  auto box = std::make_shared<MemoryBox>(addresses + world);
  line_.whereabouts->add_box(box);
  const std::vector<at::Tensor> own(world, at::full({1}, static_cast<int64_t>(box->address()), at::kLong));
  const at::Tensor found = at::zeros({world, 1}, at::kLong);
  send_to_peers(line_, tag_, own, found.unbind());
  const auto* addresses = found.const_data_ptr<int64_t>();
  boxes_.assign(addresses, addresses + world);
  own_ = std::move(box);
}

void MemoryMessages::swap(const std::vector<at::Tensor>& sent, const std::vector<at::Tensor>& into) {
  if (!own_) meet();
  const int rank = line_.group->getRank();
  const int world = line_.group->getSize();
  for (int peer = 0; peer < world; ++peer) {
    (*own_)[addresses + peer] = reinterpret_cast<int64_t>(sent.at(peer).const_data_ptr());
  }
  (*own_)[published] = ++round_;
  for (int distance = 1; distance < world; ++distance) {  // not all from the same rank first
    const int peer = (rank + distance) % world;
    line_.needing(peer, [&] { take(peer, into.at(peer)); });
  }
  (*own_)[taken] = round_;
  for (int distance = 1; distance < world; ++distance) {
    const int peer = (rank + distance) % world;
    line_.needing(peer, [&] {
      try {
        look_for(peer, taken);
      } catch (const GaveUp&) {  // it reads nothing any more; this rank has what it came for
      }
    });
  }
}

// Copies the message that `rank` has for this one.
void MemoryMessages::take(int rank, const at::Tensor& into) const {
  look_for(rank, published);
  if (into.numel() == 0) return;
  const size_t own_place = addresses + line_.group->getRank();
  const auto address = static_cast<uint64_t>(word_at(neighbours_, rank, boxes_[rank], own_place));
  neighbours_.read(rank, address, into.mutable_data_ptr(), into.nbytes());
  check_read(neighbours_, rank, boxes_[rank]);
}

// Returns when `rank` has come to this round. Throws GaveUp if it never will.
void MemoryMessages::look_for(int rank, Word word) const {
  const auto has_come = [&] { return word_at(neighbours_, rank, boxes_[rank], word) == round_; };
  look(neighbours_, rank, boxes_[rank], *own_, *line_.whereabouts, has_come, [] { return false; });
}

}  // namespace zx
