// The runtime of the SIMT emulator, one translation unit, compiled without instrumentation: state and fibers, schedules,
// the shadow of memory, collectives, copies, sanitizer hooks; and here the launch itself.
#include <signal.h>
#include <ucontext.h>
#include <unistd.h>

#include "collectives.h"
#include "copies.h"
#include "hooks.h"

namespace simt {
typedef void (*Kernel)(void** arguments);
static Kernel kernel;
static void** kernel_arguments;

static void fiber_main() {
  kernel(kernel_arguments);
  deliver_first(*current, current->copies);
  leave_block();
  run(current, pick());
  __builtin_unreachable();
}

// ---- crashes become failures: guard pages, wild pointers, stack overflow, division by zero -------------------------------
static const void* address_after(const void* context) {  // of the instruction that failed, as a return address would be
#if defined(__linux__) && defined(__x86_64__)
  return (const char*)((const ucontext_t*)context)->uc_mcontext.gregs[REG_RIP] + 1;
#elif defined(__linux__) && defined(__aarch64__)
  return (const char*)((const ucontext_t*)context)->uc_mcontext.pc + 1;
#else
  (void)context;
  return nullptr;
#endif
}
static void on_signal(int number, siginfo_t* info, void* context) {
  if (!current) {  // not in a kernel: let it happen again, for whoever handled it before
    signal(number, SIG_DFL);
    return;
  }
  sigset_t mask;
  sigemptyset(&mask);
  sigaddset(&mask, number);
  sigprocmask(SIG_UNBLOCK, &mask, nullptr);  // the handler is left by a switch and never returns
  const uintptr_t p = (uintptr_t)info->si_addr;
  const Place place = {address_after(context), nullptr, 0};
  if (number == SIGFPE) fail("overflow", place, "", "integer division by zero");
  if (p - (uintptr_t)stacks < stack_bytes * MAX_THREADS) 
    fail("stack overflow", place, "", "more than 64 KiB of local variables in one thread");
  blame("out of bounds", place, p, "access out of bounds,");
}
struct Signals {
  static constexpr int NUMBERS[3] = {SIGSEGV, SIGBUS, SIGFPE};
  struct sigaction before[3];
  stack_t stack_before;
  Signals() {
    static char stack[64 * 1024];
    stack_t own = {};
    own.ss_sp = stack;
    own.ss_size = sizeof stack;
    sigaltstack(&own, &stack_before);
    struct sigaction action = {};
    action.sa_sigaction = on_signal;
    action.sa_flags = SA_SIGINFO | SA_ONSTACK;
    for (int i = 0; i < 3; i++) sigaction(NUMBERS[i], &action, &before[i]);
  }
  ~Signals() {
    for (int i = 0; i < 3; i++) sigaction(NUMBERS[i], &before[i], nullptr);
    sigaltstack(&stack_before, nullptr);
  }
};
constexpr int Signals::NUMBERS[3];

// ---- one block ----------------------------------------------------------------------------------------------------------
static void start_thread(uint32_t i) {
  Thread& t = threads[i];
  const uint32_t x = launch.block[0], y = launch.block[1];
  t.index = {i % x, i / x % y, i / x / y};
  t.linear = i;
  t.lane = i % WARP;
  t.warp = i / WARP;
  t.clock = 1;
  t.seen_by_all = 0;
  t.copies = t.groups = 0;
  memset(t.seen, 0, sizeof t.seen);
  warps[t.warp].live |= 1u << t.lane;
  char* low = stacks + i * stack_bytes;
  // Staggered tops: stacks at equal offsets share a cache set.
  t.stack = new_stack(low + sysconf(_SC_PAGESIZE), low + stack_bytes - 64 - i % 63 * 128, fiber_main);
}

__attribute__((format(printf, 3, 4)))
static void record(const char* kind, Place place, const char* format, ...) {
  va_list values;
  va_start(values, format);
  record_failure(kind, place, "", format, values);
  va_end(values);
}

// Which threads wait where, when none of them can go on: one clause for each run of threads that wait in one place.
static void record_deadlock() {
  char text[sizeof failure.what] = "";
  size_t length = 0;
  Thread* blamed = nullptr;  // one that waits in a collective, if any: the barrier is rarely at fault then
  for (uint32_t i = 0, next; i < num_threads; i = next) {
    Thread& first = threads[i];
    auto waits_there = [&](const Thread& t) {
      return t.state == first.state && (t.state == DONE || (t.waits_in == first.waits_in && t.line == first.line));
    };
    for (next = i + 1; next < num_threads && waits_there(threads[next]);) next++;
    if (first.state == DONE) continue;
    if (!blamed || (first.state == IN_COLLECTIVE && blamed->state != IN_COLLECTIVE)) blamed = &first;
    if (length < sizeof text)
      length += (size_t)snprintf(text + length, sizeof text - length, "%s %u from thread %u on in %s at line %d",
                                 length ? "," : "", next - i, i, first.waits_in, first.line);
  }
  current = blamed;
  record(blamed->state == IN_COLLECTIVE ? "warp mask" : "divergent barrier", {nullptr, blamed->file, blamed->line},
         "threads wait for each other for ever:%s", text);
}

static void run_block(uint64_t index) {
  const uint64_t x = launch.grid[0], y = launch.grid[1];
  simt_here.block = {(uint32_t)(index % x), (uint32_t)(index / x % y), (uint32_t)(index / x / y)};
  block_first_epoch = ++epoch;
  waiting = 0;
  live_threads = num_threads;
  ready_warps = 0;
  memset(ready_lanes, 0, sizeof ready_lanes);
  for (uint32_t w = 0; w < num_warps(); w++) warps[w].live = warps[w].pending = 0;
  order_warps();
  fresh_shared_memory();
  simt_here.dynamic_shared = launch.dynamic_bytes ? simt_shared(&simt_here, launch.dynamic_bytes, 128, "dynamic") : nullptr;
  for (uint32_t i = 0; i < num_threads; i++) start_thread(i);
  for (uint32_t i = 0; i < num_threads; i++) make_ready(threads[i].warp, 1u << threads[i].lane);
  run(nullptr, pick());
  if (!failed && live_threads) record_deadlock();
  current = nullptr;
}

// The i-th block to run: a random schedule walks the grid by a stride without common divisor.
struct BlockOrder {
  uint64_t count, stride = 1, first = 0;
  explicit BlockOrder(uint64_t blocks) : count(blocks) {
    if (launch.schedule <= REVERSE || count < 3) return;
    first = random_bits() % count;
    do stride = 1 + random_bits() % (count - 1);
    while (divisor(stride, count) != 1);
  }
  static uint64_t divisor(uint64_t a, uint64_t b) { return b ? divisor(b, a % b) : a; }
  uint64_t operator[](uint64_t i) const { return launch.schedule == REVERSE ? count - 1 - i : (first + i * stride) % count; }
};

// Shared memory between two stretches that nobody may touch: an index that runs away in the fast mode, where nothing is
// checked, must not reach the program's own memory.
static char* reserve_shared(size_t page) {
  const size_t room = (SHARED_ROOM + page - 1) / page * page;
  char* const memory = reserve<char>(room + 2 * SHARED_GUARD);
  if (!memory) return nullptr;
  const int wrong = mprotect(memory, SHARED_GUARD, PROT_NONE) | mprotect(memory + SHARED_GUARD + room, SHARED_GUARD, PROT_NONE);
  return wrong ? nullptr : memory + SHARED_GUARD;
}
static bool prepare() {
  if (stacks) return true;
  const size_t page = (size_t)sysconf(_SC_PAGESIZE);
  stack_bytes = 64 * 1024 + page;
  shared_memory = reserve_shared(page);
  shared_written = reserve<uint8_t>(SHARED_ROOM);
  shared_cells = reserve<Cell>(SHARED_ROOM);
  char* memory = reserve<char>(MAX_THREADS * stack_bytes);
  if (!shared_memory || !shared_written || !shared_cells || !memory) return false;
  for (size_t i = 0; i < MAX_THREADS; i++) mprotect(memory + i * stack_bytes, page, PROT_NONE);
  stacks = memory;
  return true;
}
// Cells need no clearing: the epochs of earlier launches are stale by themselves.
static bool prepare_cells(size_t wanted) {
  constexpr size_t KEEP = (size_t)1 << 24;  // give large ones back to the system
  if (wanted > num_cells) {
    if (cells) munmap(cells, num_cells * sizeof(Cell));
    cells = reserve<Cell>(wanted);
    num_cells = cells ? wanted : 0;
  } else if (num_cells > KEEP) {
    madvise(cells, num_cells * sizeof(Cell), MADV_DONTNEED);
  }
  return wanted <= num_cells;
}
}  // namespace simt

