#pragma once

#include <memory>
#include <optional>

#include "bindings/bindings.h"
#include "workers/process.h"

namespace zx {

// Workers and gloo's threads may need the GIL to free a tensor that Python has seen. So no thread may hold it while it
// waits for them, as destructors do. A forked child leaks the object: see Note [Forks]. So does the end of the
// interpreter, unless `also_at_exit`.
template <class T>
std::shared_ptr<T> destroyed_without_gil(T* made, bool also_at_exit = true) {
  return {made, [also_at_exit, owner = Process()](T* object) {
            const bool is_exit = Py_IsInitialized() == 0;
            if (!owner.is_this() || (is_exit && !also_at_exit)) return;
            std::optional<py::gil_scoped_release> release;
            if (PyGILState_Check() != 0) release.emplace();
            delete object;
          }};
}

}  // namespace zx
