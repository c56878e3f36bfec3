/// Rows from one storage type to another, in loops that vectorise.
#ifndef TESSERA_OPS_HOST_DETAIL_CONVERT_HPP
#define TESSERA_OPS_HOST_DETAIL_CONVERT_HPP

#include <cstring>

#include <tessera/core/extents.hpp>
#include <tessera/core/scalar.hpp>

namespace tessera::inline TESSERA_ABI::ops::host_detail {

/// float(value) without a branch: the 15 magnitude bits read as a tiny float, times 2^112; infinity and NaN
/// get the largest exponent.
inline float widened(fp16 value) noexcept {
  auto const magnitude = static_cast<std::uint32_t>(value.bits & 0x7fffu);
  auto const finite = std::bit_cast<std::uint32_t>(std::bit_cast<float>(magnitude << 13) * 0x1p112f);
  auto const exponent = magnitude >= 0x7c00u ? 0x7f800000u : 0u;
  return std::bit_cast<float>(finite | exponent | static_cast<std::uint32_t>(value.bits & 0x8000u) << 16);
}
inline float widened(bf16 value) noexcept {
  return value;
}
inline float widened(float value) noexcept {
  return value;
}

/// out = in, rounded where it must be; both may be the same memory. (A loop that assigns 16-bit elements as
/// they are is not vectorised: they are classes.)
template <storage_scalar Out, storage_scalar In>
void convert(Out* out, In const* in, index_t count) noexcept {
  if constexpr (std::same_as<Out, In>) {
    if (out != in) std::memmove(out, in, static_cast<std::size_t>(count) * sizeof(Out));
  } else {
    TESSERA_SIMD()
    for (index_t i = 0; i < count; ++i) store(out[i], widened(in[i]));
  }
}

template <storage_scalar T>
void fill_row(T* out, index_t count, float value) noexcept {
  TESSERA_SIMD()
  for (index_t i = 0; i < count; ++i) store(out[i], value);
}

} // namespace tessera::inline TESSERA_ABI::ops::host_detail

#endif
