#include "races.h"

#include <algorithm>

#include "reports.h"

namespace rlk::hip::isa {
namespace {

constexpr int kPage = 4096;
struct Shadow {  // for each byte of a page: the last writer and the last two readers
  u64 writer[kPage], reader[kPage], reader_before[kPage];
};
auto& shadows = *new std::unordered_map<u64, std::unique_ptr<Shadow>>;
auto& spare = *new std::vector<std::unique_ptr<Shadow>>;
u64 last_page = ~0ull;
Shadow* last_shadow = nullptr;

Shadow& shadow_of(u64 page) {
  if (page == last_page) return *last_shadow;
  auto& shadow = shadows[page];
  if (!shadow) {
    if (spare.empty()) {
      shadow = std::make_unique<Shadow>();
    } else {
      shadow = std::move(spare.back());
      spare.pop_back();
      *shadow = Shadow{};
    }
  }
  last_page = page;
  last_shadow = shadow.get();
  return *shadow;
}

}  // namespace

bool watches_races() {
  static const bool watches = setting("RLK_ISA_RACES", "1") == "1";
  return watches;
}

void forget_accesses() {
  for (auto& [page, shadow] : shadows) {
    if (spare.size() < kPage) spare.push_back(std::move(shadow));
  }
  shadows.clear();
  last_page = ~0ull;
}

void note_global(Wave& w, const Instruction& i, u64 address, int n, Access access, const u8* value) {
  if (!watches_races()) return;
  const u64 me = accessor(w, access == Access::kAtomic);
  for (int k = 0; k < n; ++k) {
    Shadow& shadow = shadow_of((address + k) / kPage);
    const int at = int((address + k) % kPage);
    if (access == Access::kStore || access == Access::kAtomic) {
      const bool same = value && *reinterpret_cast<const u8*>(address + k) == value[k];
      if (races(shadow.writer[at], me)) {
        same ? note(w, i, "two waves store one value", address + k)
             : fault(w, i, "GLOBAL RACE write-write", address + k);
      }
      if (races(shadow.reader[at], me) || races(shadow.reader_before[at], me)) {
        same ? note(w, i, "a wave stores what is there and another reads it", address + k)
             : fault(w, i, "GLOBAL RACE read-write", address + k);
      }
      shadow.writer[at] = me;
    } else {
      if (races(shadow.writer[at], me)) fault(w, i, "GLOBAL RACE write-read", address + k);
      if (access == Access::kScalarLoad && shadow.writer[at]) {
        // The scalar cache might still hold the value from before the write.
        fault(w, i, "SCALAR LOAD of what this launch wrote", address + k);
      }
      if (shadow.reader[at] != me) {
        shadow.reader_before[at] = shadow.reader[at];
        shadow.reader[at] = me;
      }
    }
  }
}

void check_lanes(Wave& w, const Instruction& i, const Stores& stores, int n) {
  if (!watches_races()) return;
  std::array<std::pair<u64, int>, kLanes> sorted;
  int count = 0;
  for (int l = 0; l < kLanes; ++l) {
    if (stores.on[l]) sorted[count++] = {stores.address[l], l};
  }
  std::sort(sorted.begin(), sorted.begin() + count);
  for (int k = 1; k < count; ++k) {
    const auto [before, a] = sorted[k - 1];
    const auto [at, b] = sorted[k];
    if (at >= before + n) continue;
    const bool same = at == before && std::memcmp(stores.value[a].data(), stores.value[b].data(), n) == 0;
    same ? note(w, i, "lanes store one value", at) : fault(w, i, "LANES OF ONE STORE MEET", at);
  }
}

}  // namespace rlk::hip::isa
