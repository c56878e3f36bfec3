// What kernels call: indices, barriers, exchange between lanes, atomics, arithmetic. Included by
// cuda_runtime.h.
#ifndef TESSERA_CUDA_EMULATION_DEVICE_HPP
#define TESSERA_CUDA_EMULATION_DEVICE_HPP

namespace cuda_emulation {

// A thread's index never changes, so a function may keep what it was told.
uint3 thread_index() noexcept __attribute__((const));
uint3 block_index() noexcept __attribute__((const));

struct dimensions {
  unsigned x, y, z;
  constexpr operator dim3() const { return {x, y, z}; }
};

/// The block's dynamic shared memory.
void* dynamic_shared_memory() noexcept;

/// Ends the kernel with a fault of this text; from device code.
[[noreturn]] void trap(char const* text);

/// Where a barrier or a warp operation stands in the source: the compiler may copy a call, the place stays.
struct place {
  char const* file;
  int line;
  static constexpr place here(char const* file = __builtin_FILE(), int line = __builtin_LINE()) {
    return {file, line};
  }
};

/// The lanes of `mask` meet. The last to arrive calls `act(slots, mask)`, where slots[lane] is what that lane
/// brought, and then all go on. Lanes that bring another `act`, place or mask do not match: a fault.
void meet(unsigned mask, place where, void* slot, void (*act)(void* const* slots, unsigned mask));

/// All threads of the block meet; the sum of what they bring (saturating logic is the caller's).
int block_barrier(place where, int predicate);

unsigned active_lanes() noexcept;
unsigned lane() noexcept;

/// Tells the checks of an atomic access, which happens right after.
void atomic_access(void const* address, std::size_t bytes);
/// Tells the checks of an ordinary access that the compiler does not show. It happens right after.
void read_access(void const* address, std::size_t bytes);
void write_access(void const* address, std::size_t bytes);
/// An access of `bytes` must begin at a multiple of it.
void require_aligned(void const* address, std::size_t bytes);
/// The block has ordered its writes for other blocks.
void fence() noexcept;

} // namespace cuda_emulation

#define threadIdx (::cuda_emulation::thread_index())
#define blockIdx (::cuda_emulation::block_index())
// No macros: members of cudaLaunchConfig_t have these names too.
extern __thread cuda_emulation::dimensions blockDim, gridDim;
inline constexpr int warpSize = 32;

// ---- barriers, fences

inline void __syncthreads(cuda_emulation::place where = cuda_emulation::place::here()) {
  (void)cuda_emulation::block_barrier(where, 0);
}
inline int __syncthreads_count(int predicate, cuda_emulation::place where = cuda_emulation::place::here()) {
  return cuda_emulation::block_barrier(where, predicate != 0);
}
inline int __syncthreads_or(int predicate, cuda_emulation::place where = cuda_emulation::place::here()) {
  return cuda_emulation::block_barrier(where, predicate != 0) != 0;
}
inline int __syncthreads_and(int predicate, cuda_emulation::place where = cuda_emulation::place::here()) {
  return cuda_emulation::block_barrier(where, predicate == 0) == 0;
}
void __syncwarp(unsigned mask = 0xffffffffu, cuda_emulation::place where = cuda_emulation::place::here());
inline void __threadfence() {
  cuda_emulation::fence();
}
inline void __threadfence_block() {}
inline void __threadfence_system() {
  cuda_emulation::fence();
}
inline void __nanosleep(unsigned) {}
[[noreturn]] inline void __trap() {
  cuda_emulation::trap("__trap() was called");
}

// ---- warps

