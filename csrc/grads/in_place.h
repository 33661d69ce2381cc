// In-place operators on a reduced shard, as users call them on p.grad: see zerox/grads/grad_operators.py.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "buckets/bucket.h"

namespace zx {

struct InPlace {
  int64_t bucket;
  int64_t start;  // elements of this rank's shard
  int64_t stop;
  std::string name;  // torch's, of the operator
  std::vector<std::optional<double>> numbers;
  at::Tensor factor;  // of mul_, if it is defined: a scalar, where everything has been reduced
};

// As torch does it to a tensor of the shard's dtype. Nothing if the shard holds nothing.
void do_in_place(Bucket& bucket, const InPlace& call);

}  // namespace zx
