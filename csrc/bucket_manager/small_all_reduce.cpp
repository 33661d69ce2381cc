#include "bucket_manager/small_all_reduce.h"

#include <ATen/ops/empty_like.h>
#include <ATen/ops/maximum.h>

namespace zx {

void SmallAllReduce::run(at::Tensor& values, Combine combine) {
  if (!group_) return;
  const int rank = group_->getRank();
  const int world = group_->getSize();
  const int tag = tags_.next().number();
  at::Tensor theirs = at::empty_like(values);
  const auto start_send = [&](int peer) {
    std::vector<at::Tensor> message{values};
    return group_->send(message, peer, tag);
  };
  const auto start_receive = [&](int peer, at::Tensor& into) {
    std::vector<at::Tensor> message{into};
    return group_->recv(message, peer, tag);
  };
  const auto take_in = [&] {
    if (combine == Combine::sum) {
      values.add_(theirs);
    } else {
      at::maximum_out(values, values, theirs);
    }
  };

  int doubling = 1;  // ranks that take part in the doubling: the largest power of two
  while (2 * doubling <= world) doubling *= 2;
  const int rest = world - doubling;
  // The others hand their numbers to a partner first, and get the result from it at the end.
  if (rank >= doubling) {
    start_send(rank - doubling)->wait();
    start_receive(rank - doubling, values)->wait();
    return;
  }
  if (rank < rest) {
    start_receive(rank + doubling, theirs)->wait();
    take_in();
  }
  for (int distance = 1; distance < doubling; distance *= 2) {
    const auto received = start_receive(rank ^ distance, theirs);
    const auto sent = start_send(rank ^ distance);
    received->wait();
    sent->wait();  // before the numbers that it reads change
    take_in();
  }
  if (rank < rest) start_send(rank + doubling)->wait();
}

}  // namespace zx