namespace cuda_emulation {

enum class shuffle { index, up, down, exclusive_or };

/// `source`: an index, a distance, or a mask of the lane's number.
template <shuffle Kind>
std::uint64_t shuffle_bits(unsigned mask, std::uint64_t value, int source, int width, place where);

template <class T>
concept shuffled = (std::is_arithmetic_v<T> && (sizeof(T) == 4 || sizeof(T) == 8));

template <shuffle Kind, shuffled T>
inline T exchange(unsigned mask, T value, int source, int width, place where) {
  if constexpr (sizeof(T) == 4)
    return std::bit_cast<T>(static_cast<std::uint32_t>(
        shuffle_bits<Kind>(mask, std::bit_cast<std::uint32_t>(value), source, width, where)));
  else
    return std::bit_cast<T>(
        shuffle_bits<Kind>(mask, std::bit_cast<std::uint64_t>(value), source, width, where));
}

unsigned ballot(unsigned mask, bool predicate, place where);
unsigned match(unsigned mask, std::uint64_t value, place where);

enum class reduction { sum, least, greatest, all_bits, any_bits, odd_bits };
template <reduction Kind>
std::int64_t reduce_lanes(unsigned mask, std::int64_t value, place where);

template <reduction Kind, class T>
inline T reduce_lanes_of(unsigned mask, T value, place where) {
  return static_cast<T>(reduce_lanes<Kind>(mask, static_cast<std::int64_t>(value), where));
}

} // namespace cuda_emulation

template <cuda_emulation::shuffled T>
inline T __shfl_sync(unsigned mask, T value, int source, int width = 32,
                     cuda_emulation::place where = cuda_emulation::place::here()) {
  return cuda_emulation::exchange<cuda_emulation::shuffle::index>(mask, value, source, width, where);
}
template <cuda_emulation::shuffled T>
inline T __shfl_up_sync(unsigned mask, T value, unsigned distance, int width = 32,
                        cuda_emulation::place where = cuda_emulation::place::here()) {
  return cuda_emulation::exchange<cuda_emulation::shuffle::up>(mask, value, static_cast<int>(distance), width,
                                                               where);
}
template <cuda_emulation::shuffled T>
inline T __shfl_down_sync(unsigned mask, T value, unsigned distance, int width = 32,
                          cuda_emulation::place where = cuda_emulation::place::here()) {
  return cuda_emulation::exchange<cuda_emulation::shuffle::down>(mask, value, static_cast<int>(distance),
                                                                 width, where);
}
template <cuda_emulation::shuffled T>
inline T __shfl_xor_sync(unsigned mask, T value, int lanes, int width = 32,
                         cuda_emulation::place where = cuda_emulation::place::here()) {
  return cuda_emulation::exchange<cuda_emulation::shuffle::exclusive_or>(mask, value, lanes, width, where);
}

inline unsigned __ballot_sync(unsigned mask, int predicate,
                              cuda_emulation::place where = cuda_emulation::place::here()) {
  return cuda_emulation::ballot(mask, predicate != 0, where);
}
inline int __any_sync(unsigned mask, int predicate,
                      cuda_emulation::place where = cuda_emulation::place::here()) {
  return __ballot_sync(mask, predicate, where) != 0;
}
inline int __all_sync(unsigned mask, int predicate,
                      cuda_emulation::place where = cuda_emulation::place::here()) {
  return __ballot_sync(mask, predicate == 0, where) == 0;
}
inline unsigned __activemask() {
  return cuda_emulation::active_lanes();
}
template <class T>
inline unsigned __match_any_sync(unsigned mask, T value,
                                 cuda_emulation::place where = cuda_emulation::place::here()) {
  std::uint64_t bits = 0;
  std::memcpy(&bits, &value, sizeof(value));
  return cuda_emulation::match(mask, bits, where);
}

