/// Tensors as files know them: element types, an entry of a safetensors file, and the record of a written
/// tensor that goes into a checkpoint's manifest.
#ifndef TESSERA_IO_TENSOR_ENTRY_HPP
#define TESSERA_IO_TENSOR_ENTRY_HPP

#include <cstdint>
#include <string>
#include <vector>

#include <tessera/core/extents.hpp>
#include <tessera/core/scalar.hpp>

namespace tessera::inline TESSERA_ABI::io {

/// Element types in the format's order: larger ones come first in a file.
enum class dtype {
  boolean,
  f4,
  f6_e2m3,
  f6_e3m2,
  u8,
  i8,
  f8_e5m2,
  f8_e4m3,
  f8_e8m0,
  f8_e4m3fnuz,
  f8_e5m2fnuz,
  i16,
  u16,
  f16,
  bf16,
  i32,
  u32,
  f32,
  c64,
  f64,
  i64,
  u64
};
inline constexpr int dtype_count = 22;

constexpr char const* name_of(dtype type) noexcept {
  constexpr char const* names[] = {"BOOL",    "F4",      "F6_E2M3", "F6_E3M2",     "U8",          "I8",
                                   "F8_E5M2", "F8_E4M3", "F8_E8M0", "F8_E4M3FNUZ", "F8_E5M2FNUZ", "I16",
                                   "U16",     "F16",     "BF16",    "I32",         "U32",         "F32",
                                   "C64",     "F64",     "I64",     "U64"};
  return names[static_cast<std::size_t>(type)];
}

constexpr int bits_of(dtype type) noexcept {
  constexpr int bits[] = {8, 4, 6, 6, 8, 8, 8, 8, 8, 8, 8, 16, 16, 16, 16, 32, 32, 32, 64, 64, 64, 64};
  return bits[static_cast<std::size_t>(type)];
}

/// One tensor of a file: [begin, end) are its bytes, counted from the start of the data.
struct tensor_entry {
  std::string name;
  dtype type = dtype::f32;
  std::vector<index_t> shape;
  index_t begin = 0;
  index_t end = 0;

  /// Elements; 1 for a scalar (no dimensions).
  index_t elements() const noexcept {
    index_t count = 1;
    for (auto extent : shape) count *= extent;
    return count;
  }
  /// Bytes that the shape takes, or -1 if a product overflows or the last byte is not full.
  index_t byte_count() const noexcept {
    index_t count = 1;
    auto const times = [&count](index_t factor) {
      return factor >= 0 && !__builtin_mul_overflow(count, factor, &count);
    };
    for (auto extent : shape)
      if (!times(extent)) return -1;
    return times(bits_of(type)) && count % 8 == 0 ? count / 8 : -1;
  }
  /// "[2, 3]", for messages.
  std::string shape_text() const {
    std::string text = "[";
    for (auto extent : shape) text += (text.size() > 1 ? ", " : "") + std::to_string(extent);
    return text + "]";
  }
};

/// The element type of a C++ type in a file.
template <class T>
constexpr dtype
dtype_of() noexcept requires storage_scalar<T> || std::integral<T> || std::same_as<T, double> {
  if constexpr (std::same_as<T, float>)
    return dtype::f32;
  else if constexpr (std::same_as<T, double>)
    return dtype::f64;
  else if constexpr (std::same_as<T, bf16>)
    return dtype::bf16;
  else if constexpr (std::same_as<T, fp16>)
    return dtype::f16;
  else if constexpr (std::same_as<T, bool>)
    return dtype::boolean;
  else {
    constexpr dtype with_sign[] = {dtype::i8, dtype::i16, dtype::i32, dtype::i64};
    constexpr dtype without[] = {dtype::u8, dtype::u16, dtype::u32, dtype::u64};
    constexpr auto power = sizeof(T) == 1 ? 0 : sizeof(T) == 2 ? 1 : sizeof(T) == 4 ? 2 : 3;
    return std::signed_integral<T> ? with_sign[power] : without[power];
  }
}

/// A C++ type that safetensors files can hold.
template <class T>
concept safetensors_scalar = requires {
  dtype_of<T>();
};

/// Where a written tensor stands in its file, and the checksum of its bytes (io/checksum.hpp).
struct tensor_record {
  std::string name;
  index_t offset = 0; ///< First byte, counted from the start of the file.
  index_t bytes = 0;
  std::uint64_t checksum = 0;
  friend bool operator==(tensor_record const&, tensor_record const&) = default;
};

} // namespace tessera::inline TESSERA_ABI::io

#endif