// Runs a grid. Returns 0, or 1 with `*failure_out` filled. `image` is the kernel library's [begin, end).
SIMT_EXPORTED int simt_launch(void (*kernel)(void**), void** arguments, const simt::Launch* launch, const simt::Range* ranges,
                              int num_ranges, uint64_t num_cells, const void* const* image, simt::Failure* failure_out) {
  using namespace simt;
  simt::kernel = kernel;
  kernel_arguments = arguments;
  simt::launch = *launch;
  simt::ranges = ranges;
  simt::num_ranges = num_ranges;
  last_range = 0;
  image_begin = (const char*)image[0];
  image_end = (const char*)image[1];
  failed = false;
  if (!prepare() || !prepare_cells(num_cells)) record("memory", {}, "no address space for the emulator's shadow memory");
  num_threads = launch->block[0] * launch->block[1] * launch->block[2];
  simt_here.block_dim = {launch->block[0], launch->block[1], launch->block[2]};
  simt_here.grid_dim = {launch->grid[0], launch->grid[1], launch->grid[2]};
  random_state = 0x9e3779b97f4a7c15ull * (launch->seed + 1ull) | 1;
  for (int i = 0; i < 4; i++) random_bits();
  launch_first_epoch = epoch + 1;
  const BlockOrder order((uint64_t)launch->grid[0] * launch->grid[1] * launch->grid[2]);
  {
    Signals caught;
    for (uint64_t i = 0; i < order.count && !failed; i++) run_block(order[i]);
  }
  if (failed) memcpy(failure_out, &failure, sizeof failure);
  return failed;
}
