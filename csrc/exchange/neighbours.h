// Ranks on one machine read each other's memory, which takes one copy where sockets take two and a kernel's buffers.
#pragma once

#include <sys/types.h>

#include <cstddef>
#include <cstdint>
#include <vector>

namespace zx {

// Note [Neighbours]
// Linux lets a process read another of the same user: process_vm_readv(2), which MPI libraries use too ("cross memory
// attach"). A rank tells its neighbours where a message lies instead of sending it, and keeps it there until they have
// said that they are done. Whether it works (same host and user, what Yama, seccomp and containers allow) is tried when
// an optimizer is built, by reading a number that only the right process has at that address:
// zerox/ranks/neighbours.py.
//
// Reads only: a rank that goes on after an error, its buffers freed, must not be written to by those that don't know
// yet. What they read of it then is garbage, which the next settle() never lets an update use.

class Neighbours {
 public:
  Neighbours() = default;
  // The process of each rank; 0: only messages reach it.
  explicit Neighbours(std::vector<int64_t> pids) : pids_(std::move(pids)) {}

  bool has(int rank) const { return !pids_.empty() && pids_.at(rank) != 0; }

  // Copies from a rank's memory. Throws std::runtime_error if that can't be read (the process is gone).
  void read(int rank, uint64_t address, void* into, size_t bytes) const;

 private:
  std::vector<int64_t> pids_;  // by rank; empty: none
};

// Whether all bytes could be read.
bool read_memory(pid_t pid, uint64_t address, void* into, size_t bytes);

// Where Yama asks for it (Ubuntu's default), lets the processes that this one's parent started read it, unless that is
// process 1; elsewhere the kernel's own check, same user, is all there is.
void let_siblings_read();

}  // namespace zx
