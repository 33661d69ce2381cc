// What a forked child says before it ends.
#pragma once

#include <sys/wait.h>
#include <unistd.h>

#include <string>

namespace zx::testing {

struct Ended {
  std::string said;  // on stderr
  int status = 0;    // as of waitpid(2)
};

// `body` runs in the child, which ends after it.
template <class Body>
Ended end_of(const Body& body) {
  int pipe_ends[2];
  if (pipe(pipe_ends) != 0) return {"no pipe"};
  const pid_t child = fork();
  if (child == 0) {
    dup2(pipe_ends[1], STDERR_FILENO);
    body();
    _exit(0);
  }
  close(pipe_ends[1]);
  Ended ended;
  char part[256];
  for (ssize_t count = 0; (count = read(pipe_ends[0], part, sizeof(part))) > 0;) {
    ended.said.append(part, static_cast<size_t>(count));
  }
  close(pipe_ends[0]);
  waitpid(child, &ended.status, 0);
  return ended;
}

}  // namespace zx::testing
