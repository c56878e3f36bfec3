/// Runs kernels. The threads of a block are fibers of one thread of the operating system; a fiber runs until
/// it has to wait for others, and a thread that ends hands its stack to the next, so that a kernel without
/// barriers switches stacks once.
#include "machine.hpp"

#include <algorithm>
#include <atomic>
#include <memory>

#include <sys/mman.h>
#if !defined(__x86_64__)
#include <ucontext.h>
#endif

__thread cuda_emulation::dimensions blockDim, gridDim;

namespace cuda_emulation {

__thread context* running = nullptr;

// ---- switching stacks

#if defined(__x86_64__)
extern "C" void tessera_emulation_switch(void** save, void* load);
asm(R"(
.text
.type tessera_emulation_switch, @function
tessera_emulation_switch:
  pushq %rbp
  pushq %rbx
  pushq %r12
  pushq %r13
  pushq %r14
  pushq %r15
  movq %rsp, (%rdi)
  movq %rsi, %rsp
  popq %r15
  popq %r14
  popq %r13
  popq %r12
  popq %rbx
  popq %rbp
  ret
.size tessera_emulation_switch, .-tessera_emulation_switch
)");

static void* prepare_stack(char* stack, void (*entry)()) {
  auto** top = reinterpret_cast<void**>(stack + stack_bytes);
  *--top = nullptr; // where entry would return to
  *--top = reinterpret_cast<void*>(entry);
  for (int i = 0; i < 6; ++i) *--top = nullptr;
  return top;
}
#else
// One ucontext a stack, at its lower end.
static void tessera_emulation_switch(void** save, void* load) {
  static thread_local ucontext_t of_the_caller;
  auto* const from = *save == nullptr ? &of_the_caller : static_cast<ucontext_t*>(*save);
  *save = from;
  swapcontext(from, static_cast<ucontext_t*>(load));
}
static void* prepare_stack(char* stack, void (*entry)()) {
  auto* const made = new (stack) ucontext_t;
  getcontext(made);
  made->uc_stack.ss_sp = stack + sizeof(ucontext_t);
  made->uc_stack.ss_size = stack_bytes - sizeof(ucontext_t);
  made->uc_link = nullptr;
  makecontext(made, entry, 0);
  return made;
}
#endif

static void* map(std::size_t bytes) {
  auto* const memory =
      mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (memory == MAP_FAILED) {
    std::fprintf(stderr, "cuda_emulation: no %zu bytes of memory\n", bytes);
    std::abort();
  }
  return memory;
}

inline constexpr std::size_t guard_bytes = 4096;

static char* take_stack(context& c) {
  if (c.free_count == 0) {
    // A page without access below each stack ends a program that overflows it.
    auto* const memory = static_cast<char*>(map(stack_bytes + guard_bytes));
    mprotect(memory, guard_bytes, PROT_NONE);
    return c.stacks[c.stack_count++] = memory + guard_bytes;
  }
  return c.free_stacks[--c.free_count];
}

// ---- choosing the next thread

static void set_current(context& c, int thread) {
  c.current = thread;
  c.state = c.states + thread;
  c.warp = c.warps + (thread >> 5);
}

static void set_ready(context& c, int warp, unsigned lanes) {
  c.warps[warp].ready |= lanes;
  if (lanes != 0) c.ready_warps |= 1u << warp;
}

/// A thread that can go on, rather in the warp that has just run; -1: there is none.
static int take_ready(context& c) {
  if (c.ready_warps == 0) return -1;
  auto warp = c.current >> 5;
  if ((c.ready_warps >> warp & 1u) == 0) warp = std::countr_zero(c.ready_warps);
  auto& w = c.warps[warp];
  auto const lane = std::countr_zero(w.ready);
  w.ready &= w.ready - 1;
  if (w.ready == 0) c.ready_warps &= ~(1u << warp);
  return warp << 5 | lane;
}

static bool has_started(context& c, int thread) {
  return (c.warps[thread >> 5].started >> (thread & 31) & 1u) != 0;
}

static void begin_thread(context& c, int thread, char* stack) {
  auto& state = c.states[thread];
  c.warps[thread >> 5].started |= 1u << (thread & 31);
  if (thread > 0 && has_started(c, thread - 1) && c.states[thread - 1].index.x + 1 < c.block.x) {
    state.index = c.states[thread - 1].index;
    ++state.index.x;
  } else {
    auto const t = static_cast<unsigned>(thread);
    state.index = {t % c.block.x, t / c.block.x % c.block.y, t / (c.block.x * c.block.y)};
  }
  state.stack = stack;
  set_current(c, thread);
}

static void end_thread(context& c);

[[noreturn]] static void to_main(context& c) {
  void* abandoned = c.state->stack;
  tessera_emulation_switch(&abandoned, c.main_stack_pointer);
  __builtin_unreachable();
}

static void fiber() {
  auto& c = *running;
  for (;;) {
    c.kernel->run(*c.kernel);
    end_thread(c);
    auto* const stack = c.state->stack;
    auto const next = take_ready(c);
    if (next < 0) to_main(c);
    if (!has_started(c, next)) {
      begin_thread(c, next, stack);
      continue;
    }
    c.free_stacks[c.free_count++] = stack;
    set_current(c, next);
    void* abandoned = stack;
    tessera_emulation_switch(&abandoned, c.states[next].stack_pointer);
  }
}

/// The running thread waits; others run until somebody makes it ready.
static void wait(context& c) {
  auto& state = c.states[c.current];
  auto const next = take_ready(c);
  state.stack_pointer = state.stack;
  if (next < 0) {
    tessera_emulation_switch(&state.stack_pointer, c.main_stack_pointer);
    return;
  }
  if (has_started(c, next)) {
    set_current(c, next);
    tessera_emulation_switch(&state.stack_pointer, c.states[next].stack_pointer);
  } else {
    auto* const stack = take_stack(c);
    begin_thread(c, next, stack);
    tessera_emulation_switch(&state.stack_pointer, prepare_stack(stack, fiber));
  }
}

void fail(context& c, fault_kind kind, std::string message, void const* at) {
  c.failed = true;
  c.kind = kind;
  c.message = static_cast<std::string&&>(message);
  c.at = at;
  to_main(c);
}

// ---- barriers

std::string describe_thread(context const& c, int thread) {
  auto const t = static_cast<unsigned>(thread);
  std::string text = "thread " + std::to_string(thread);
  if (c.block.y * c.block.z > 1)
    text += " (" + std::to_string(t % c.block.x) + ", " + std::to_string(t / c.block.x % c.block.y) + ", " +
            std::to_string(t / (c.block.x * c.block.y)) + ")";
  return text;
}

std::string describe_place(place where) {
  return std::string(where.file) + ":" + std::to_string(where.line);
}

static bool same_place(place a, place b) {
  return a.line == b.line && (a.file == b.file || std::strcmp(a.file, b.file) == 0);
}

static int any_ended_thread(context const& c) {
  for (int w = 0; w < most_warps; ++w)
    if (c.warps[w].ended != 0) return w << 5 | std::countr_zero(c.warps[w].ended);
  return -1;
}

static std::string ended_before(context const& c, int waiting, place where, int ended) {
  return describe_thread(c, waiting) + " waits for the whole block at " + describe_place(where) + ", and " +
         describe_thread(c, ended) + " has ended";
}

int block_barrier(place where, int predicate) {
  auto& c = *running;
  auto const me = c.current;
  if (c.ended > 0) FAIL(c, fault_kind::barrier, ended_before(c, me, where, any_ended_thread(c)));
  if (c.arrived == 0) {
    c.barrier_place = where;
    c.first_at_barrier = me;
    c.barrier_sum = 0;
  } else if (!same_place(c.barrier_place, where)) {
    FAIL(c, fault_kind::barrier,
         describe_thread(c, me) + " waits for the whole block at " + describe_place(where) + ", and " +
             describe_thread(c, c.first_at_barrier) + " at " + describe_place(c.barrier_place));
  }
  c.barrier_sum += predicate;
  if (++c.arrived < c.threads) {
    c.states[me].where = where;
    c.warps[me >> 5].at_barrier |= 1u << (me & 31);
    wait(c);
    return c.barrier_result;
  }
  c.arrived = 0;
  c.barrier_result = c.barrier_sum;
  ++c.epoch;
  for (int w = 0; w * 32 < c.threads; ++w) {
    set_ready(c, w, c.warps[w].at_barrier);
    c.warps[w].at_barrier = 0;
  }
  return c.barrier_result;
}

static void end_thread(context& c) {
  auto const me = c.current;
  auto const lane = 1u << (me & 31);
  auto& w = c.warps[me >> 5];
  w.ended |= lane;
  ++c.ended;
  if (c.arrived > 0) FAIL(c, fault_kind::barrier, ended_before(c, c.first_at_barrier, c.barrier_place, me));
  for (auto waiting = w.waiting; waiting != 0; waiting &= waiting - 1) {
    auto const other = (me & ~31) | std::countr_zero(waiting);
    auto const& state = c.states[other];
    if ((state.mask & lane) != 0)
      FAIL(c, fault_kind::warp_mask,
           describe_thread(c, other) + " waits at " + describe_place(state.where) +
               " with a mask that names lane " + std::to_string(me & 31) + ", which has ended");
  }
}

// ---- warps

static std::string hexadecimal(unsigned mask) {
  char text[16];
  std::snprintf(text, sizeof(text), "0x%08x", mask);
  return text;
}

[[noreturn]] static void fail_mask(context& c, unsigned mask, place where, std::string const& why) {
  FAIL(c, fault_kind::warp_mask,
       describe_thread(c, c.current) + " calls a warp operation at " + describe_place(where) + " with mask " +
           hexadecimal(mask) + ", " + why);
}

#define FAIL_MASK(...) (running = nullptr, fail_mask(__VA_ARGS__))

void meet(unsigned mask, place where, void* slot, void (*act)(void* const*, unsigned)) {
  auto& c = *running;
  auto const me = c.current;
  auto const warp = me >> 5, lane = me & 31;
  auto const bit = 1u << lane;
  auto& w = c.warps[warp];
  if ((mask & bit) == 0)
    FAIL_MASK(c, mask, where, "which does not name the caller's lane " + std::to_string(lane));
  if ((mask & ~w.exists) != 0)
    FAIL_MASK(c, mask, where,
              "which names lanes " + hexadecimal(mask & ~w.exists) +
                  " that its warp does not have: the block has " + std::to_string(c.threads) + " threads");
  if ((mask & w.ended) != 0)
    FAIL_MASK(c, mask, where, "which names lanes " + hexadecimal(mask & w.ended) + " that have ended");

  auto& state = *c.state;
  state.mask = mask;
  state.where = where;
  state.act = act;
  w.slots[lane] = slot;
  if (((w.waiting | bit) & mask) != mask) {
    w.waiting |= bit;
    wait(c);
    return;
  }
  for (auto others = mask & ~bit; others != 0; others &= others - 1) {
    auto const other = std::countr_zero(others);
    auto const& there = c.states[warp << 5 | other];
    if (there.mask != mask)
      FAIL_MASK(c, mask, where,
                "and lane " + std::to_string(other) + " waits at " + describe_place(there.where) +
                    " with mask " + hexadecimal(there.mask));
    if (there.act != act || !same_place(there.where, where))
      FAIL_MASK(c, mask, where,
                "and lane " + std::to_string(other) + " is at another operation, at " +
                    describe_place(there.where));
  }
  act(w.slots, mask);
  w.waiting &= ~mask;
  set_ready(c, warp, mask & ~bit);
}

unsigned active_lanes() noexcept {
  auto const& w = running->warps[running->current >> 5];
  return w.exists & ~w.ended;
}
unsigned lane() noexcept {
  return static_cast<unsigned>(running->current & 31);
}

/// After it, what a lane of the mask did before is known to the others.
static void act_sync(void* const*, unsigned mask) {
  auto& c = *running;
  auto const warp = c.current >> 5;
  auto& w = c.warps[warp];
  constexpr std::uint32_t most_stamps = 4000; // what the cells have room for
  if (w.sync_epoch != c.epoch || w.stamp == most_stamps) {
    // So many in one interval: what came before counts as ordered, and a race with it goes unseen.
    if (w.sync_epoch == c.epoch) ++c.epoch;
    w.sync_epoch = c.epoch;
    w.stamp = w.full_stamp = 0;
  }
  auto const stamp = ++w.stamp;
  if (mask == w.exists) {
    w.full_stamp = stamp;
    return;
  }
  auto& clocks = c.clocks[warp];
  if (w.partial_epoch != c.epoch) {
    w.partial_epoch = c.epoch;
    std::memset(&clocks, 0, sizeof(clocks));
  }
  std::uint32_t known[32] = {};
  for (auto lanes = mask; lanes != 0; lanes &= lanes - 1) {
    auto const& clock = clocks[std::countr_zero(lanes)];
    for (int i = 0; i < 32; ++i) known[i] = std::max(known[i], clock[i]);
  }
  for (auto lanes = mask; lanes != 0; lanes &= lanes - 1) known[std::countr_zero(lanes)] = stamp;
  for (auto lanes = mask; lanes != 0; lanes &= lanes - 1)
    std::memcpy(clocks[std::countr_zero(lanes)], known, sizeof(known));
}

namespace {

template <class F>
void for_lanes(unsigned mask, F f) {
  for (; mask != 0; mask &= mask - 1) f(std::countr_zero(mask));
}

/// What a lane brings to an operation of its warp, and what it gets.
struct shuffle_slot {
  std::uint64_t value, result;
  int source, width;
};
struct bits_slot {
  std::uint64_t value;
  unsigned result;
};
struct reduction_slot {
  std::int64_t value, result;
};

template <shuffle Kind>
void act_shuffle(void* const* slots, unsigned mask) {
  auto& c = *running;
  for_lanes(mask, [&](int lane) {
    auto& slot = *static_cast<shuffle_slot*>(slots[lane]);
    auto const width = slot.width, source = slot.source;
    if (width < 1 || width > 32 || (width & (width - 1)) != 0)
      FAIL(c, fault_kind::warp_mask,
           "a shuffle of width " + std::to_string(width) + " at " + describe_place(c.state->where) +
               ": it must be 1, 2, 4, 8, 16 or 32");
    auto const first = lane & ~(width - 1);
    int from = lane;
    if constexpr (Kind == shuffle::index) from = first + (source & (width - 1));
    if constexpr (Kind == shuffle::up) from = lane - source >= first ? lane - source : lane;
    if constexpr (Kind == shuffle::down) from = lane + source < first + width ? lane + source : lane;
    if constexpr (Kind == shuffle::exclusive_or)
      from = (lane ^ source) < first + width ? lane ^ source : lane;
    if (from >= 0 && from < 32 && (mask >> from & 1u) != 0) {
      slot.result = static_cast<shuffle_slot*>(slots[from])->value;
    } else if (Kind == shuffle::up || Kind == shuffle::down) {
      slot.result = ~std::uint64_t{0}; // a shift past the lanes there are: NaN, -1, not to be used
    } else {
      FAIL(c, fault_kind::warp_mask,
           "lane " + std::to_string(lane) + " of a shuffle at " + describe_place(c.state->where) +
               " reads lane " + std::to_string(from) + ", which the mask " + hexadecimal(mask) +
               " does not name");
    }
  });
}

void act_ballot(void* const* slots, unsigned mask) {
  unsigned result = 0;
  for_lanes(mask,
            [&](int i) { result |= static_cast<unsigned>(static_cast<bits_slot*>(slots[i])->value) << i; });
  for_lanes(mask, [&](int i) { static_cast<bits_slot*>(slots[i])->result = result; });
}

void act_match(void* const* slots, unsigned mask) {
  for_lanes(mask, [&](int i) {
    auto& slot = *static_cast<bits_slot*>(slots[i]);
    slot.result = 0;
    for_lanes(mask, [&](int j) {
      slot.result |= static_cast<unsigned>(static_cast<bits_slot*>(slots[j])->value == slot.value) << j;
    });
  });
}

template <reduction Kind>
void act_reduce(void* const* slots, unsigned mask) {
  bool first = true;
  std::int64_t result = 0;
  for_lanes(mask, [&](int i) {
    auto const x = static_cast<reduction_slot*>(slots[i])->value;
    if (first)
      result = x;
    else if constexpr (Kind == reduction::sum)
      result += x;
    else if constexpr (Kind == reduction::least)
      result = x < result ? x : result;
    else if constexpr (Kind == reduction::greatest)
      result = result < x ? x : result;
    else if constexpr (Kind == reduction::all_bits)
      result &= x;
    else if constexpr (Kind == reduction::any_bits)
      result |= x;
    else
      result ^= x;
    first = false;
  });
  for_lanes(mask, [&](int i) { static_cast<reduction_slot*>(slots[i])->result = result; });
}

} // namespace

template <shuffle Kind>
std::uint64_t shuffle_bits(unsigned mask, std::uint64_t value, int source, int width, place where) {
  shuffle_slot slot{value, 0, source, width};
  meet(mask, where, &slot, &act_shuffle<Kind>);
  return slot.result;
}
template std::uint64_t shuffle_bits<shuffle::index>(unsigned, std::uint64_t, int, int, place);
template std::uint64_t shuffle_bits<shuffle::up>(unsigned, std::uint64_t, int, int, place);
template std::uint64_t shuffle_bits<shuffle::down>(unsigned, std::uint64_t, int, int, place);
template std::uint64_t shuffle_bits<shuffle::exclusive_or>(unsigned, std::uint64_t, int, int, place);

unsigned ballot(unsigned mask, bool predicate, place where) {
  bits_slot slot{predicate, 0};
  meet(mask, where, &slot, &act_ballot);
  return slot.result;
}
unsigned match(unsigned mask, std::uint64_t value, place where) {
  bits_slot slot{value, 0};
  meet(mask, where, &slot, &act_match);
  return slot.result;
}

template <reduction Kind>
std::int64_t reduce_lanes(unsigned mask, std::int64_t value, place where) {
  reduction_slot slot{value, 0};
  meet(mask, where, &slot, &act_reduce<Kind>);
  return slot.result;
}
template std::int64_t reduce_lanes<reduction::sum>(unsigned, std::int64_t, place);
template std::int64_t reduce_lanes<reduction::least>(unsigned, std::int64_t, place);
template std::int64_t reduce_lanes<reduction::greatest>(unsigned, std::int64_t, place);
template std::int64_t reduce_lanes<reduction::all_bits>(unsigned, std::int64_t, place);
template std::int64_t reduce_lanes<reduction::any_bits>(unsigned, std::int64_t, place);
template std::int64_t reduce_lanes<reduction::odd_bits>(unsigned, std::int64_t, place);

// ---- indices

uint3 thread_index() noexcept {
  return running->state->index;
}
uint3 block_index() noexcept {
  return running->block_index;
}
void* dynamic_shared_memory() noexcept {
  return reinterpret_cast<void*>(running->dynamic_shared.begin);
}
void fence() noexcept {
  running->fenced = true;
}
void trap(char const* text) {
  auto& c = *running;
  FAIL(c, fault_kind::trap, text);
}

// ---- grids

/// Somebody waits and nobody can go on.
static std::string describe_hang(context const& c) {
  std::string text = "the block hangs:";
  int shown = 0;
  for (int t = 0; t < c.threads && shown < 4; ++t) {
    auto const& w = c.warps[t >> 5];
    auto const bit = 1u << (t & 31);
    auto const& state = c.states[t];
    if ((w.at_barrier & bit) != 0 && (shown == 0 || t == c.first_at_barrier)) {
      text +=
          " " + describe_thread(c, t) + " waits for the whole block at " + describe_place(state.where) + ";";
      ++shown;
    } else if ((w.waiting & bit) != 0) {
      auto const missing = state.mask & ~w.waiting;
      text += " " + describe_thread(c, t) + " waits at " + describe_place(state.where) + " with mask " +
              hexadecimal(state.mask) + " for lanes " + hexadecimal(missing) + ";";
      ++shown;
    }
  }
  text.back() = '.';
  return text;
}

static void run_block(context& c) {
  c.ended = c.arrived = 0;
  c.current = 0;
  c.fenced = false;
  c.first_epoch = ++c.epoch;
  c.ready_warps = 0;
  for (int w = 0; w * 32 < c.threads; ++w) {
    auto& warp = c.warps[w];
    auto const lanes = std::min(32, c.threads - w * 32);
    warp.exists = lanes == 32 ? ~0u : (1u << lanes) - 1;
    warp.started = warp.waiting = warp.at_barrier = warp.ended = warp.ready = 0;
    warp.sync_epoch = warp.stamp = warp.full_stamp = warp.partial_epoch = 0;
    set_ready(c, w, warp.exists);
  }
  auto* const stack = take_stack(c);
  begin_thread(c, take_ready(c), stack);
  c.main_stack_pointer = nullptr;
  running = &c;
  tessera_emulation_switch(&c.main_stack_pointer, prepare_stack(stack, fiber));
  running = nullptr;
  if (!c.failed && c.ended < c.threads) {
    c.failed = true;
    c.kind = fault_kind::hang;
    c.message = describe_hang(c);
    c.at = nullptr;
  }
  // Whoever had a stack is gone.
  for (c.free_count = 0; c.free_count < c.stack_count; ++c.free_count)
    c.free_stacks[c.free_count] = c.stacks[c.free_count];
}

static shared_range make_range(address begin, std::size_t bytes, std::size_t room) {
  auto const words = room / 4 + 8;
  return {begin, bytes, static_cast<shared_cell*>(map(words * sizeof(shared_cell))),
          static_cast<shared_cell*>(map(4 * words * sizeof(shared_cell)))};
}

inline constexpr std::size_t dynamic_room = std::size_t{1} << 20; // beyond its end nothing else begins

namespace {
struct owned_context : context {
  std::size_t static_room = 0;

