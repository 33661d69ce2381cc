#pragma once

#include <memory>
#include <optional>

#include "bindings/bindings.h"
#include "workers/process.h"

namespace zx {

// Workers and gloo's threads may need the GIL to free a tensor that Python has seen. So no thread may hold it while it
// waits for them, as destructors do. A forked child leaks the object: see Note [Forks].
template <class T>
std::shared_ptr<T> destroyed_without_gil(T* made) {
  return {made, [owner = Process()](T* object) {
            if (!owner.is_this()) return;
            std::optional<py::gil_scoped_release> release;
            if (PyGILState_Check() != 0) release.emplace();
            delete object;
          }};
}

}  // namespace zx
