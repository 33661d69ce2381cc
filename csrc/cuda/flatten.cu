// The fused flatten: packs and casts any number of gradient pieces into a bucket, writing every element of it once.
#include <type_traits>

#include "cuda/device.cuh"
#include "cuda/find.cuh"
#include "cuda/kernels.h"
#include "cuda/pack.cuh"
#include "math/scalar_lane.h"

namespace zx::cuda {
namespace {

template <class To>
struct FlattenArgs {
  To* flat;
  int64_t numel;
  const FlatPiece* pieces;
  int64_t num_pieces;
  const int64_t* flags;
  int64_t num_flags;
};

// Keeps all bits of a NaN; ScalarLane::load() need not.
template <class Between, class From>
__device__ __forceinline__ Between widen(From x) {
  if constexpr (std::is_same_v<From, f16>) return static_cast<Between>(f16_to_float(x));
  return ScalarLane<Between>::load(&x).x;
}

// Casts N elements of one piece, from element i of its source on.
template <int N, class From, class To>
__device__ __forceinline__ void cast(const void* source, int64_t i, To* to) {
  const auto from = load<N, kOnce>(in_global(static_cast<const From*>(source) + i));
  if constexpr (std::is_same_v<From, To>) {
    store(from, to);  // as it is: a NaN keeps its bits
  } else {
    // Goes through double only if one end is double; 16 to 16 bits goes through float, as in torch's copy_.
    using Between = std::conditional_t<std::is_same_v<From, double> || std::is_same_v<To, double>, double, float>;
    Pack<To, N> pack;
    ZX_UNROLL
    for (int j = 0; j < N; ++j) ScalarLane<Between>{widen<Between>(from.at[j])}.store(&pack.at[j]);
    store(pack, to);
  }
}

template <int N, class To>
__device__ __forceinline__ void cast_from(const void* source, DType dtype, int64_t i, To* to) {
  switch (dtype) {
    case DType::f64:
      return cast<N, double>(source, i, to);
    case DType::f32:
      return cast<N, float>(source, i, to);
    case DType::bf16:
      return cast<N, bf16>(source, i, to);
    case DType::f16:
      return cast<N, f16>(source, i, to);
  }
}

__device__ __forceinline__ int64_t bytes_of(DType dtype) {
  return dtype == DType::f64 ? 8 : dtype == DType::f32 ? 4 : 2;
}

template <class To>
__device__ __forceinline__ To one() {
  To value;
  ScalarLane<float>{1.0F}.store(&value);
  return value;
}

// The piece or the gap around an element.
template <class To>
struct FoundPiece {
  FoundRow row;
  const void* source = nullptr;  // a gap has none
  DType dtype = DType::f32;

  __device__ __forceinline__ void find(const FlattenArgs<To>& a, int64_t i) {
    if (row.has(i)) return;
    row.find(a.pieces, a.num_pieces, a.numel, i);
    source = row.is_gap ? nullptr : a.pieces[row.index].source;
    dtype = row.is_gap ? DType::f32 : a.pieces[row.index].dtype;
  }

  // Whether N elements of the source, from element i of the flat buffer on, can be read in accesses of full width.
  template <int N>
  __device__ __forceinline__ bool reads_wide(int64_t i) const {
    const int64_t bytes = bytes_of(dtype);
    const auto address = reinterpret_cast<uintptr_t>(source) + static_cast<uintptr_t>((i - row.start) * bytes);
    const int64_t access = N * bytes < kAccessBytes ? N * bytes : kAccessBytes;
    return address % static_cast<uintptr_t>(access) == 0;
  }

  template <int N>
  __device__ __forceinline__ void write(const FlattenArgs<To>& a, int64_t i) const {
    if (source != nullptr) return cast_from<N>(source, dtype, i - row.start, a.flat + i);
    Pack<To, N> pack{};
    int64_t flag = first_flag(a, i);
    ZX_UNROLL
    for (int j = 0; j < N; ++j) {
      if (flag < a.num_flags && a.flags[flag] == i + j) {
        pack.at[j] = one<To>();
        ++flag;
      }
    }
    store(pack, a.flat + i);
  }

 private:
  // The first flag at or after element i.
  __device__ __forceinline__ static int64_t first_flag(const FlattenArgs<To>& a, int64_t i) {
    int64_t low = 0;
    for (int64_t high = a.num_flags; low < high;) {
      const int64_t middle = low + (high - low) / 2;
      if (a.flags[middle] >= i) {
        high = middle;
      } else {
        low = middle + 1;
      }
    }
    return low;
  }
};

template <class To>
__global__ void __launch_bounds__(kThreads) flatten_kernel(FlattenArgs<To> a) {
  constexpr int kVector = kAccessBytes / sizeof(To);
  constexpr int64_t kTile = int64_t{kThreads} * kVector;
  FoundPiece<To> piece;
  const bool aligned = is_aligned(a.flat);
  const TileRange tiles = tiles_of_block(tiles_for(a.numel, kTile));
  for (int64_t tile = tiles.first; tile < tiles.last; ++tile) {
    const int64_t first = tile * kTile + int64_t{threadIdx.x} * kVector;
    if (first >= a.numel) return;
    piece.find(a, first);
    if (aligned && first + kVector <= piece.row.stop && piece.template reads_wide<kVector>(first)) {
      piece.template write<kVector>(a, first);
    } else {  // an end of a piece lies inside, or the source is not aligned
      const int64_t stop = first + kVector < a.numel ? first + kVector : a.numel;
      for (int64_t i = first; i < stop; ++i) {
        piece.find(a, i);
        piece.template write<1>(a, i);
      }
    }
  }
}

template <class To>
int launch_flatten(const FlatBuffer& b, Stream stream) {
  const FlattenArgs<To> args{static_cast<To*>(b.flat), b.numel, b.pieces, b.num_pieces, b.flags, b.num_flags};
  return launch(flatten_kernel<To>, tiles_for(b.numel, int64_t{kThreads} * kAccessBytes / sizeof(To)), stream, args);
}

}  // namespace

int flatten(const FlatBuffer& b, Stream stream) {
  switch (b.dtype) {
    case DType::f64:
      return launch_flatten<double>(b, stream);
    case DType::f32:
      return launch_flatten<float>(b, stream);
    case DType::bf16:
      return launch_flatten<bf16>(b, stream);
    case DType::f16:
      return launch_flatten<f16>(b, stream);
  }
  return cudaErrorInvalidValue;
}

}  // namespace zx::cuda
