#include "exchange/memory_messages.h"

#include <ATen/ops/full.h>
#include <ATen/ops/zeros.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <stdexcept>
#include <utility>

#include "exchange/gave_up.h"
#include "exchange/pause.h"
#include "exchange/send_to_peers.h"

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
  uint64_t address = 0;
  neighbours_.read(rank, boxes_[rank] + MemoryBox::offset_of(addresses + line_.group->getRank()), &address,
                   sizeof(address));
  neighbours_.read(rank, address, into.mutable_data_ptr(), into.nbytes());
  int64_t has_given_up = 0;
  neighbours_.read(rank, boxes_[rank] + MemoryBox::offset_of(MemoryBox::gave_up), &has_given_up, sizeof(has_given_up));
  if (has_given_up != 0) throw GaveUp("it gave up while its message was read");
}

// Returns when `rank` has come to this round. Throws GaveUp if it never will.
void MemoryMessages::look_for(int rank, Word word) const {
  Pause pause;
  while (true) {
    std::array<int64_t, addresses> words{};
    try {
      neighbours_.read(rank, boxes_[rank], words.data(), sizeof(words));
    } catch (const std::exception& error) {
      throw GaveUp(error.what());
    }
    if (words[word] == round_) break;
    if (words[MemoryBox::gave_up] != 0) throw GaveUp("it gave up");
    if ((*own_)[MemoryBox::gave_up] != 0) throw std::runtime_error("this rank gave up");  // in another thread
    if (pause.waited() > line_.whereabouts->timeout()) throw std::runtime_error("timed out");
    pause();
  }
  std::atomic_thread_fence(std::memory_order_seq_cst);  // what the number stands for is read after it
}

}  // namespace zx
