#include "launch.h"

#include <execinfo.h>
#include <immintrin.h>
#include <setjmp.h>
#include <signal.h>
#include <sys/mman.h>

#include <algorithm>
#include <atomic>
#include <cstdio>
#include <cstdlib>
#include <random>

#include "races.h"
#include "reports.h"

namespace rlk::hip::isa {
namespace {

constexpr u64 kPage = 4096;

// The running instruction, for the handler of faults and for reports.
const Instruction* running = nullptr;
Wave* running_wave = nullptr;
sigjmp_buf escape;
thread_local bool in_launch = false;
u64 fault_address = 0;

auto& device_memory = *new std::map<u64, u64>;
bool closed = false;

void open_device_memory(bool open) {
  for (const auto& [address, bytes] : device_memory) {
    mprotect(reinterpret_cast<void*>(address), bytes, open ? PROT_READ | PROT_WRITE : PROT_NONE);
  }
}

// Returns the functions that a signal interrupted, innermost first, if their names are exported.
std::string caller() {
  void* frames[24];
  const int count = backtrace(frames, 24);
  char** names = backtrace_symbols(frames, count);
  std::string all;
  // frames 0 to 2 are caller(), on_fault() and the trampoline of the signal
  for (int k = 3; k < std::min(count, 10); ++k) {
    const std::string name = names[k];
    all += (all.empty() ? "" : " < ") + name.substr(name.rfind('/') + 1, name.rfind(' ') - name.rfind('/') - 1);
  }
  std::free(names);
  return all;
}

void on_fault(int signal_number, siginfo_t* info, void*) {
  const u64 at = reinterpret_cast<u64>(info->si_addr);
  if (in_launch) {
    in_launch = false;
    fault_address = at;
    siglongjmp(escape, 1);
  }
  if (closed) {
    const auto after = device_memory.upper_bound(at);
    if (after != device_memory.begin()) {
      const auto [address, bytes] = *std::prev(after);
      if (at < address + bytes) {  // opens these pages, so the fault is reported once and the host goes on
        write_report(Severity::kFault, nullptr, nullptr, "THE HOST TOUCHES DEVICE MEMORY in " + caller(), at);
        mprotect(reinterpret_cast<void*>(address), bytes, PROT_READ | PROT_WRITE);
        return;
      }
    }
  }
  signal(signal_number, SIG_DFL);
  raise(signal_number);
}

void install_handler() {
  static const bool installed = [] {
    struct sigaction action {};
    action.sa_sigaction = on_fault;
    action.sa_flags = SA_SIGINFO | SA_NODEFER;
    sigaction(SIGSEGV, &action, nullptr);
    sigaction(SIGBUS, &action, nullptr);
    return true;
  }();
  (void)installed;
}

u32 poison() {
  static const u32 x = u32(std::strtoul(setting("RLK_ISA_POISON", "7fdeadbe").c_str(), nullptr, 16));
  return x;
}
u64 most_instructions() {
  static const u64 x = std::strtoull(setting("RLK_ISA_LIMIT", "400000000").c_str(), nullptr, 10);
  return x;
}
std::mt19937& generator() {
  static auto& rng = *new std::mt19937(u32(std::strtoul(setting("RLK_ISA_SEED", "12345").c_str(), nullptr, 10)));
  return rng;
}

// Counts of each kernel's launches and of its instructions that ran. The counts are appended to the file RLK_ISA_STATS
// at the end of the process.
struct Statistics {
  u64 launches = 0, blocks = 0, waves = 0, instructions = 0;
  Code* code = nullptr;
};
auto& statistics = *new std::map<std::string, Statistics>;
auto& executed = *new std::map<Code*, std::vector<u8>>;

void write_statistics() {
  const std::string path = setting("RLK_ISA_STATS", "");
  FILE* file = path.empty() ? nullptr : std::fopen(path.c_str(), "a");
  if (!file) return;
  for (const auto& [name, s] : statistics) {
    const Kernel& kernel = s.code->kernels.at(name.substr(name.find(' ') + 1));
    const std::vector<u8>& hit = executed[s.code];
    u64 all = 0, covered = 0;
    std::string missed;
    for (u64 at = kernel.entry; at < kernel.entry + kernel.size_bytes;) {
      const auto found = s.code->at.find(at);
      if (found == s.code->at.end()) break;
      const Instruction& i = s.code->instructions[found->second];
      at += i.size_bytes;
      if (i.name == "s_nop" || i.name == "s_code_end") continue;
      ++all;
      covered += hit[found->second];
      if (!hit[found->second]) missed += "  not run: " + i.text + "\n";
    }
    std::fprintf(file, "%s launches %lu blocks %lu waves %lu instructions %lu covered %lu of %lu\n", name.c_str(),
                 s.launches, s.blocks, s.waves, s.instructions, covered, all);
    if (!setting("RLK_ISA_UNCOVERED", "").empty()) std::fputs(missed.c_str(), file);
  }
  std::fclose(file);
}

// The arguments of the kernel and the launch packet in memory. The page after the arguments is not accessible, so that
// reads beyond them fault.
struct Inputs {
  u8* memory = nullptr;
  u64 bytes = 0;
  u8* arguments = nullptr;
  alignas(16) u8 packet[64] = {};

