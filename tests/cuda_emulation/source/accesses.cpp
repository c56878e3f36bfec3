/// Every load and store of the instrumented code comes here: the compiler's thread sanitizer puts the calls
/// in, and these definitions stand in for its runtime. Host code is told apart by one or two comparisons.
#include "machine.hpp"

#include <algorithm>

extern "C" char const __executable_start, _end; // from the linker: the program

namespace cuda_emulation {

namespace {

enum class use { read, write, atomic };

char const* verb(use u) {
  return u == use::read ? "reads" : u == use::write ? "writes" : "updates";
}
char const* verb(bool wrote) {
  return wrote ? "wrote" : "read";
}

std::string hexadecimal(address a) {
  char text[32];
  std::snprintf(text, sizeof(text), "0x%llx", static_cast<unsigned long long>(a));
  return text;
}

#define FAIL_ACCESS(...) (running = nullptr, fail_access(__VA_ARGS__))
[[noreturn]] void fail_access(context& c, fault_kind kind, use u, address a, std::size_t bytes,
                              std::string const& why, void const* at) {
  FAIL(c, kind,
       describe_thread(c, c.current) + " " + verb(u) + " " + std::to_string(bytes) + " bytes at " +
           hexadecimal(a) + ", " + why,
       at);
}

// ---- shared memory

std::string place_in_shared(context const& c, shared_range const& range, address a) {
  if (&range == &c.dynamic_shared)
    return "byte " + std::to_string(a - range.begin) + " of dynamic shared memory";
  return describe_shared_variable(a - range.begin);
}

/// How many barriers of its warp the running thread has come to since the last of the block.
std::uint16_t stamp_now(context const& c) {
  return c.warp->sync_epoch == c.epoch ? static_cast<std::uint16_t>(c.warp->stamp) : std::uint16_t{0};
}

/// Whether what another thread did since the last block barrier, at `stamp`, came before a __syncwarp that
/// the running thread knows of.
bool is_ordered(context const& c, int other, std::uint32_t stamp) {
  auto const warp = c.current >> 5;
  if (other >> 5 != warp) return false;
  auto const& w = c.warps[warp];
  if (w.sync_epoch != c.epoch) return false;
  if (stamp < w.full_stamp) return true;
  return w.partial_epoch == c.epoch && stamp < c.clocks[warp][c.current & 31][other & 31];
}

bool lanes_are_ordered(context const& c, unsigned lanes, std::uint32_t stamp) {
  auto const first = c.current & ~31;
  for (lanes &= ~(1u << (c.current & 31)); lanes != 0; lanes &= lanes - 1)
    if (!is_ordered(c, first | std::countr_zero(lanes), stamp)) return false;
  return true;
}

#define FAIL_SHARED_RACE(...) (running = nullptr, fail_shared_race(__VA_ARGS__))
[[noreturn]] void fail_shared_race(context& c, shared_range const& range, use u, address a, std::size_t bytes,
                                   std::string const& other, bool wrote, void const* at) {
  FAIL_ACCESS(c, fault_kind::race, u, a, bytes,
              place_in_shared(c, range, a) + ", which " + other + " " + verb(wrote) +
                  " with no barrier in between",
              at);
}

/// The accesses before this one that no barrier separates from it.
template <use U>
[[gnu::noinline]] void check_order(context& c, shared_range const& range, shared_cell const& cell, address a,
                                   std::size_t bytes, void const* at) {
  auto const me = c.current;
  auto const warp = me >> 5;
  if constexpr (U != use::write) {
    if (cell.write_epoch < c.first_epoch)
      FAIL_ACCESS(c, fault_kind::unwritten_read, U, a, bytes,
                  place_in_shared(c, range, a) + ", which no thread of the block has written", at);
  }
  if (cell.write_epoch == c.epoch && cell.writer != me) {
    auto const writer = cell.writer;
    if (writer < atomic_thread) {
      if (!is_ordered(c, writer, cell.write_stamp))
        FAIL_SHARED_RACE(c, range, U, a, bytes, describe_thread(c, writer), true, at);
    } else if constexpr (U != use::atomic) {
      bool ordered = false;
      if (writer < atomic_warp) {
        auto const other = writer & (most_threads - 1);
        ordered = other == me || is_ordered(c, other, cell.write_stamp);
      } else if (writer != atomic_many && (writer & 31) == warp) {
        ordered = lanes_are_ordered(c, c.warp->exists, cell.write_stamp);
      }
      if (!ordered)
        FAIL_SHARED_RACE(c, range, U, a, bytes, "an atomic operation of another thread", true, at);
    }
  }
  if constexpr (U != use::read) {
    if (cell.read_epoch != c.epoch) return;
    if (cell.reader_warp == many_warps)
      FAIL_SHARED_RACE(c, range, U, a, bytes, "threads of several warps", false, at);
    auto const own = cell.reader_warp == warp ? 1u << (me & 31) : 0u;
    if (auto const others = cell.reader_lanes & ~own; others != 0) {
      auto const first = cell.reader_warp << 5;
      if (cell.reader_warp != warp || !lanes_are_ordered(c, others, cell.read_stamp))
        FAIL_SHARED_RACE(c, range, U, a, bytes, describe_thread(c, first | std::countr_zero(others)), false,
                         at);
    }
  }
}

template <use U>
[[gnu::always_inline]] inline void check_cell(context& c, shared_range const& range, shared_cell& cell,
                                              address a, std::size_t bytes, void const* at) {
  auto const me = c.current;
  auto const epoch = c.epoch;
  if constexpr (U == use::read) {
    // The commonest: written before a barrier, or by the thread itself.
    if (!(cell.write_epoch >= c.first_epoch && (cell.write_epoch != epoch || cell.writer == me))) [[unlikely]]
      check_order<U>(c, range, cell, a, bytes, at);
    auto const warp = static_cast<std::uint8_t>(me >> 5);
    auto const lane = 1u << (me & 31);
    if (cell.read_epoch != epoch) {
      cell.read_epoch = epoch;
      cell.reader_warp = warp;
      cell.reader_lanes = lane;
      cell.read_stamp = stamp_now(c);
    } else if (cell.reader_warp == warp) {
      cell.reader_lanes |= lane;
      cell.read_stamp = stamp_now(c);
    } else {
      cell.reader_warp = many_warps;
    }
  } else {
    if (cell.write_epoch == epoch || cell.read_epoch == epoch || U == use::atomic)
      check_order<U>(c, range, cell, a, bytes, at);
    cell.read_epoch = 0;
    if constexpr (U == use::write) {
      cell.writer = static_cast<std::uint16_t>(me);
    } else {
      auto const was_atomic = cell.write_epoch == epoch && cell.writer >= atomic_thread;
      auto const single = static_cast<std::uint16_t>(atomic_thread | me);
      auto const whole = static_cast<std::uint16_t>(atomic_warp | me >> 5);
      if (!was_atomic || cell.writer == single)
        cell.writer = single;
      else if (cell.writer < atomic_warp && (cell.writer & (most_threads - 1)) >> 5 == me >> 5)
        cell.writer = whole;
      else if (cell.writer != whole)
        cell.writer = atomic_many;
    }
    cell.write_epoch = epoch;
    cell.write_stamp = stamp_now(c);
  }
}

/// Any number of bytes, anywhere.
template <use U>
[[gnu::noinline]] void check_shared_bytes(context& c, shared_range& range, address a, std::size_t bytes,
                                          void const* at) {
  auto const offset = a - range.begin;
  if (offset + bytes > range.bytes)
    FAIL_ACCESS(c, fault_kind::out_of_bounds, U, a, bytes,
                "after the end of the " + std::to_string(range.bytes) + " bytes of shared memory", at);
  for (auto i = offset; i < offset + bytes;) {
    auto& cell = range.cells[i / 4];
    bool const whole = i % 4 == 0 && i + 4 <= offset + bytes;
    bool const single = cell.single_epoch >= c.first_epoch;
    if (whole && !single) {
      check_cell<U>(c, range, cell, a, bytes, at);
      i += 4;
      continue;
    }
    auto* const parts = range.single_cells + i / 4 * 4;
    if (!single) {
      for (int k = 0; k < 4; ++k) parts[k] = cell;
      cell.single_epoch = c.epoch;
    }
    auto const end = std::min(i / 4 * 4 + 4, offset + bytes);
    for (; i < end; ++i) check_cell<U>(c, range, parts[i % 4], a, bytes, at);
  }
}

template <use U, std::size_t N>
[[gnu::always_inline]] inline void check_shared(context& c, shared_range& range, address a, std::size_t bytes,
                                                void const* at) {
  auto const offset = a - range.begin;
  if constexpr (N >= 4) {
    auto* const cells = range.cells + offset / 4;
    bool simple = offset % 4 == 0 && offset + N <= range.bytes;
    for (std::size_t i = 0; i < N / 4; ++i) simple = simple && cells[i].single_epoch < c.first_epoch;
    if (simple) [[likely]] {
      for (std::size_t i = 0; i < N / 4; ++i) check_cell<U>(c, range, cells[i], a, bytes, at);
      return;
    }
  }
  check_shared_bytes<U>(c, range, a, bytes, at);
}

// ---- device memory

[[noreturn]] void fail_device(context& c, use u, address a, std::size_t bytes, void const* at) {
  running = nullptr;
  if (is_device(a) && !c.peers[device_at(a)])
    FAIL_ACCESS(c, fault_kind::out_of_bounds, u, a, bytes,
                "memory of device " + std::to_string(device_at(a)) + " in a kernel on device " +
                    std::to_string(c.device),
                at);
  auto const* const shadow = shadow_of(a);
  auto kind = fault_kind::unwritten_read;
  auto i = std::size_t{0};
  while (i < bytes && (shadow[i] & allocated) != 0) ++i;
  if (i < bytes) kind = was_freed(a + i) ? fault_kind::use_after_free : fault_kind::out_of_bounds;
  FAIL_ACCESS(c, kind, u, a, bytes,
              describe_memory(a) + (kind == fault_kind::unwritten_read ? ", which nobody has written" : ""),
              at);
}

template <use U>
[[gnu::noinline]] void check_device_bytes(context& c, address a, std::size_t bytes, void const* at) {
  bool right = is_pinned(a) || c.peers[device_at(a)];
  auto* const shadow = shadow_of(a);
  constexpr auto wanted = static_cast<unsigned char>(U == use::write ? allocated : allocated | written);
  for (std::size_t i = 0; i < bytes; ++i) right = right && (shadow[i] & wanted) == wanted;
  if (!right) fail_device(c, U, a, bytes, at);
  if constexpr (U == use::write)
    for (std::size_t i = 0; i < bytes; ++i) shadow[i] |= written;
}

inline constexpr int thread_shift = interval_bits, block_shift = thread_bits + interval_bits,
                     launch_shift = block_bits + block_shift;
inline constexpr auto interval_mask = (std::uint64_t{1} << interval_bits) - 1;

/// What the running thread leaves in a cell.
std::uint64_t signature_now(context const& c) {
  return c.signature | static_cast<std::uint64_t>(c.current) << thread_shift |
         ((c.epoch - c.first_epoch) & interval_mask);
}

template <use U>
[[gnu::noinline]] void check_device_order(context& c, address a, std::size_t bytes, std::uint64_t other,
                                          bool wrote, void const* at) {
  auto const me = signature_now(c);
  if (other >> launch_shift != me >> launch_shift) return;
  auto const same_block = other >> block_shift == me >> block_shift;
  auto const thread = static_cast<int>(other >> thread_shift) & (most_threads - 1);
  if (same_block) {
    if (thread == c.current || (other & interval_mask) != (me & interval_mask)) return;
    // Any barrier of the warp counts as the one between the two.
    if (thread >> 5 == c.current >> 5 && stamp_now(c) > 0) return;
  } else if (c.fenced) {
    return; // a counter or flag may have ordered them
  }
  running = nullptr;
  auto who = describe_thread(c, thread);
  if (!same_block) {
    auto const block = other >> block_shift & ((1u << block_bits) - 1);
    who += " of block (" + std::to_string(block % c.grid.x) + ", " +
           std::to_string(block / c.grid.x % c.grid.y) + ", " + std::to_string(block / c.grid.x / c.grid.y) +
           ")";
  }
  fail_access(c, fault_kind::race, U, a, bytes,
              describe_memory(a) + ", which " + who + " " + verb(wrote) + " in the same kernel, with " +
                  (same_block ? "no barrier in between" : "nothing that orders the two"),
              at);
}

template <use U>
[[gnu::always_inline]] inline void check_device_race(context& c, address a, std::size_t bytes,
                                                     void const* at) {
  auto const me = signature_now(c);
  auto* cell = cells_of(a);
  for (auto* const end = cells_of(a + bytes + 1); cell < end; ++cell) {
    // Same launch, and not the thread itself in this interval.
    if (cell->writer != me && ((cell->writer ^ me) >> launch_shift) == 0) [[unlikely]]
      check_device_order<U>(c, a, bytes, cell->writer, true, at);
    if constexpr (U == use::write) {
      if (cell->reader != me && ((cell->reader ^ me) >> launch_shift) == 0) [[unlikely]]
        check_device_order<U>(c, a, bytes, cell->reader, false, at);
      cell->writer = me;
    } else if constexpr (U == use::read) {
      cell->reader = me;
    }
  }
}

constexpr std::uint64_t in_each_byte(unsigned char bits) {
  return bits * std::uint64_t{0x0101010101010101};
}

/// Whether N bytes of the device's own memory are all there is to be looked at.
template <use U, std::size_t N>
[[gnu::always_inline]] inline bool passes_device(address a) {
  using word = std::conditional_t<
      N == 1, std::uint8_t,
      std::conditional_t<N == 2, std::uint16_t, std::conditional_t<N == 4, std::uint32_t, std::uint64_t>>>;
  constexpr auto both = static_cast<word>(in_each_byte(allocated | written));
  constexpr auto one = static_cast<word>(in_each_byte(allocated));
  auto* const shadow = shadow_of(a);
  bool right = true;
  for (std::size_t i = 0; i < N; i += sizeof(word)) {
    word bits;
    __builtin_memcpy(&bits, shadow + i, sizeof(word));
    if constexpr (U == use::write)
      right = right && (bits & one) == one;
    else
      right = right && bits == both;
  }
  if constexpr (U == use::write)
    if (right) __builtin_memset(shadow, allocated | written, N);
  return right;
}

/// Neither the device's own memory nor the thread's.
template <use U>
[[gnu::noinline]] void check_elsewhere(context& c, address a, std::size_t bytes, void const* at) {
  if (is_known(a)) {
    check_device_bytes<U>(c, a, bytes, at);
    if (c.check_races && bytes > 1) check_device_race<U>(c, a, bytes, at);
    return;
  }
  // The dimensions belong to the thread of the operating system too.
  if (a - reinterpret_cast<address>(&blockDim) < sizeof(blockDim) ||
      a - reinterpret_cast<address>(&gridDim) < sizeof(gridDim))
    return;
  if (a - c.static_shared.begin < c.static_shared.bytes)
    return check_shared_bytes<U>(c, c.static_shared, a, bytes, at);
  if (a - c.dynamic_shared.begin < std::size_t{1} << 20)
    return check_shared_bytes<U>(c, c.dynamic_shared, a, bytes, at);
  if (a - reinterpret_cast<address>(c.kernel) < c.kernel->bytes && U == use::read) return;
  // Constants, and tables that the compiler made.
  auto const image = reinterpret_cast<address>(&__executable_start);
  if (a - image < reinterpret_cast<address>(&_end) - image && U == use::read) return;
  if (a < 4096) FAIL_ACCESS(c, fault_kind::out_of_bounds, U, a, bytes, "a null pointer", at);
  FAIL_ACCESS(c, fault_kind::host_pointer, U, a, bytes, "which is memory of the host", at);
}

/// Host code touches memory of a device, or pinned memory.
[[gnu::noinline]] void check_host(use u, address a, std::size_t bytes, void const* at) {
  auto kind = fault_kind::device_pointer;
  auto why = std::string("memory of a device");
  if (is_pinned(a)) {
    auto const* const shadow = shadow_of(a);
    unsigned char all = allocated, any = 0;
    for (std::size_t i = 0; i < bytes; ++i) all &= shadow[i], any |= shadow[i];
    kind = fault_kind::synchronisation;
    if (all == 0) {
      kind = was_freed(a) ? fault_kind::use_after_free : fault_kind::out_of_bounds;
      why = "pinned memory";
    } else if ((any & will_be_written) != 0) {
      why = "pinned memory that work in a stream is yet to write: nobody has waited for it";
    } else if (u != use::read && (any & will_be_read) != 0) {
      why = "pinned memory that work in a stream is yet to read: nobody has waited for it";
    } else {
      return;
    }
  }
  record_fault(kind, is_device(a) ? device_at(a) : -1,
               std::string("host code ") + verb(u) + " " + std::to_string(bytes) + " bytes at " +
                   hexadecimal(a) + ", " + why + ": " + describe_memory(a) + "\n  " + describe_code(at));
}

[[noreturn, gnu::noinline]] void fail_aligned(context& c, address a, std::size_t bytes, void const* at) {
  running = nullptr;
  fail(c, fault_kind::misaligned,
       describe_thread(c, c.current) + " uses " + std::to_string(bytes) + " bytes at " + hexadecimal(a) +
           ", which is no multiple of that",
       at);
}

/// N: the size where the compiler knows it and the address is a multiple of it, else 0.
template <use U, std::size_t N>
[[gnu::always_inline]] inline void access(void const* pointer, std::size_t bytes, void const* at) {
  auto const a = reinterpret_cast<address>(pointer);
  auto* const c = running;
  if (c == nullptr) {
    if (is_known(a)) [[unlikely]]
      check_host(U, a, bytes, at);
    return;
  }
  if constexpr (N > 0) {
    // What the compiler knows of 16 bytes is that they begin at a multiple of 8.
    if (a % (N < 8 ? N : 8) != 0) [[unlikely]]
      fail_aligned(*c, a, N, at);
    if (a - c->own_memory < device_bytes) {
      if (!passes_device<U, N>(a)) [[unlikely]]
        check_device_bytes<U>(*c, a, bytes, at);
      if (N > 1 && c->check_races) check_device_race<U>(*c, a, N, at);
      return;
    }
    if (a - reinterpret_cast<address>(c->state->stack) < stack_bytes) return;
    // The dimensions are in the same segment, and as constant as a thread's index.
    if (a - c->static_shared.begin < c->static_shared.bytes &&
        a - reinterpret_cast<address>(&blockDim) >= sizeof(blockDim) &&
        a - reinterpret_cast<address>(&gridDim) >= sizeof(gridDim))
      return check_shared<U, N>(*c, c->static_shared, a, N, at);
    if (a - c->dynamic_shared.begin < c->dynamic_shared.bytes)
      return check_shared<U, N>(*c, c->dynamic_shared, a, N, at);
  }
  if (a - reinterpret_cast<address>(c->state->stack) < stack_bytes) return;
  check_elsewhere<U>(*c, a, bytes, at);
}

} // namespace

void atomic_access(void const* memory, std::size_t bytes) {
  require_aligned(memory, bytes);
  access<use::atomic, 0>(memory, bytes, __builtin_return_address(0));
}
void read_access(void const* memory, std::size_t bytes) {
  access<use::read, 0>(memory, bytes, __builtin_return_address(0));
}
void write_access(void const* memory, std::size_t bytes) {
  access<use::write, 0>(memory, bytes, __builtin_return_address(0));
}
void require_aligned(void const* memory, std::size_t bytes) {
  auto const a = reinterpret_cast<address>(memory);
  if (a % bytes != 0 && running != nullptr) fail_aligned(*running, a, bytes, __builtin_return_address(0));
}

} // namespace cuda_emulation

