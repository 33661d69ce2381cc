// zerox::flatten_ on the CPU: packs and casts a bucket's gradients, zeroes the elements that nothing fills, and raises
// its flags.
#include <ATen/ops/empty.h>
#include <torch/library.h>

#include <array>

#include "cpu/spans.h"

namespace zx {
namespace {

constexpr int64_t kMostElements = 65536;  // of a piece, in one unit of work for a thread

// Elements [start, stop) of a piece, counted from its own start.
struct PiecePart {
  int64_t piece;
  int64_t start;
  int64_t stop;
};

void flatten_(at::Tensor& flat, at::TensorList sources, const at::Tensor& pieces, const at::Tensor& flags) {
  constexpr const char* op = "flatten_";
  check_flatten(flat, sources, pieces, flags);
  const DType to = dtype_of(flat, op, "flat");
  std::vector<DType> from;
  for (const at::Tensor& source : sources) from.push_back(dtype_of(source, op, "sources"));
  const auto* raised = flags.const_data_ptr<int64_t>();
  const auto* rows = reinterpret_cast<const Piece*>(pieces.const_data_ptr<int64_t>());
  const int64_t count = pieces.size(0);
  const KernelTable& table = kernels();
  const auto element_size = static_cast<int64_t>(flat.element_size());
  const auto zero = [&](int64_t start, int64_t stop) {
    std::memset(bytes_at(flat, start), 0, static_cast<size_t>((stop - start) * element_size));
  };
  // Threads share one large piece in parts. The gap after a piece is zeroed with the piece's last part.
  std::vector<PiecePart> parts;
  for (int64_t i = 0; i < count; ++i) {
    for (int64_t start = 0; start == 0 || start < rows[i].numel; start += kMostElements) {
      parts.push_back({i, start, std::min(start + kMostElements, rows[i].numel)});
    }
  }
  parallel_units(static_cast<int64_t>(parts.size()), flat.numel(), [&](int64_t first, int64_t last) {
    for (int64_t part = first; part < last; ++part) {
      const auto [i, start, stop] = parts[part];
      const Piece& row = rows[i];
      const at::Tensor& source = sources[row.source];
      table.cast(from[row.source], bytes_at(source, row.source_start + start), to,
                 bytes_at(flat, row.flat_start + start), stop - start);
      if (stop == row.numel) zero(row.flat_start + stop, i + 1 < count ? rows[i + 1].flat_start : flat.numel());
    }
  });
  zero(0, count > 0 ? rows[0].flat_start : flat.numel());
  const float one = 1.0F;
  alignas(double) std::array<char, sizeof(double)> raised_flag{};
  table.cast(DType::f32, &one, to, raised_flag.data(), 1);
  for (int64_t i = 0; i < flags.numel(); ++i) {
    std::memcpy(bytes_at(flat, raised[i]), raised_flag.data(), static_cast<size_t>(element_size));
  }
}

}  // namespace

TORCH_LIBRARY_IMPL(zerox, CPU, m) { m.impl("flatten_", &flatten_); }

}  // namespace zx