  owned_context() {
    states = new thread_state[most_threads];
    clocks = static_cast<std::uint32_t(*)[32][32]>(map(sizeof(std::uint32_t[most_warps][32][32])));
    address begin = 0;
    find_thread_locals(begin, static_room);
    static_shared = make_range(begin, static_room, static_room);
    dynamic_shared = make_range(reinterpret_cast<address>(map(dynamic_room)), 0, dynamic_room);
  }
  owned_context(owned_context const&) = delete;
  owned_context& operator=(owned_context const&) = delete;
  ~owned_context() {
    auto const give_back = [](shared_range const& range, std::size_t room) {
      munmap(range.cells, (room / 4 + 8) * sizeof(shared_cell));
      munmap(range.single_cells, 4 * (room / 4 + 8) * sizeof(shared_cell));
    };
    give_back(static_shared, static_room);
    give_back(dynamic_shared, dynamic_room);
    munmap(reinterpret_cast<void*>(dynamic_shared.begin), dynamic_room);
    munmap(clocks, sizeof(std::uint32_t[most_warps][32][32]));
    for (int i = 0; i < stack_count; ++i) munmap(stacks[i] - guard_bytes, stack_bytes + guard_bytes);
    delete[] states;
  }
};
} // namespace

static std::atomic<std::uint64_t> launches{0};
static std::atomic<bool> backwards{false}, races{true};
void run_blocks_backwards(bool b) noexcept {
  backwards = b;
}
void check_device_races(bool check) noexcept {
  races = check;
}

static cudaError_t error_of(fault_kind kind) {
  switch (kind) {
  case fault_kind::out_of_bounds:
  case fault_kind::use_after_free:
  case fault_kind::host_pointer:
    return cudaErrorIllegalAddress;
  case fault_kind::misaligned:
    return cudaErrorMisalignedAddress;
  case fault_kind::hang:
    return cudaErrorLaunchTimeout;
  case fault_kind::trap:
    return cudaErrorAssert;
  default:
    return cudaErrorLaunchFailure;
  }
}

cudaError_t run_grid(launched const& kernel, dim3 grid, dim3 block, std::size_t shared_bytes, int device) {
  static thread_local std::unique_ptr<owned_context> mine;
  if (mine == nullptr) mine = std::make_unique<owned_context>();
  auto& c = *mine;
  c.kernel = &kernel;
  c.grid = grid;
  c.block = block;
  blockDim = {block.x, block.y, block.z};
  gridDim = {grid.x, grid.y, grid.z};
  c.device = device;
  c.shared_bytes = c.dynamic_shared.bytes = shared_bytes;
  c.launch_number = (launches.fetch_add(1, std::memory_order_relaxed) + 1) & ((1u << launch_bits) - 1);
  if (c.launch_number == 0) {
    clear_cells(); // the numbers begin again
    c.launch_number = (launches.fetch_add(1, std::memory_order_relaxed) + 1) & ((1u << launch_bits) - 1);
  }
  c.own_memory = device_begin + static_cast<address>(device) * device_bytes;
  c.threads = static_cast<int>(block.x * block.y * block.z);
  c.check_races = races;
  for (int d = 0; d < most_devices; ++d) c.peers[d] = d == device || peer_enabled(device, d);
  c.failed = false;
  auto const blocks = std::uint64_t{grid.x} * grid.y * grid.z;
  bool const falling = backwards;
  for (std::uint64_t i = 0; i < blocks && !c.failed; ++i) {
    auto const b = falling ? blocks - 1 - i : i;
    c.block_number = b;
    c.signature = c.launch_number << (64 - launch_bits) | (b & ((1u << block_bits) - 1))
                                                              << (thread_bits + interval_bits);
    c.block_index = {static_cast<unsigned>(b % grid.x), static_cast<unsigned>(b / grid.x % grid.y),
                     static_cast<unsigned>(b / grid.x / grid.y)};
    run_block(c);
  }
  if (!c.failed) return cudaSuccess;
  auto message = c.message + "\n  in kernel " + name_of_function(kernel.kernel) + ", block (" +
                 std::to_string(c.block_index.x) + ", " + std::to_string(c.block_index.y) + ", " +
                 std::to_string(c.block_index.z) + ") of (" + std::to_string(grid.x) + ", " +
                 std::to_string(grid.y) + ", " + std::to_string(grid.z) + "), " + std::to_string(c.threads) +
                 " threads";
  if (c.at != nullptr) message += "\n  " + describe_code(c.at);
  auto const error = error_of(c.kind);
  set_stuck(device, error);
  record_fault(c.kind, device, static_cast<std::string&&>(message));
  return error;
}

} // namespace cuda_emulation

void __syncwarp(unsigned mask, cuda_emulation::place where) {
  cuda_emulation::meet(mask, where, nullptr, &cuda_emulation::act_sync);
}