inline unsigned __reduce_add_sync(unsigned mask, unsigned value,
                                  cuda_emulation::place where = cuda_emulation::place::here()) {
  return cuda_emulation::reduce_lanes_of<cuda_emulation::reduction::sum>(mask, value, where);
}
inline int __reduce_add_sync(unsigned mask, int value,
                             cuda_emulation::place where = cuda_emulation::place::here()) {
  return cuda_emulation::reduce_lanes_of<cuda_emulation::reduction::sum>(mask, value, where);
}
inline unsigned __reduce_min_sync(unsigned mask, unsigned value,
                                  cuda_emulation::place where = cuda_emulation::place::here()) {
  return cuda_emulation::reduce_lanes_of<cuda_emulation::reduction::least>(mask, value, where);
}
inline int __reduce_min_sync(unsigned mask, int value,
                             cuda_emulation::place where = cuda_emulation::place::here()) {
  return cuda_emulation::reduce_lanes_of<cuda_emulation::reduction::least>(mask, value, where);
}
inline unsigned __reduce_max_sync(unsigned mask, unsigned value,
                                  cuda_emulation::place where = cuda_emulation::place::here()) {
  return cuda_emulation::reduce_lanes_of<cuda_emulation::reduction::greatest>(mask, value, where);
}
inline int __reduce_max_sync(unsigned mask, int value,
                             cuda_emulation::place where = cuda_emulation::place::here()) {
  return cuda_emulation::reduce_lanes_of<cuda_emulation::reduction::greatest>(mask, value, where);
}
inline unsigned __reduce_and_sync(unsigned mask, unsigned value,
                                  cuda_emulation::place where = cuda_emulation::place::here()) {
  return cuda_emulation::reduce_lanes_of<cuda_emulation::reduction::all_bits>(mask, value, where);
}
inline unsigned __reduce_or_sync(unsigned mask, unsigned value,
                                 cuda_emulation::place where = cuda_emulation::place::here()) {
  return cuda_emulation::reduce_lanes_of<cuda_emulation::reduction::any_bits>(mask, value, where);
}
inline unsigned __reduce_xor_sync(unsigned mask, unsigned value,
                                  cuda_emulation::place where = cuda_emulation::place::here()) {
  return cuda_emulation::reduce_lanes_of<cuda_emulation::reduction::odd_bits>(mask, value, where);
}

// ---- atomics

namespace cuda_emulation {
template <class T, class F>
__attribute__((no_sanitize("thread"))) inline T atomic_update(T* address, F f) {
  atomic_access(address, sizeof(T));
  T old;
  __atomic_load(address, &old, __ATOMIC_RELAXED);
  for (;;) {
    T updated = f(old);
    if (__atomic_compare_exchange(address, &old, &updated, false, __ATOMIC_ACQ_REL, __ATOMIC_RELAXED))
      return old;
  }
}
template <class T>
concept atomic_integer = std::is_same_v<T, int> || std::is_same_v<T, unsigned> ||
    std::is_same_v<T, unsigned long long> || std::is_same_v<T, long long>;
template <class T>
concept atomic_number = atomic_integer<T> || std::is_same_v<T, float> || std::is_same_v<T, double>;
} // namespace cuda_emulation

template <cuda_emulation::atomic_number T>
inline T atomicAdd(T* address, std::type_identity_t<T> value) {
  return cuda_emulation::atomic_update(address, [value](T old) { return static_cast<T>(old + value); });
}
template <cuda_emulation::atomic_integer T>
inline T atomicSub(T* address, std::type_identity_t<T> value) {
  return cuda_emulation::atomic_update(address, [value](T old) { return static_cast<T>(old - value); });
}
template <cuda_emulation::atomic_integer T>
inline T atomicMax(T* address, std::type_identity_t<T> value) {
  return cuda_emulation::atomic_update(address, [value](T old) { return old < value ? value : old; });
}
template <cuda_emulation::atomic_integer T>
inline T atomicMin(T* address, std::type_identity_t<T> value) {
  return cuda_emulation::atomic_update(address, [value](T old) { return value < old ? value : old; });
}
template <cuda_emulation::atomic_integer T>
inline T atomicAnd(T* address, std::type_identity_t<T> value) {
  return cuda_emulation::atomic_update(address, [value](T old) { return static_cast<T>(old & value); });
}
template <cuda_emulation::atomic_integer T>
inline T atomicOr(T* address, std::type_identity_t<T> value) {
  return cuda_emulation::atomic_update(address, [value](T old) { return static_cast<T>(old | value); });
}
template <cuda_emulation::atomic_integer T>
inline T atomicXor(T* address, std::type_identity_t<T> value) {
  return cuda_emulation::atomic_update(address, [value](T old) { return static_cast<T>(old ^ value); });
}
template <cuda_emulation::atomic_number T>
inline T atomicExch(T* address, std::type_identity_t<T> value) {
  return cuda_emulation::atomic_update(address, [value](T) { return value; });
}
template <cuda_emulation::atomic_integer T>
inline T atomicCAS(T* address, std::type_identity_t<T> expected, std::type_identity_t<T> value) {
  return cuda_emulation::atomic_update(address, [=](T old) { return old == expected ? value : old; });
}
inline unsigned atomicInc(unsigned* address, unsigned limit) {
  return cuda_emulation::atomic_update(address, [=](unsigned old) { return old >= limit ? 0 : old + 1; });
}
inline unsigned atomicDec(unsigned* address, unsigned limit) {
  return cuda_emulation::atomic_update(
      address, [=](unsigned old) { return old == 0 || old > limit ? limit : old - 1; });
}