// ---- what the compiler calls

using cuda_emulation::access;
using cuda_emulation::use;

#define HERE __builtin_return_address(0)
#define ACCESSES(N)                                                                                          \
  void __tsan_read##N(void* a) {                                                                             \
    access<use::read, N>(a, N, HERE);                                                                        \
  }                                                                                                          \
  void __tsan_write##N(void* a) {                                                                            \
    access<use::write, N>(a, N, HERE);                                                                       \
  }                                                                                                          \
  void __tsan_volatile_read##N(void* a) {                                                                    \
    access<use::read, N>(a, N, HERE);                                                                        \
  }                                                                                                          \
  void __tsan_volatile_write##N(void* a) {                                                                   \
    access<use::write, N>(a, N, HERE);                                                                       \
  }                                                                                                          \
  void __tsan_unaligned_read##N(void* a) {                                                                   \
    access<use::read, 0>(a, N, HERE);                                                                        \
  }                                                                                                          \
  void __tsan_unaligned_write##N(void* a) {                                                                  \
    access<use::write, 0>(a, N, HERE);                                                                       \
  }                                                                                                          \
  void __tsan_read_write##N(void* a) {                                                                       \
    access<use::read, N>(a, N, HERE);                                                                        \
    access<use::write, N>(a, N, HERE);                                                                       \
  }
