// PythonFunctions: which buckets a function's backward may read.
#include "residency/python_functions.h"

#include "check.h"

namespace {

using Buckets = std::vector<int64_t>;
using zx::PythonFunctions;
constexpr auto kMost = static_cast<int64_t>(PythonFunctions::kMostCalls);

}  // namespace

TEST(a_backward_reads_what_its_own_forward_read) {
  PythonFunctions functions;
  functions.note("Mul", {1, 7}, {0, 2});
  functions.note("Mul", {1, 8}, {3});
  CHECK(functions.read_by("MulBackward", {1, 7}) == (Buckets{0, 2}));
  CHECK(functions.read_by("MulBackward", {1, 8}) == (Buckets{3}));
}

TEST(threads_count_for_themselves) {
  PythonFunctions functions;
  functions.note("Mul", {1, 7}, {0});
  functions.note("Mul", {2, 7}, {1});
  CHECK(functions.read_by("MulBackward", {1, 7}) == (Buckets{0}));
  CHECK(functions.read_by("MulBackward", {2, 7}) == (Buckets{1}));
}

TEST(other_backwards_read_nothing) {
  PythonFunctions functions;
  functions.note("Mul", {1, 7}, {0});
  CHECK(functions.read_by("AddmmBackward0", {1, 9}).empty());
  CHECK(functions.read_by("MulBackward", {1, 9}).empty());
}

TEST(of_many_calls_the_last_are_known_and_others_by_name) {
  PythonFunctions functions;
  functions.note("First", {1, -1}, {5});
  for (int64_t number = 0; number < kMost; ++number) functions.note("Mul", {1, number}, {number % 2});
  CHECK_EQ(functions.num_calls(), PythonFunctions::kMostCalls);
  CHECK(functions.read_by("MulBackward", {1, kMost - 1}) == (Buckets{(kMost - 1) % 2}));
  CHECK(functions.read_by("FirstBackward", {1, -1}) == (Buckets{5}));
  CHECK(functions.read_by("OtherBackward", {1, -1}).empty());
}

TEST(calls_from_before_a_step_are_known_by_name) {
  PythonFunctions functions;
  functions.note("Mul", {1, 7}, {0});
  functions.note("Mul", {1, 8}, {4});
  functions.forget_calls();
  CHECK_EQ(functions.num_calls(), size_t{0});
  CHECK(functions.read_by("MulBackward", {1, 7}) == (Buckets{0, 4}));
}

TEST(a_number_that_comes_again_means_the_newer_call) {
  PythonFunctions functions;
  functions.note("Mul", {1, 7}, {0});
  functions.note("Add", {1, 7}, {1});
  CHECK_EQ(functions.num_calls(), size_t{1});
  CHECK(functions.read_by("AddBackward", {1, 7}) == (Buckets{1}));
}