// ---- arithmetic
// On a device the approximate functions are less exact than these.

inline float rsqrtf(float x) {
  return 1.0f / std::sqrt(x);
}
inline double rsqrt(double x) {
  return 1.0 / std::sqrt(x);
}
inline float __frsqrt_rn(float x) {
  return 1.0f / std::sqrt(x);
}
inline float __fsqrt_rn(float x) {
  return std::sqrt(x);
}
inline float __frcp_rn(float x) {
  return 1.0f / x;
}
inline float __fdividef(float x, float y) {
  return x / y;
}
inline float __fdiv_rn(float x, float y) {
  return x / y;
}
inline float __fadd_rn(float x, float y) {
  return x + y;
}
inline float __fsub_rn(float x, float y) {
  return x - y;
}
inline float __fmul_rn(float x, float y) {
  return x * y;
}
inline float __fmaf_rn(float x, float y, float z) {
  return std::fma(x, y, z);
}
inline double __dadd_rn(double x, double y) {
  return x + y;
}
inline double __dmul_rn(double x, double y) {
  return x * y;
}
inline double __fma_rn(double x, double y, double z) {
  return std::fma(x, y, z);
}
inline float __tessera_expf(float x) {
  return std::exp(x);
}
inline float __tessera_logf(float x) {
  return std::log(x);
}
// The C library has hidden functions of these names.
#define __expf __tessera_expf
#define __logf __tessera_logf
#define __exp2f(x) std::exp2(static_cast<float>(x))
#define __log2f(x) std::log2(static_cast<float>(x))
#define __log10f(x) std::log10(static_cast<float>(x))
#define __sinf(x) std::sin(static_cast<float>(x))
#define __cosf(x) std::cos(static_cast<float>(x))
#define __powf(x, y) std::pow(static_cast<float>(x), static_cast<float>(y))
inline float __saturatef(float x) {
  return x >= 1.0f ? 1.0f : x > 0.0f ? x : 0.0f;
}

inline int __float_as_int(float x) {
  return std::bit_cast<int>(x);
}
inline unsigned __float_as_uint(float x) {
  return std::bit_cast<unsigned>(x);
}
inline float __int_as_float(int x) {
  return std::bit_cast<float>(x);
}
inline float __uint_as_float(unsigned x) {
  return std::bit_cast<float>(x);
}
inline long long __double_as_longlong(double x) {
  return std::bit_cast<long long>(x);
}
inline double __longlong_as_double(long long x) {
  return std::bit_cast<double>(x);
}
inline int __float2int_rn(float x) {
  return static_cast<int>(std::nearbyint(x));
}
inline int __float2int_rz(float x) {
  return static_cast<int>(x);
}
inline int __float2int_rd(float x) {
  return static_cast<int>(std::floor(x));
}
inline int __float2int_ru(float x) {
  return static_cast<int>(std::ceil(x));
}
inline unsigned __float2uint_rn(float x) {
  return static_cast<unsigned>(std::nearbyint(x));
}
inline float __int2float_rn(int x) {
  return static_cast<float>(x);
}
inline float __uint2float_rn(unsigned x) {
  return static_cast<float>(x);
}
inline float __double2float_rn(double x) {
  return static_cast<float>(x);
}