// The program's atomic operations, which in instrumented code are calls too. The strongest order does for
// all.
#define ATOMICS(BITS, T)                                                                                     \
  T __tsan_atomic##BITS##_load(T const volatile* a, int) {                                                   \
    return __atomic_load_n(a, __ATOMIC_SEQ_CST);                                                             \
  }                                                                                                          \
  void __tsan_atomic##BITS##_store(T volatile* a, T v, int) {                                                \
    __atomic_store_n(a, v, __ATOMIC_SEQ_CST);                                                                \
  }                                                                                                          \
  T __tsan_atomic##BITS##_exchange(T volatile* a, T v, int) {                                                \
    return __atomic_exchange_n(a, v, __ATOMIC_SEQ_CST);                                                      \
  }                                                                                                          \
  T __tsan_atomic##BITS##_fetch_add(T volatile* a, T v, int) {                                               \
    return __atomic_fetch_add(a, v, __ATOMIC_SEQ_CST);                                                       \
  }                                                                                                          \
  T __tsan_atomic##BITS##_fetch_sub(T volatile* a, T v, int) {                                               \
    return __atomic_fetch_sub(a, v, __ATOMIC_SEQ_CST);                                                       \
  }                                                                                                          \
  T __tsan_atomic##BITS##_fetch_and(T volatile* a, T v, int) {                                               \
    return __atomic_fetch_and(a, v, __ATOMIC_SEQ_CST);                                                       \
  }                                                                                                          \
  T __tsan_atomic##BITS##_fetch_or(T volatile* a, T v, int) {                                                \
    return __atomic_fetch_or(a, v, __ATOMIC_SEQ_CST);                                                        \
  }                                                                                                          \
  T __tsan_atomic##BITS##_fetch_xor(T volatile* a, T v, int) {                                               \
    return __atomic_fetch_xor(a, v, __ATOMIC_SEQ_CST);                                                       \
  }                                                                                                          \
  T __tsan_atomic##BITS##_fetch_nand(T volatile* a, T v, int) {                                              \
    return __atomic_fetch_nand(a, v, __ATOMIC_SEQ_CST);                                                      \
  }                                                                                                          \
  int __tsan_atomic##BITS##_compare_exchange_strong(T volatile* a, T* expected, T v, int, int) {             \
    return __atomic_compare_exchange_n(a, expected, v, false, __ATOMIC_SEQ_CST, __ATOMIC_SEQ_CST);           \
  }                                                                                                          \
  int __tsan_atomic##BITS##_compare_exchange_weak(T volatile* a, T* expected, T v, int, int) {               \
    return __atomic_compare_exchange_n(a, expected, v, false, __ATOMIC_SEQ_CST, __ATOMIC_SEQ_CST);           \
  }                                                                                                          \
  T __tsan_atomic##BITS##_compare_exchange_val(T volatile* a, T expected, T v, int, int) {                   \
    __atomic_compare_exchange_n(a, &expected, v, false, __ATOMIC_SEQ_CST, __ATOMIC_SEQ_CST);                 \
    return expected;                                                                                         \
  }

