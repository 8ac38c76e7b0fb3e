#include "reports.h"

#include <cstdio>
#include <cstdlib>
#include <mutex>

namespace rlk::hip::isa {

std::string setting(const char* name, const char* otherwise) {
  const char* value = std::getenv(name);
  return value ? value : otherwise;
}

void write_report(Severity severity, const Wave* w, const Instruction* i, const std::string& what, u64 detail) {
  static std::mutex mutex;
  static auto& counts = *new std::map<std::string, u64>;
  const std::lock_guard lock(mutex);
  const std::string arch = w ? w->block->code->arch : setting("RLK_STANDIN_ARCH", "gfx942");
  const std::string key = (severity == Severity::kFault ? "FAULT " : "note ") + what + " | " +
                          (w ? w->block->kernel->name : "-") + " | " + (i ? i->text : "-") + " | " + arch;
  if (counts[key]++) return;
  const std::string path = setting("RLK_ISA_LOG", "");
  FILE* file = path.empty() ? stderr : std::fopen(path.c_str(), "a");
  if (!file) stop("cannot write " + path);
  std::fprintf(file, "%s at %llx | %llu\n", key.c_str(), static_cast<unsigned long long>(i ? i->address : 0),
               static_cast<unsigned long long>(detail));
  if (file != stderr) std::fclose(file);
}

bool said_before(const Instruction& i, const char* what) {
  static auto& said = *new std::unordered_map<const Instruction*, std::vector<const char*>>;
  static const Instruction* last = nullptr;
  static std::vector<const char*>* of_last = nullptr;
  if (&i != last) {
    of_last = &said[&i];
    last = &i;
  }
  for (const char* known : *of_last) {
    if (known == what) return true;
  }
  of_last->push_back(what);
  return false;
}

void stop(const std::string& why) {
  std::fprintf(stderr, "hip isa: %s\n", why.c_str());
  std::abort();
}

}  // namespace rlk::hip::isa
