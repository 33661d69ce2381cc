#include "exchange/peer_messages.h"

#include <ATen/ops/empty.h>

namespace zx {

std::vector<at::Tensor> PeerMessages::swap(const std::vector<at::Tensor>& sent, const std::vector<int64_t>& numels) {
  if (!line_.group) return sent;
  std::vector<at::Tensor> received = sent;
  for (int peer = 0; peer < world(); ++peer) {
    if (peer != rank()) received[peer] = at::empty({numels.at(peer)}, sent.at(peer).options());
  }
  for (int distance = 1; distance < world(); ++distance) count(sent.at((rank() + distance) % world()));
  if (memory_.can_serve()) {
    read(sent, received);
  } else {
    send(sent, received);
  }
  return received;
}

void PeerMessages::read(const std::vector<at::Tensor>& sent, const std::vector<at::Tensor>& into) {
  std::vector<const void*> addresses;
  std::vector<MemoryMessages::Received> received;
  for (int peer = 0; peer < world(); ++peer) {
    addresses.push_back(sent[peer].const_data_ptr());
    received.push_back({peer == rank() ? nullptr : into[peer].mutable_data_ptr(), into[peer].nbytes()});
  }
  memory_.swap(addresses, received);
}

void PeerMessages::send(const std::vector<at::Tensor>& sent, const std::vector<at::Tensor>& into) {
  c10d::ProcessGroup& group = *line_.group;
  const int tag = tags_.next().number();
  std::vector<Awaited> works;
  for (int peer = 0; peer < world(); ++peer) {
    if (peer == rank() || into[peer].numel() == 0) continue;
    std::vector<at::Tensor> message{into[peer]};
    works.push_back({line_.needing(peer, [&] { return group.recv(message, peer, tag); }), peer});
  }
  for (int distance = 1; distance < world(); ++distance) {  // not all to the same rank first
    const int peer = (rank() + distance) % world();
    if (sent[peer].numel() == 0) continue;
    std::vector<at::Tensor> message{sent[peer]};
    works.push_back({line_.needing(peer, [&] { return group.send(message, peer, tag); }), peer});
  }
  for (const Awaited& each : works) line_.await(each);
}

std::vector<at::Tensor> PeerMessages::to_all(const at::Tensor& message) {
  return swap(std::vector<at::Tensor>(world(), message), std::vector<int64_t>(world(), message.numel()));
}

void PeerMessages::count(const at::Tensor& message) {
  ++traffic_.messages;
  traffic_.bytes += static_cast<int64_t>(message.nbytes());
}

}  // namespace zx
