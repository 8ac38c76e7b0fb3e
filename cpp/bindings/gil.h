// Lets other Python threads run during a kernel.
#pragma once

#include <Python.h>
#include <unistd.h>

namespace rlk::bindings {

// Releases the GIL for its scope: a launch may wait for a full queue, whose callbacks may need the interpreter.
//
// A daemon thread that returns while the interpreter ends gets no GIL. Before Python 3.14, PyEval_RestoreThread then
// ends the thread by unwinding its stack. A noexcept frame, such as nanobind's calls, forbids this and ends the whole
// process with SIGABRT. Here the thread sleeps instead, as in Python 3.14, until the process ends.
class ReleasedGil {
 public:
  ReleasedGil() : state_(PyEval_SaveThread()) {}
  ~ReleasedGil() {
    try {
      PyEval_RestoreThread(state_);
    } catch (...) {  // unwinding by pthread_exit, which a return must not interrupt
      for (;;) pause();
    }
  }
  ReleasedGil(const ReleasedGil&) = delete;
  ReleasedGil& operator=(const ReleasedGil&) = delete;

 private:
  PyThreadState* state_;
};

}  // namespace rlk::bindings
