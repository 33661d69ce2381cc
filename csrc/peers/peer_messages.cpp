#include "peers/peer_messages.h"

#include <ATen/ops/empty.h>

#include "peers/send_to_peers.h"

namespace zx {

std::vector<at::Tensor> PeerMessages::swap(const std::vector<at::Tensor>& sent, const std::vector<int64_t>& numels) {
  if (!comm_.group) return sent;
  std::vector<at::Tensor> received = sent;
  for (int peer = 0; peer < world(); ++peer) {
    if (peer != rank()) received[peer] = at::empty({numels.at(peer)}, sent.at(peer).options());
  }
  for (int distance = 1; distance < world(); ++distance) count(sent.at((rank() + distance) % world()));
  if (memory_.can_serve()) {
    memory_.swap(sent, received);
  } else {
    send_to_peers(comm_, tags_.next(), sent, received);
  }
  return received;
}

std::vector<at::Tensor> PeerMessages::to_all(const at::Tensor& message) {
  return swap(std::vector<at::Tensor>(world(), message), std::vector<int64_t>(world(), message.numel()));
}

void PeerMessages::count(const at::Tensor& message) {
  ++traffic_.messages;
  traffic_.bytes += static_cast<int64_t>(message.nbytes());
}

}  // namespace zx
