#include "exchange/peer_messages.h"

#include <ATen/ops/empty.h>

namespace zx {

std::vector<at::Tensor> PeerMessages::swap(const std::vector<at::Tensor>& sent, const std::vector<int64_t>& numels) {
  if (!line_.group) return sent;
  c10d::ProcessGroup& group = *line_.group;
  const int rank = group.getRank();
  const int world = group.getSize();
  const int tag = tags_.next().number();
  std::vector<at::Tensor> received = sent;
  std::vector<Awaited> works;
  for (int peer = 0; peer < world; ++peer) {
    if (peer == rank || numels.at(peer) == 0) {
      if (peer != rank) received[peer] = at::empty({0}, sent.at(peer).options());
      continue;
    }
    received[peer] = at::empty({numels[peer]}, sent.at(peer).options());
    std::vector<at::Tensor> message{received[peer]};
    works.push_back({line_.needing(peer, [&] { return group.recv(message, peer, tag); }), peer});
  }
  for (int distance = 1; distance < world; ++distance) {  // not all to the same rank first
    const int peer = (rank + distance) % world;
    count(sent.at(peer));
    if (sent[peer].numel() == 0) continue;
    std::vector<at::Tensor> message{sent[peer]};
    works.push_back({line_.needing(peer, [&] { return group.send(message, peer, tag); }), peer});
  }
  for (const Awaited& each : works) line_.await(each);
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
