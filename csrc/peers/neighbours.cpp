#include "peers/neighbours.h"

#include <algorithm>
#include <array>
#include <cerrno>
#include <cstring>
#include <stdexcept>
#include <string>

#ifdef __linux__
#include <sys/prctl.h>
#include <sys/uio.h>
#include <unistd.h>
#endif

namespace zx {

bool read_memory(pid_t pid, uint64_t address, void* into, size_t bytes) {
  return bytes == 0 || read_memory(pid, address, static_cast<char*>(into), {{0, 0, bytes}});
}

bool read_memory(pid_t pid, uint64_t address, char* into, const std::vector<BytePiece>& pieces) {
#ifdef __linux__
  constexpr size_t kAtOnce = 512;   // the system takes 1,024
  std::array<iovec, kAtOnce> here;  // not cleared: most calls have one piece
  std::array<iovec, kAtOnce> there;
  size_t next = 0;
  size_t done = 0;  // of the next one: a call moves 2 GiB at most
  while (next < pieces.size()) {
    const size_t count = std::min(kAtOnce, pieces.size() - next);
    for (size_t i = 0; i < count; ++i) {
      const BytePiece& piece = pieces[next + i];
      const size_t start = i == 0 ? done : 0;
      here[i] = {into + piece.to + start, piece.bytes - start};
      there[i] = {reinterpret_cast<void*>(address + piece.from + start), piece.bytes - start};
    }
    const ssize_t moved = process_vm_readv(pid, here.data(), count, there.data(), count, 0);
    if (moved <= 0) return false;
    done += static_cast<size_t>(moved);
    while (next < pieces.size() && done >= pieces[next].bytes) done -= pieces[next++].bytes;
  }
  return true;
#else
  (void)pid, (void)address, (void)into;
  errno = ENOSYS;
  return pieces.empty();
#endif
}

void Neighbours::read(int rank, uint64_t address, void* into, size_t bytes) const {
  if (bytes > 0) read(rank, address, static_cast<char*>(into), {{0, 0, bytes}});
}

void Neighbours::read(int rank, uint64_t address, char* into, const std::vector<BytePiece>& pieces) const {
  if (read_memory(static_cast<pid_t>(pids_.at(rank)), address, into, pieces)) return;
  throw std::runtime_error("the memory of rank " + std::to_string(rank) + " (process " +
                           std::to_string(pids_.at(rank)) + ") can't be read: " + std::strerror(errno));
}

void let_siblings_read() {
#ifdef __linux__
  // Yama's exception holds for the named process and everything that it has started; process 1 has started everything.
  // prctl() fails if there is no Yama.
  if (getppid() > 1) prctl(PR_SET_PTRACER, getppid(), 0, 0, 0);
#endif
}

}  // namespace zx
