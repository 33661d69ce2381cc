// Proof that a sanitizer is awake: each run of this program has one defect, named by its argument, that the sanitizer
// has to report. Not a test by itself: see CMakeLists.txt.
#include <cstdlib>
#include <cstring>
#include <iostream>
#include <limits>
#include <thread>

#if !defined(ZX_INJECT_DEFECT)
#error "built on purpose only, with -DZX_INJECT_DEFECT"
#endif

namespace {

volatile int one = 1;  // keeps the compiler from seeing the defect, and from removing it

// Not UBSan's to see: where it knows the size (GCC 14), it ends the program before ASan has looked.
__attribute__((no_sanitize("undefined"))) int overflow_heap() {
  int* values = new int[static_cast<size_t>(4 * one)];
  std::memset(values, 0, 4 * sizeof(int));
  const int beyond = values[3 + one];
  delete[] values;
  return beyond;
}

int overflow_signed() { return std::numeric_limits<int>::max() + one; }

int race() {
  int shared = 0;
  std::thread other([&shared] { shared += one; });
  shared += one;
  other.join();
  return shared;
}

}  // namespace

int main(int argc, char** argv) {
  const char* defect = argc > 1 ? argv[1] : "";
  int result = 0;
  if (std::strcmp(defect, "heap-overflow") == 0) {
    result = overflow_heap();
  } else if (std::strcmp(defect, "signed-overflow") == 0) {
    result = overflow_signed();
  } else if (std::strcmp(defect, "data-race") == 0) {
    result = race();
  } else {
    std::cerr << "unknown defect '" << defect << "'\n";
    return 2;
  }
  std::cout << "nobody noticed: " << result << "\n";
  return 0;
}
