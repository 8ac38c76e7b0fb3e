// Reports of a run. Each kind of event is reported once per kernel and instruction, as a line in the file RLK_ISA_LOG.
// A fault is a mistake of a kernel or of its launch. A note reports an event that is possible in a correct kernel, such
// as lanes that store the same value at one address.
#pragma once

#include <string>

#include "machine.h"

namespace rlk::hip::isa {

std::string setting(const char* name, const char* otherwise);

enum class Severity { kFault, kNote };
void write_report(Severity severity, const Wave* w, const Instruction* i, const std::string& what, u64 detail);
// returns true if the report was written before, so that its text need not be built again
bool said_before(const Instruction& i, const char* what);

inline void fault(const Wave& w, const Instruction& i, const char* what, u64 detail = 0) {
  if (!said_before(i, what)) write_report(Severity::kFault, &w, &i, what, detail);
}
inline void note(const Wave& w, const Instruction& i, const char* what, u64 detail = 0) {
  if (!said_before(i, what)) write_report(Severity::kNote, &w, &i, what, detail);
}
[[noreturn]] void stop(const std::string& why);  // for limits of the emulator itself: prints `why` and aborts the
                                                 // process

}  // namespace rlk::hip::isa