extern "C" {
void __tsan_init() {}
void __tsan_func_entry(void*) {}
void __tsan_func_exit() {}
void __tsan_ignore_thread_begin() {}
void __tsan_ignore_thread_end() {}
ACCESSES(1)
ACCESSES(2)
ACCESSES(4)
ACCESSES(8)
ACCESSES(16)
void __tsan_read_range(void* a, std::size_t bytes) {
  access<use::read, 0>(a, bytes, HERE);
}
void __tsan_write_range(void* a, std::size_t bytes) {
  access<use::write, 0>(a, bytes, HERE);
}
void __tsan_vptr_update(void**, void*) {}
void __tsan_vptr_read(void**) {}
ATOMICS(8, unsigned char)
ATOMICS(16, unsigned short)
ATOMICS(32, unsigned)
ATOMICS(64, unsigned long long)
void __tsan_atomic_thread_fence(int) {
  __atomic_thread_fence(__ATOMIC_SEQ_CST);
}
void __tsan_atomic_signal_fence(int) {
  __atomic_signal_fence(__ATOMIC_SEQ_CST);
}
void* __tsan_memcpy(void* to, void const* from, std::size_t bytes) {
  access<use::read, 0>(from, bytes, HERE);
  access<use::write, 0>(to, bytes, HERE);
  return std::memcpy(to, from, bytes);
}
void* __tsan_memmove(void* to, void const* from, std::size_t bytes) {
  access<use::read, 0>(from, bytes, HERE);
  access<use::write, 0>(to, bytes, HERE);
  return std::memmove(to, from, bytes);
}
void* __tsan_memset(void* to, int value, std::size_t bytes) {
  access<use::write, 0>(to, bytes, HERE);
  return std::memset(to, value, bytes);
}

// -fsanitize=bounds: an index beyond the declared size of an array. And -fsanitize=alignment, which finds
// more misaligned accesses than the calls above, for nearly twice the time to compile; the tests are without
// it.
struct ubsan_place {
  char const* file;
  unsigned line, column;
};
struct ubsan_type {
  unsigned short kind, info;
  char name[1];
};
struct ubsan_bounds {
  ubsan_place where;
  ubsan_type const *array, *index;
};
struct ubsan_mismatch {
  ubsan_place where;
  ubsan_type const* type;
  unsigned char log_alignment, kind;
};
void __ubsan_handle_out_of_bounds(ubsan_bounds* data, void* index) {
  using namespace cuda_emulation;
  auto* const c = running;
  running = nullptr;
  auto const text = std::string(" uses index ") + std::to_string(reinterpret_cast<std::intptr_t>(index)) +
                    " of an array of type " + data->array->name + " at " + data->where.file + ":" +
                    std::to_string(data->where.line);
  if (c != nullptr) fail(*c, fault_kind::out_of_bounds, describe_thread(*c, c->current) + text);
  record_fault(fault_kind::out_of_bounds, -1, "host code" + text);
}
void __ubsan_handle_type_mismatch_v1(ubsan_mismatch* data, void* pointer) {
  using namespace cuda_emulation;
  require_aligned(pointer, std::size_t{1} << data->log_alignment);
}
}
