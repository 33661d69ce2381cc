// Tests without a framework: TEST registers a function, CHECK prints file, line and values and goes on, and
// main returns 1 if anything failed. Include once, in the file that becomes the executable.
#pragma once

#include <atomic>
#include <concepts>
#include <cstdint>
#include <iomanip>
#include <iostream>
#include <sstream>
#include <string>
#include <vector>

namespace zx::testing {

struct Test {
  const char* name;
  void (*body)();
};

inline std::vector<Test>& tests() {
  static std::vector<Test> all;
  return all;
}

inline bool add_test(const char* name, void (*body)()) {
  tests().push_back({name, body});
  return true;
}

inline std::atomic<int64_t> num_failures{0};

inline void fail(const char* file, int line, const std::string& what) {
  constexpr int64_t kMostPrinted = 20;  // a sweep may fail a million times
  if (num_failures++ < kMostPrinted) std::cerr << file << ":" << line << ": " << what << std::endl;
}

template <class T>
std::string shown(const T& value) {
  std::ostringstream out;
  if constexpr (std::floating_point<T>) {
    out << std::setprecision(17) << value << std::hexfloat << " (" << value << ")";
  } else if constexpr (std::integral<T>) {
    out << +value << std::hex << " (0x" << +value << ")";
  } else if constexpr (requires { out << value; }) {
    out << value;
  } else {
    out << "{";
    for (const auto& element : value) out << " " << element;
    out << " }";
  }
  return out.str();
}

template <class A, class B>
void check_eq(const A& a, const B& b, const char* text, const char* file, int line) {
  if (!(a == b)) fail(file, line, std::string(text) + ": " + shown(a) + " != " + shown(b));
}

inline int run_tests() {
  for (const Test& test : tests()) {
    const int64_t before = num_failures;
    test.body();
    std::cout << (num_failures == before ? "ok    " : "FAIL  ") << test.name << std::endl;
  }
  if (num_failures > 0) std::cerr << num_failures << " checks failed" << std::endl;
  return num_failures > 0 || tests().empty() ? 1 : 0;
}

}  // namespace zx::testing

#define CHECK(condition) ((condition) ? void() : zx::testing::fail(__FILE__, __LINE__, "CHECK(" #condition ") failed"))
#define CHECK_FOR(what, condition) \
  ((condition) ? void() : zx::testing::fail(__FILE__, __LINE__, "for " + (what) + ": CHECK(" #condition ") failed"))
#define CHECK_EQ(a, b) zx::testing::check_eq((a), (b), #a " == " #b, __FILE__, __LINE__)

#define TEST(name)                                                                       \
  static void name();                                                                    \
  [[maybe_unused]] static const bool added_##name = zx::testing::add_test(#name, &name); \
  static void name()

int main() { return zx::testing::run_tests(); }
