// How kernels that run on the host move their elements.
#pragma once

namespace zx::cuda {

// Elements of any type are moved as these.
struct alignas(16) [[gnu::may_alias]] Word16 {
  unsigned words[4];
};
struct alignas(8) [[gnu::may_alias]] Word8 {
  unsigned words[2];
};
using Word4 [[gnu::may_alias]] = unsigned;
using Word2 [[gnu::may_alias]] = unsigned short;

template <class Word>
Word load_streaming(const Word* from) {
  return *from;
}
template <class Word>
void store_streaming(Word* to, Word word) {
  *to = word;
}
template <class Word>
void store_whole(Word* to, Word word) {
  *to = word;
}

}  // namespace zx::cuda
