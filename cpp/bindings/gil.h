// Letting other Python threads run while a kernel does.
#pragma once

#include <Python.h>
#include <unistd.h>

namespace rlk::bindings {

// Releases the GIL for its scope: a launch may wait for a full queue, whose callbacks may need the interpreter.
//
// A daemon thread that comes back while the interpreter ends gets no GIL: before Python 3.14 PyEval_RestoreThread ends the
// thread by unwinding its stack, and a frame that forbids that (nanobind's calls are noexcept) ends the whole process with
// SIGABRT. The thread sleeps instead, as Python 3.14 lets it, and goes with the process.
class ReleasedGil {
 public:
  ReleasedGil() : state_(PyEval_SaveThread()) {}
  ~ReleasedGil() {
    try {
      PyEval_RestoreThread(state_);
    } catch (...) {  // pthread_exit's unwinding, which must not be left by returning
      for (;;) pause();
    }
  }
  ReleasedGil(const ReleasedGil&) = delete;
  ReleasedGil& operator=(const ReleasedGil&) = delete;

 private:
  PyThreadState* state_;
};

}  // namespace rlk::bindings
