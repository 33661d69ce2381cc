// What: makes the gradients of a bucket into a flight with a packing list, which says what is copied where, and which
// flags are raised.
#pragma once

#include <ATen/core/Tensor.h>

#include <array>
#include <memory>
#include <string>
#include <vector>

#include "buckets/buckets.h"
#include "grads/flight.h"
#include "grads/flights.h"

namespace zx {

class MeanGrads;
struct Taken;

class Packing {
 public:
  Packing(std::shared_ptr<MeanGrads> grads, std::shared_ptr<Flights> flights)
      : grads_(std::move(grads)), flights_(std::move(flights)) {}

  // Notes that the current stream has written a gradient of this bucket.
  void note_producer(Bucket& bucket, const Locked& lock) const;

  // Takes all slots' gradients, or none if `empty`. `refusal` tells why one could not be taken.
  std::shared_ptr<Flight> make_flight(const std::shared_ptr<Bucket>& bucket, bool empty, std::string& refusal,
                                      const Locked& lock) const;

 private:
  Taken take(const Bucket& bucket, Slot& slot, bool empty, std::string& refusal, const Locked& lock) const;

  std::shared_ptr<MeanGrads> grads_;
  std::shared_ptr<Flights> flights_;
};

// An int64 tensor [numbers / columns, columns], or [numbers] for one column.
at::Tensor to_table(const std::vector<int64_t>& numbers, int64_t columns);

// Of flatten_ in csrc/bindings/module.cpp: the place of a source, from where in it, to where in `flat`, how many.
using PieceRow = std::array<int64_t, 4>;
at::Tensor to_table(const std::vector<PieceRow>& rows);

// The gradient's elements in the order in which the parameter's lie in memory.
at::Tensor in_order_of(const at::Tensor& grad, const Home& home);

}  // namespace zx
