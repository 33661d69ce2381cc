#include "peers/small_all_reduce.h"

#include <ATen/ops/empty_like.h>
#include <ATen/ops/maximum.h>

namespace zx {

void SmallAllReduce::run(at::Tensor& values, Combine combine) {
  run(
      values, combine == Combine::sum
                  ? CombineInto([](at::Tensor& mine, const at::Tensor& theirs) { mine.add_(theirs); })
                  : [](at::Tensor& mine, const at::Tensor& theirs) { at::maximum_out(mine, mine, theirs); });
}

void SmallAllReduce::run(at::Tensor& values, const CombineInto& combine) {
  if (!comm_.group) return;
  if (memory_.can_serve()) return run_in_memory(values, combine);
  c10d::ProcessGroup& group = *comm_.group;
  const int rank = group.getRank();
  const int world = group.getSize();
  const int tag = tags_.next().number();
  at::Tensor theirs = at::empty_like(values);
  const auto start_send = [&](int peer) {
    std::vector<at::Tensor> message{values};
    return Awaited{comm_.needing(peer, [&] { return group.send(message, peer, tag); }), peer};
  };
  const auto start_receive = [&](int peer, at::Tensor& into) {
    std::vector<at::Tensor> message{into};
    return Awaited{comm_.needing(peer, [&] { return group.recv(message, peer, tag); }), peer};
  };
  const auto take_in = [&] { combine(values, theirs); };

  int doubling = 1;  // ranks that take part in the doubling: the largest power of two
  while (2 * doubling <= world) doubling *= 2;
  const int rest = world - doubling;
  // The other ranks hand their numbers to a partner first, and get the result from it at the end.
  if (rank >= doubling) {
    comm_.await(start_send(rank - doubling));
    comm_.await(start_receive(rank - doubling, values));
    return;
  }
  if (rank < rest) {
    comm_.await(start_receive(rank + doubling, theirs));
    take_in();
  }
  for (int distance = 1; distance < doubling; distance *= 2) {
    const Awaited received = start_receive(rank ^ distance, theirs);
    const Awaited sent = start_send(rank ^ distance);
    comm_.await(received);
    comm_.await(sent);  // before the numbers that it reads change
    take_in();
  }
  if (rank < rest) comm_.await(start_send(rank + doubling));
}

void SmallAllReduce::run_in_memory(at::Tensor& values, const CombineInto& combine) {
  const at::Tensor own = values.clone();  // which others read while `values` changes
  const int world = comm_.group->getSize();
  std::vector<at::Tensor> theirs;
  for (int rank = 0; rank < world; ++rank) theirs.push_back(at::empty_like(values));
  memory_.swap(std::vector<at::Tensor>(world, own), theirs);
  for (int rank = 0; rank < world; ++rank) {
    if (rank != comm_.group->getRank()) combine(values, theirs[rank]);
  }
}

}  // namespace zx
