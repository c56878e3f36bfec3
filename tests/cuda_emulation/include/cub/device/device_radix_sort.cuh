// The emulation's stand-in for CUB's header of this name.
#ifndef TESSERA_CUDA_EMULATION_CUB_DEVICE_RADIX_SORT_CUH
#define TESSERA_CUDA_EMULATION_CUB_DEVICE_RADIX_SORT_CUH

#include <cstddef>
#include <type_traits>

#include <cuda_runtime.h>

namespace cuda_emulation {

struct sort_call {
  char const* name;
  void* temporary;
  std::size_t* temporary_bytes;
  void const* keys_in;
  void* keys_out;
  void const* values_in; // null: none
  void* values_out;
  std::size_t key_bytes, value_bytes, count;
  bool is_signed, is_float, descending;
  int begin_bit, end_bit;
  cudaStream_t stream;
};
/// Stable; with `temporary` null it only says how much memory it would want.
cudaError_t sort(sort_call const& call);

} // namespace cuda_emulation

namespace cub {

struct DeviceRadixSort {
  template <class Key, class Value, class Count>
  static cudaError_t SortPairs(void* temporary, std::size_t& temporary_bytes, Key const* keys_in,
                               Key* keys_out, Value const* values_in, Value* values_out, Count count,
                               int begin_bit = 0, int end_bit = sizeof(Key) * 8,
                               cudaStream_t stream = nullptr) {
    return cuda_emulation::sort({"cub::DeviceRadixSort::SortPairs", temporary, &temporary_bytes, keys_in,
                                 keys_out, values_in, values_out, sizeof(Key), sizeof(Value),
                                 static_cast<std::size_t>(count), std::is_signed_v<Key>,
                                 std::is_floating_point_v<Key>, false, begin_bit, end_bit, stream});
  }
  template <class Key, class Value, class Count>
  static cudaError_t SortPairsDescending(void* temporary, std::size_t& temporary_bytes, Key const* keys_in,
                                         Key* keys_out, Value const* values_in, Value* values_out,
                                         Count count, int begin_bit = 0, int end_bit = sizeof(Key) * 8,
                                         cudaStream_t stream = nullptr) {
    return cuda_emulation::sort({"cub::DeviceRadixSort::SortPairsDescending", temporary, &temporary_bytes,
                                 keys_in, keys_out, values_in, values_out, sizeof(Key), sizeof(Value),
                                 static_cast<std::size_t>(count), std::is_signed_v<Key>,
                                 std::is_floating_point_v<Key>, true, begin_bit, end_bit, stream});
  }
  template <class Key, class Count>
  static cudaError_t SortKeys(void* temporary, std::size_t& temporary_bytes, Key const* keys_in,
                              Key* keys_out, Count count, int begin_bit = 0, int end_bit = sizeof(Key) * 8,
                              cudaStream_t stream = nullptr) {
    return cuda_emulation::sort({"cub::DeviceRadixSort::SortKeys", temporary, &temporary_bytes, keys_in,
                                 keys_out, nullptr, nullptr, sizeof(Key), 0, static_cast<std::size_t>(count),
                                 std::is_signed_v<Key>, std::is_floating_point_v<Key>, false, begin_bit,
                                 end_bit, stream});
  }
};

} // namespace cub

#endif