inline int __popc(unsigned x) {
  return std::popcount(x);
}
inline int __popcll(unsigned long long x) {
  return std::popcount(x);
}
inline int __clz(int x) {
  return std::countl_zero(static_cast<unsigned>(x));
}
inline int __clzll(long long x) {
  return std::countl_zero(static_cast<unsigned long long>(x));
}
inline int __ffs(int x) {
  return x == 0 ? 0 : std::countr_zero(static_cast<unsigned>(x)) + 1;
}
inline int __ffsll(long long x) {
  return x == 0 ? 0 : std::countr_zero(static_cast<unsigned long long>(x)) + 1;
}
inline unsigned __brev(unsigned x) {
  unsigned reversed = 0;
  for (int i = 0; i < 32; ++i) reversed |= (x >> i & 1u) << (31 - i);
  return reversed;
}
inline int __mulhi(int x, int y) {
  return static_cast<int>(static_cast<long long>(x) * y >> 32);
}
inline unsigned __umulhi(unsigned x, unsigned y) {
  return static_cast<unsigned>(static_cast<unsigned long long>(x) * y >> 32);
}
inline unsigned long long __umul64hi(unsigned long long x, unsigned long long y) {
  __extension__ using wide = unsigned __int128;
  return static_cast<unsigned long long>(static_cast<wide>(x) * y >> 64);
}
inline unsigned __byte_perm(unsigned x, unsigned y, unsigned selector) {
  auto const bytes = static_cast<unsigned long long>(y) << 32 | x;
  unsigned result = 0;
  for (int i = 0; i < 4; ++i) {
    auto const select = selector >> (4 * i) & 0xfu;
    auto byte = static_cast<unsigned>(bytes >> (8 * (select & 7u))) & 0xffu;
    if (select & 8u) byte = byte & 0x80u ? 0xffu : 0u;
    result |= byte << (8 * i);
  }
  return result;
}
inline unsigned __funnelshift_l(unsigned low, unsigned high, unsigned shift) {
  auto const both = static_cast<unsigned long long>(high) << 32 | low;
  return static_cast<unsigned>(both << (shift & 31u) >> 32);
}
inline unsigned __funnelshift_r(unsigned low, unsigned high, unsigned shift) {
  auto const both = static_cast<unsigned long long>(high) << 32 | low;
  return static_cast<unsigned>(both >> (shift & 31u));
}

template <class T>
inline T __ldg(T const* from) {
  return *from;
}
template <class T>
inline T __ldcs(T const* from) {
  return *from;
}
template <class T>
inline T __ldcg(T const* from) {
  return *from;
}
template <class T>
inline void __stcs(T* to, T value) {
  *to = value;
}
template <class T>
inline void __stcg(T* to, T value) {
  *to = value;
}

inline int min(int a, int b) {
  return b < a ? b : a;
}
inline unsigned min(unsigned a, unsigned b) {
  return b < a ? b : a;
}
inline long min(long a, long b) {
  return b < a ? b : a;
}
inline long long min(long long a, long long b) {
  return b < a ? b : a;
}
inline unsigned long min(unsigned long a, unsigned long b) {
  return b < a ? b : a;
}
inline unsigned long long min(unsigned long long a, unsigned long long b) {
  return b < a ? b : a;
}
inline float min(float a, float b) {
  return std::fmin(a, b);
}
inline double min(double a, double b) {
  return std::fmin(a, b);
}
inline int max(int a, int b) {
  return a < b ? b : a;
}
inline unsigned max(unsigned a, unsigned b) {
  return a < b ? b : a;
}
inline long max(long a, long b) {
  return a < b ? b : a;
}
inline long long max(long long a, long long b) {
  return a < b ? b : a;
}
inline unsigned long max(unsigned long a, unsigned long b) {
  return a < b ? b : a;
}
inline unsigned long long max(unsigned long long a, unsigned long long b) {
  return a < b ? b : a;
}
inline float max(float a, float b) {
  return std::fmax(a, b);
}
inline double max(double a, double b) {
  return std::fmax(a, b);
}

#endif
