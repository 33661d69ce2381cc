// Ranks on one machine read each other's memory. This takes one copy; sockets take two, and the kernel's buffers.
#pragma once

#include <sys/types.h>

#include <cstddef>
#include <cstdint>
#include <vector>

namespace zx {

// Note [Neighbours]
// Linux lets a process read another process of the same user: process_vm_readv(2), which MPI libraries use too ("cross
// memory attach"). A rank tells its neighbours where a message lies instead of sending it, and keeps it there until
// they have said that they are done. Reading may not work (it takes the same host and user, and Yama, seccomp and
// containers must allow it). So it is tried when an optimizer is built, by reading a number that only the right process
// has at that address: zerox/ranks/neighbours.py.
//
// Neighbours only read. After an error a rank may go on with its buffers freed, so ranks that don't know of the error
// yet must not write to it. What they read then is garbage, and the next sync() raises before any update reads it.

// Bytes that lie `from` somewhere on in one memory, and `to` in another.
struct BytePiece {
  size_t from;
  size_t to;
  size_t bytes;
};

class Neighbours {
 public:
  Neighbours() = default;
  // The process of each rank; 0 if only messages reach it.
  explicit Neighbours(std::vector<int64_t> pids) : pids_(std::move(pids)) {}

  int world() const { return static_cast<int>(pids_.size()); }  // 0 if there are none
  bool has(int rank) const { return !pids_.empty() && pids_.at(rank) != 0; }

  // Copies from a rank's memory. Throws std::runtime_error if that can't be read (the process is gone).
  void read(int rank, uint64_t address, void* into, size_t bytes) const;
  // The same of pieces, none of them empty, of what begins at `address`.
  void read(int rank, uint64_t address, char* into, const std::vector<BytePiece>& pieces) const;

 private:
  std::vector<int64_t> pids_;  // by rank; empty if there are none
};

// Whether all bytes could be read.
bool read_memory(pid_t pid, uint64_t address, void* into, size_t bytes);
bool read_memory(pid_t pid, uint64_t address, char* into, const std::vector<BytePiece>& pieces);

// With Yama (Ubuntu's default), lets the processes that this one's parent started read this one, unless the parent is
// process 1. Without Yama, the kernel only checks that the user is the same.
void let_siblings_read();

}  // namespace zx
