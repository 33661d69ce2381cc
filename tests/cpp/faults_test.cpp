// Which faults a reader is asked about, and which go to the handler that was there before it.
#include "residency/faults.h"

#include <sys/mman.h>
#include <unistd.h>

#include <csignal>
#include <cstdio>
#include <string>

#include "check.h"
#include "child.h"

namespace {

constexpr size_t kBytes = 1 << 16;

void say(const std::string& text) { (void)!write(STDERR_FILENO, text.data(), text.size()); }

char* released() { return static_cast<char*>(mmap(nullptr, kBytes, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0)); }

// Brings its memory when it is read, unless `inside`, what it reads meanwhile, can't be read.
struct Reader final : zx::FaultReader {
  bool access_at(const void* address, bool is_write) override {
    say(is_write ? "write " : "read ");
    if (++num_asked > 9) _exit(1);
    if (inside != nullptr) (void)*static_cast<volatile char*>(inside);
    const auto* const place = static_cast<const char*>(address);
    if (place < memory || place >= memory + kBytes) return false;
    mprotect(memory, kBytes, is_write ? PROT_READ | PROT_WRITE : PROT_READ);
    return true;
  }
  char* memory = released();
  char* inside = nullptr;
  int num_asked = 0;
};

void theirs(int /*signal*/) {
  say("theirs ");
  _exit(0);
}

// What a process says in which `body` runs with a reader; `before`: the handler that was there before.
template <class Body>
std::string said_in(const Body& body, void (*before)(int) = &theirs) {
  return zx::testing::end_of([&] {
           std::signal(SIGSEGV, before);
           Reader reader;
           zx::add_fault_reader(&reader);
           body(reader);
           say("end ");
           _exit(0);  // without the reader's removal
         })
      .said;
}

void look(const char* address) { (void)*static_cast<const volatile char*>(address); }

}  // namespace

TEST(a_reader_is_asked_once_for_its_own_memory_and_told_of_writes) {
  CHECK_EQ(said_in([](Reader& reader) {
             look(reader.memory);
             look(reader.memory + kBytes - 1);
             *static_cast<volatile char*>(reader.memory) = 1;
           }),
           "read write end ");
}

TEST(others_addresses_go_to_the_handler_before) {
  CHECK_EQ(said_in([](Reader& /*reader*/) { look(released()); }), "read theirs ");
  CHECK_EQ(said_in([](Reader& /*reader*/) { raise(SIGSEGV); }), "theirs ");
}

TEST(a_handler_that_comes_back_to_ours_is_called_once) {
  const auto raises_again = [](int /*signal*/) {
    say("theirs ");
    raise(SIGSEGV);
  };
  CHECK_EQ(said_in([](Reader& /*reader*/) { look(released()); }, raises_again), "read theirs ");
}

TEST(a_fault_inside_of_a_reader_is_a_real_one) {
  CHECK_EQ(said_in([](Reader& reader) {
             reader.inside = released();
             look(reader.memory);
           }),
           "read theirs ");
}

TEST(a_reader_that_was_removed_is_not_asked) {
  CHECK_EQ(said_in([](Reader& reader) {
             zx::remove_fault_reader(&reader);
             look(reader.memory);
           }),
           "theirs ");
}
