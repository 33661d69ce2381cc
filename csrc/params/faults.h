// Reads of released parameters, and writes to any, that no operator shows.
#pragma once

namespace zx {

// Note [Reads that nothing announces]
// numpy, repr(), pickle, and kernels that somebody calls without an operator read a released parameter unannounced. Its
// addresses can't be read then, and the system sends SIGSEGV to the thread that tries. Our handler fetches the bucket,
// and the thread goes on as if nothing had been. Such readers can't be told of an error: they find NaN, and Python
// raises as soon as it runs in this thread again.
//
// The handler does what handlers must not do: it takes locks, allocates, and waits for other ranks. It may, since a
// read of a parameter is no place where a thread holds any of ours or the allocator's locks. But it may hold the GIL.
// It keeps it, since code that reads memory does not expect to lose it, unless it has to wait for another thread. While
// a bucket is being filled, readers on other threads that nothing announces find it half full.
//
// A write that nothing announces would be lost when the bucket is released. Resident buckets may be read only, but for
// operators that say that they write, and inside whole(): so such a write faults too. It is let through, and raises.
//
// Some code sets every signal back to what Python takes for its handler, which for SIGSEGV is none: Lightning does at
// the end of fit(). So whenever memory goes away, the handler is put back if there is none. A function of somebody
// else's stays, since it may call ours.
//
// The system itself does not raise signals for its own reads: write(2) of released memory fails with EFAULT. And
// whoever installs a handler of SIGSEGV later has to call ours for what it does not know, as ours does with the one
// before.

class FaultReader {
 public:
  virtual ~FaultReader() = default;
  // Makes the address readable, or writable, and returns true, if it is one of its own.
  virtual bool access_at(const void* address, bool is_write) = 0;
};

// Installs the handler, if there is none. Any thread may call it.
void keep_fault_handler();

// Any thread may call these. A reader must not be destroyed before it is removed; while a thread is in a fault it is
// not.
void add_fault_reader(FaultReader* reader);
void remove_fault_reader(FaultReader* reader);

}  // namespace zx
