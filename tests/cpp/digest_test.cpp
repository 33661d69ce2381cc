// digest(): whether memory has changed.
#include "residency/digest.h"

#include <set>
#include <utility>
#include <vector>

#include "check.h"

TEST(any_byte_of_any_length_shows) {
  for (const size_t bytes : {0, 1, 7, 8, 63, 64, 65, 200}) {
    std::vector<unsigned char> memory(bytes);
    std::set<uint64_t> seen{zx::digest(memory.data(), bytes)};
    for (size_t i = 0; i < bytes; ++i) {
      for (const unsigned char value : {1, 128, 255}) {
        memory[i] = value;
        CHECK(seen.insert(zx::digest(memory.data(), bytes)).second);
        memory[i] = 0;
      }
    }
  }
}

TEST(elements_that_changed_places_show) {
  std::vector<uint64_t> memory(64);
  for (size_t i = 0; i < memory.size(); ++i) memory[i] = i * i + 1;
  const size_t bytes = memory.size() * sizeof(uint64_t);
  const uint64_t before = zx::digest(memory.data(), bytes);
  for (size_t i = 0; i < memory.size(); ++i) {
    for (size_t j = 0; j < i; ++j) {
      std::swap(memory[i], memory[j]);
      CHECK(zx::digest(memory.data(), bytes) != before);
      std::swap(memory[i], memory[j]);
    }
  }
  CHECK_EQ(zx::digest(memory.data(), bytes), before);
}
