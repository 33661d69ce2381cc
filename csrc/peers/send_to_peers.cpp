#include "peers/send_to_peers.h"

namespace zx {

void send_to_peers(const Communicator& comm, Tag tag, const std::vector<at::Tensor>& sent,
                   const std::vector<at::Tensor>& into) {
  c10d::ProcessGroup& group = *comm.group;
  const int rank = group.getRank();
  const int world = group.getSize();
  std::vector<Awaited> works;
  for (int peer = 0; peer < world; ++peer) {
    if (peer == rank || into.at(peer).numel() == 0) continue;
    std::vector<at::Tensor> message{into[peer]};
    works.push_back({comm.needing(peer, [&] { return group.recv(message, peer, tag.number()); }), peer});
  }
  for (int distance = 1; distance < world; ++distance) {  // not all to the same rank first
    const int peer = (rank + distance) % world;
    if (sent.at(peer).numel() == 0) continue;
    std::vector<at::Tensor> message{sent[peer]};
    works.push_back({comm.needing(peer, [&] { return group.send(message, peer, tag.number()); }), peer});
  }
  for (const Awaited& each : works) comm.await(each);
}

}  // namespace zx
