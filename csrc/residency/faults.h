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
// It keeps it, since code that reads memory does not expect to lose it, unless it has to wait for another thread.
//
// A write that nothing announces would be lost when the bucket is released. Resident buckets may be read only, but for
// operators that say that they write, and inside whole(): so such a write faults too. It is let through, and raises.
//
// The system itself does not raise signals for its own reads: write(2) of released memory fails with EFAULT.
//
// With ZEROX_FAULTS=0 there is no handler. Then torch refuses to say where a parameter lies that no operator is using,
// so that numpy() and its like raise (HiddenReads). Who knew the address before faults, which ends the process.

// Note [One handler among others]
// The handler of SIGSEGV is installed with the first reader, and taken away with the last. A fault at an address that
// is no reader's goes to the handler that was there before, as the kernel would have sent it, or ends the process.
//
// Others install handlers too, and not all of them call the one before: Python's faulthandler writes a traceback and
// ends the process. So whenever memory comes or goes we look, and where another function came later, ours is installed
// once more, on top of it. It is another function of ours, since theirs has the first one as what was before it, and
// goes back to it: by sigaction(2), by a call, or by raise(3). So each of our two functions has one handler before it,
// and no fault goes round in circles. Where a third handler comes, on top of both, it stays there.
//
//   the one before  <-  ours  <-  faulthandler's  <-  ours again
//
// If theirs comes back to the function that has called it, the process ends, and if a fault happens inside of our own
// handler it is a real one. Which threads are where, a table tells that a handler may read and write without
// allocating: a real fault may be one of malloc()'s. Nothing is installed from inside the handler.
//
// What is taken away is only what is on top. If another handler is, it may call ours: then ours stays, finds no reader,
// and passes everything on.
//
// Some code sets every signal back to what Python takes for its handler, which for SIGSEGV is none: Lightning does at
// the end of fit(). Then ours is the first again.

class FaultReader {
 public:
  virtual ~FaultReader() = default;
  // Makes the address readable, or writable, and returns true, if it is one of its own.
  virtual bool access_at(const void* address, bool is_write) = 0;
};

// Puts the handler on top, if there is a reader, and this thread is not inside of it. Any thread may call it.
void keep_fault_handler();

// Any thread may call these, also twice, but not inside the handler. A reader must not be destroyed before it is
// removed; while a thread is in a fault of its it is not.
void add_fault_reader(FaultReader* reader);
void remove_fault_reader(FaultReader* reader);

}  // namespace zx
