// zerox::flatten_ on the CPU: packs and casts a bucket's gradients, zeroes what nothing fills, raises its flags.
#include <ATen/ops/empty.h>
#include <torch/library.h>

#include "cpu/spans.h"

namespace zx {
namespace {

struct Piece {
  int64_t source;
  int64_t source_start;
  int64_t flat_start;
  int64_t numel;
};

void flatten_(at::Tensor& flat, at::TensorList sources, const at::Tensor& pieces, const at::Tensor& flags) {
  constexpr const char* op = "flatten_";
  const DType to = dtype_of(flat, op, "flat");
  ZX_CHECK_CONTIGUOUS(flat, op, "flat");
  ZX_CHECK_DTYPE(pieces, at::kLong, op, "pieces");
  ZX_CHECK(pieces.dim() == 2 && pieces.size(1) == 4 && pieces.is_contiguous(), op, "pieces", "must be [n, 4], got ",
           pieces.sizes());
  check_array(flags, at::kLong, flags.numel(), op, "flags");
  const auto* raised = flags.const_data_ptr<int64_t>();
  for (int64_t i = 0; i < flags.numel(); ++i) {
    ZX_CHECK(raised[i] >= 0 && raised[i] < flat.numel(), op, "flags", "must lie in [0, ", flat.numel(), "), got ",
             raised[i]);
  }
  std::vector<DType> from;
  for (const at::Tensor& source : sources) {
    ZX_CHECK(source.is_non_overlapping_and_dense(), op, "sources", "must be dense, got strides ", source.strides());
    from.push_back(dtype_of(source, op, "sources"));
  }
  const auto* rows = reinterpret_cast<const Piece*>(pieces.const_data_ptr<int64_t>());
  const int64_t count = pieces.size(0);
  for (int64_t i = 0, end = 0; i < count; ++i) {
    const Piece& row = rows[i];
    ZX_CHECK(row.source >= 0 && row.source < static_cast<int64_t>(sources.size()) && row.source_start >= 0 &&
                 row.numel >= 0 && row.source_start + row.numel <= sources[row.source].numel() &&
                 row.flat_start >= end && row.flat_start + row.numel <= flat.numel(),
             op, "pieces", "row ", i, " (", row.source, ", ", row.source_start, ", ", row.flat_start, ", ", row.numel,
             ") leaves its source or overlaps what lies before ", end, " of ", flat.numel());
    end = row.flat_start + row.numel;
  }
  const KernelTable& table = kernels();
  const auto element_size = static_cast<int64_t>(flat.element_size());
  const auto zero = [&](int64_t start, int64_t stop) {
    std::memset(bytes_at(flat, start), 0, static_cast<size_t>((stop - start) * element_size));
  };
  // A piece and the gap behind it are one unit of work.
  at::parallel_for(0, count, 1 + count * 32768 / (flat.numel() + 1), [&](int64_t first, int64_t last) {
    for (int64_t i = first; i < last; ++i) {
      const Piece& row = rows[i];
      const at::Tensor& source = sources[row.source];
      table.cast(from[row.source], bytes_at(source, row.source_start), to, bytes_at(flat, row.flat_start), row.numel);
      zero(row.flat_start + row.numel, i + 1 < count ? rows[i + 1].flat_start : flat.numel());
    }
  });
  zero(0, count > 0 ? rows[0].flat_start : flat.numel());
  const float one = 1.0F;
  for (int64_t i = 0; i < flags.numel(); ++i) {
    table.cast(DType::f32, &one, to, bytes_at(flat, raised[i]), 1);
  }
}

}  // namespace

TORCH_LIBRARY_IMPL(zerox, CPU, m) { m.impl("flatten_", &flatten_); }

}  // namespace zx
