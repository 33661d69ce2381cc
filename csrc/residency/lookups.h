// What lookups read of tables: see Note [Rows are fetched by lookups].
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>

#include "params/read_guard.h"
#include "residency/bucket_copies.h"
#include "residency/turns.h"

namespace zx {

// Any thread may call any of these.
class Lookups {
 public:
  Lookups(BucketCopies& copies, Turns& turns) : copies_(copies), turns_(turns) {}

  // Before an operator that uses a table: pins it if the operator is a lookup, and returns whether that is all that is
  // to be done for it.
  bool begin(int64_t bucket, const at::Tensor& tensor, const ReadGuard::Use& use);
  void end(int64_t bucket, BucketCopies::Locked lock);
  // Something else than a lookup is about to read the table.
  void warn_of_whole(int64_t bucket, const char* reader);

 private:
  bool reads_nothing(int64_t bucket, const ReadGuard::Use& use) const;
  void pin_rows(int64_t bucket, const at::Tensor& indices, const char* reader);

  BucketCopies& copies_;
  Turns& turns_;
};

}  // namespace zx