  Inputs(const Kernel& kernel, const Grid& grid, void** from) {
    const u64 need = std::max<u64>(16, (kernel.argument_bytes + 15) & ~15ull),
              pages = (need + kPage - 1) & ~(kPage - 1);
    bytes = pages + kPage;
    void* mapped = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (mapped == MAP_FAILED) stop("no memory for arguments");
    memory = static_cast<u8*>(mapped);
    mprotect(memory + pages, kPage, PROT_NONE);
    arguments = memory + pages - need;
    std::memset(memory, 0xee, pages);
    const u16 threads[3] = {u16(grid.threads), 1, 1};
    const u32 whole[3] = {grid.x * grid.threads, grid.y, 1};
    std::memcpy(packet + 4, threads, sizeof(threads));
    std::memcpy(packet + 12, whole, sizeof(whole));
    std::size_t k = 0;
    for (const Kernel::Argument& a : kernel.arguments) {
      if (!starts(a.kind, "hidden_")) {
        std::memcpy(arguments + a.offset, from[k++], a.size);
        continue;
      }
      write_report(Severity::kNote, nullptr, nullptr, "the kernel takes " + a.kind + " | " + kernel.name, 0);
      const std::map<std::string, u64> hidden = {
          {"hidden_block_count_x", grid.x}, {"hidden_block_count_y", grid.y},
          {"hidden_block_count_z", 1},      {"hidden_group_size_x", grid.threads},
          {"hidden_group_size_y", 1},       {"hidden_group_size_z", 1},
          {"hidden_grid_dims", 1},          {"hidden_dynamic_lds_size", grid.lds_bytes}};
      const auto known = hidden.find(a.kind);
      const u64 value = known == hidden.end() ? 0 : known->second;
      std::memcpy(arguments + a.offset, &value, std::min<u64>(sizeof(value), a.size));
    }
  }
  ~Inputs() { munmap(memory, bytes); }
  Inputs(const Inputs&) = delete;
  Inputs& operator=(const Inputs&) = delete;
};

// Sets the registers that the kernel's descriptor requests, and fills all others with the poison value.
void begin_wave(Wave& w, Block& block, int number, const Grid& grid, const Inputs& inputs) {
  const Kernel& kernel = *block.kernel;
  const u32 split = kernel.first_accumulator(), all = kernel.num_vgprs();
  for (u32 r = 0; r < std::min(u32(kFirstAccumulator), split); ++r) std::fill_n(w.v[r], kLanes, poison());
  for (u32 r = 0; r + split < all; ++r) std::fill_n(w.v[kFirstAccumulator + r], kLanes, poison());
  std::fill(std::begin(w.s), std::end(w.s), poison());
  w.scc = poison() & 1;
  w.done = w.waiting = false;
  w.number = number;
  w.epoch = 0;
  w.block = &block;
  w.num_instructions = 0;
  w.pc = block.code->at.at(kernel.entry);

  int s = 0;
  const auto pair = [&](bool wanted, u64 x) {
    if (!wanted) return;
    w.set_pair(s, x);
    s += 2;
  };
  if (kernel.properties & 1) s += 4;  // scratch
  pair(kernel.properties & 2, reinterpret_cast<u64>(inputs.packet));
  pair(kernel.properties & 4, 0);
  pair(kernel.properties & 8, reinterpret_cast<u64>(inputs.arguments));
  pair(kernel.properties & 16, 0);
  pair(kernel.properties & 32, 0);
  if (kernel.properties & 64) w.s[s++] = 0;
  if (const int n = kernel.preload & 127) {
    std::memcpy(&w.s[s], inputs.arguments + 4 * (kernel.preload >> 7), 4 * n);
    s += n;
  }
  if (s != int(kernel.rsrc2 >> 1 & 31)) stop(kernel.name + ": user registers differ from the descriptor's");
  if (kernel.rsrc2 >> 7 & 1) w.s[s++] = block.number % grid.x;
  if (kernel.rsrc2 >> 8 & 1) w.s[s++] = block.number / grid.x;
  if (kernel.rsrc2 >> 9 & 1) w.s[s++] = 0;
  if (kernel.rsrc2 >> 10 & 1) w.s[s++] = 0;
  u64 exec = 0;
  for (int l = 0; l < kLanes; ++l) {
    const u32 thread = u32(number * kLanes + l);
    w.v[0][l] = thread;
    exec |= u64(thread < grid.threads) << l;
  }
  w.set_exec(exec);
}

// Runs a wave until it ends, waits at a barrier, or has run `most` instructions in this call. Returns false if the wave
// has run RLK_ISA_LIMIT instructions in total.
bool run_wave(Wave& w, u64 most, std::vector<u8>& hit) {
  const Instruction* instructions = w.block->code->instructions.data();
  running_wave = &w;
  while (!w.done && !w.waiting && most--) {
    const int at = w.pc++;
    running = &instructions[at];
    std::atomic_signal_fence(std::memory_order_seq_cst);  // the fault handler reads `running`
    hit[at] = 1;
    ++w.num_instructions;
    running->function(w, *running);
  }
  return w.num_instructions < most_instructions();
}

using Waves = std::vector<std::unique_ptr<Wave>>;

// Called when every wave waits or has ended. Lets the waiting waves continue, and returns whether any wave waited.
bool pass_barrier(Waves& waves, int count) {
  const Wave* first = nullptr;
  bool ended = false;
  for (int k = 0; k < count; ++k) ended |= waves[k]->done;
  for (int k = 0; k < count; ++k) {
    Wave& w = *waves[k];
    if (!w.waiting) continue;
    const Instruction& barrier = w.block->code->instructions[w.pc - 1];
    if (ended) fault(w, barrier, "BARRIER after a wave has ended");
    if (first && first->pc != w.pc) fault(w, barrier, "WAVES MEET at different barriers");
    first = &w;
    w.waiting = false;
    ++w.epoch;
  }
  return first;
}

bool run_block(Waves& waves, int count, const std::string& order, std::vector<u8>& hit) {
  std::vector<Wave*> ready;
  for (;;) {
    ready.clear();
    for (int k = 0; k < count; ++k) {
      if (!waves[k]->done && !waves[k]->waiting) ready.push_back(waves[k].get());
    }
    if (ready.empty()) {
      if (!pass_barrier(waves, count)) return true;
    } else if (order == "shuffled") {
      if (!run_wave(*ready[generator()() % ready.size()], 1 + generator()() % 50, hit)) return false;
    } else {
      if (order == "backward") std::reverse(ready.begin(), ready.end());
      for (Wave* w : ready) {
        if (!run_wave(*w, ~0ull, hit)) return false;
      }
    }
  }
}

void clear_lds(Block& block, u64 bytes) {
  block.lds.resize(bytes);
  for (u64 k = 0; k < bytes; ++k) block.lds[k] = u8(poison() >> (8 * (k % 4)));
  block.written.assign(bytes, 0);
  block.lds_writer.assign(bytes, 0);
  block.lds_reader.assign(bytes, 0);
}

}  // namespace

void register_device_memory(u64 address, u64 bytes) {
  install_handler();
  device_memory[address] = bytes;
}
void forget_device_memory(u64 address) { device_memory.erase(address); }
void close_device_memory(bool close) {
  closed = close;
  open_device_memory(!close);
}

bool run_launch(Code& code, const Kernel& kernel, const Grid& grid, void** arguments) {
  install_handler();
  static const int at_exit = std::atexit(write_statistics);
  (void)at_exit;
  const std::string order = setting("RLK_STANDIN_ORDER", "forward");
  const int count = int((grid.threads + kLanes - 1) / kLanes);
  static auto& waves = *new Waves;
  while (int(waves.size()) < count) waves.push_back(std::make_unique<Wave>());
  std::vector<u8>& hit = executed[&code];
  hit.resize(code.instructions.size());
  Statistics& s = statistics[code.arch + " " + kernel.name];
  s.code = &code;
  ++s.launches;
  forget_accesses();

  std::vector<u32> numbers(u64(grid.x) * grid.y);
  for (u32 k = 0; k < numbers.size(); ++k) numbers[k] = k;
  if (order == "backward") std::reverse(numbers.begin(), numbers.end());
  if (order == "shuffled") std::shuffle(numbers.begin(), numbers.end(), generator());

  const Inputs inputs(kernel, grid, arguments);
  Block block{&code, &kernel, 0, {}, {}, {}, {}};
  volatile bool good = true;  // volatile, because it is read after siglongjmp
  const unsigned mode = _mm_getcsr();
  constexpr unsigned kNearestWithDenormals = 0x1f80;
  _mm_setcsr(kNearestWithDenormals);
  if (closed) open_device_memory(true);
  running = nullptr;
  if (sigsetjmp(escape, 1)) {
    write_report(Severity::kFault, running_wave, running, "MEMORY FAULT", fault_address);
    good = false;
  } else {
    in_launch = true;
    for (const u32 number : numbers) {
      block.number = number;
      clear_lds(block, kernel.lds_bytes + grid.lds_bytes);
      for (int k = 0; k < count; ++k) begin_wave(*waves[k], block, k, grid, inputs);
      good = run_block(waves, count, order, hit);
      ++s.blocks;
      s.waves += count;
      for (int k = 0; k < count; ++k) s.instructions += waves[k]->num_instructions;
      if (good) continue;
      write_report(Severity::kFault, running_wave, running, "TOO MANY INSTRUCTIONS", most_instructions());
      break;
    }
  }
  in_launch = false;
  if (closed) open_device_memory(false);
  _mm_setcsr(mode);
  return good;
}

}  // namespace rlk::hip::isa
