// The CUDA flatten, run on the host: the bits of the CPU's casts over all dtypes, piece edges and alignments.
#include "cuda_shards.h"

namespace {

using namespace zx::testing;
using zx::DType;

// A flat buffer whose pieces come from sources of their own; flags lie in the gaps.
struct Bucket {
  // `dtypes` and `offsets` of the sources are taken in turn.
  Bucket(DType to, const SegmentLayout& layout, const std::vector<DType>& dtypes, const std::vector<int64_t>& offsets,
         int64_t flat_offset)
      : flat(to, layout.numel, flat_offset) {
    int64_t end = 0;
    for (size_t i = 0; i < layout.segments.size(); ++i) {
      const auto [start, stop, row, number, from] = layout.segments[i];
      sources.push_back(Elements::random(dtypes[i % dtypes.size()], stop - start, offsets[i % offsets.size()]));
      spans.push_back({start, stop});
      raise_some(end, start);
      end = stop;
    }
    raise_some(end, layout.numel);
  }

  void raise_some(int64_t first, int64_t last) {
    for (int64_t i = first; i < last; ++i) {
      if (i == first || i == last - 1 || i % 37 == 5 || i % 64 == 6) flags.push_back(i);
    }
  }

  Elements expected() {
    Elements out = flat;
    const float zero = 0.0F;
    const float one = 1.0F;
    const auto* table = &zx::kernels_scalar();
    for (int64_t i = 0; i < out.numel(); ++i) table->cast(DType::f32, &zero, out.dtype(), out.at(i), 1);
    for (size_t i = 0; i < sources.size(); ++i) {
      table->cast(sources[i].dtype(), sources[i].at(0), out.dtype(), out.at(spans[i].first), sources[i].numel());
    }
    for (const int64_t flag : flags) table->cast(DType::f32, &one, out.dtype(), out.at(flag), 1);
    return out;
  }

  bool fits_a_launch() const { return sources.size() <= zx::cuda::kFewPieces && flags.size() <= zx::cuda::kFewFlags; }

  // `on_host`: where the tables are said to lie.
  Elements run_cuda(bool on_host) {
    std::vector<zx::cuda::FlatPiece> pieces;
    for (size_t i = 0; i < sources.size(); ++i) {
      pieces.push_back({sources[i].at(0), spans[i].first, spans[i].second, sources[i].dtype()});
    }
    Elements out = flat;  // garbage: what nobody writes differs
    CHECK_EQ(zx::cuda::flatten({out.dtype(), out.at(0), out.numel(), pieces.data(), static_cast<int64_t>(pieces.size()),
                                flags.data(), static_cast<int64_t>(flags.size()), on_host},
                               kHost),
             0);
    return out;
  }

  Elements flat;
  std::vector<Elements> sources{};
  std::vector<std::pair<int64_t, int64_t>> spans{};
  std::vector<int64_t> flags{};
};

void check(Bucket bucket, const std::string& name) {
  const Elements expected = bucket.expected();
  for (const bool on_host : {false, true}) {
    if (on_host && !bucket.fits_a_launch()) continue;
    const Elements out = bucket.run_cuda(on_host);
    CHECK_FOR(name, out.differences(expected) == 0);
    CHECK_FOR(name, out.canaries_live());
  }
}

TEST(flatten_gives_the_cpu_bits_for_every_pair_of_dtypes) {
  for (const DType to : kDTypes) {
    for (const DType from : kDTypes) {
      for (const SegmentLayout& layout : segment_layouts()) {
        for (const int64_t offset : {0, 1}) {
          check(Bucket(to, layout, {from}, {offset}, 0), joined({name_of(from), "to", name_of(to), layout.name}));
        }
      }
    }
  }
}

TEST(flatten_takes_sources_of_unlike_dtypes_and_alignments) {
  for (const DType to : kDTypes) {
    for (const SegmentLayout& layout : segment_layouts()) {
      for (const int64_t flat_offset : {0, 1}) {
        const std::vector<DType> dtypes(kDTypes.begin(), kDTypes.end());
        in_every_order([&] {
          check(Bucket(to, layout, dtypes, {0, 1, 2, 3, 4, 8}, flat_offset), joined({name_of(to), layout.name}));
        });
      }
    }
  }
}

// Bits that no conversion would keep: a bucket of the gradients' own dtype is a copy.
TEST(flatten_copies_nan_payloads_where_the_dtype_stays) {
  for (const DType dtype : kDTypes) {
    Bucket bucket(dtype, layout_of("", {1000}, 0, 0), {dtype}, {0}, 0);
    for (int64_t i = 0; i < 1000; ++i) bucket.sources[0].set(i, ~static_cast<uint64_t>(i));
    const Elements out = bucket.run_cuda(/*on_host=*/true);
    for (int64_t i = 0; i < 1000; ++i) CHECK_EQ(out.get(i), bucket.sources[0].get(i));
  }
}

}  // namespace
