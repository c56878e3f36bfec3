/// The part of CUB that works on a whole device.
#include <algorithm>
#include <cstring>
#include <numeric>
#include <vector>

#include <cub/device/device_radix_sort.cuh>

#include <cuda_emulation/library.hpp>

namespace cuda_emulation {
cudaError_t finish_call(char const* name, cudaError_t error);

namespace {

/// Bits that are ordered as the keys are.
std::uint64_t ordered_bits(unsigned char const* key, sort_call const& call) {
  std::uint64_t bits = 0;
  std::memcpy(&bits, key, call.key_bytes);
  auto const sign = std::uint64_t{1} << (8 * call.key_bytes - 1);
  auto const all = sign | (sign - 1);
  if (call.is_float)
    bits = (bits & sign) != 0 ? ~bits & all : bits | sign;
  else if (call.is_signed)
    bits ^= sign;
  auto const width = call.end_bit - call.begin_bit;
  bits >>= call.begin_bit;
  return width >= 64 ? bits : bits & ((std::uint64_t{1} << width) - 1);
}

void sort_now(sort_call const& call) {
  auto const n = call.count;
  if (!read_memory(call.keys_in, n * call.key_bytes, call.name) ||
      (call.values_in != nullptr && !read_memory(call.values_in, n * call.value_bytes, call.name)))
    return;
  std::vector<unsigned char> keys(n * call.key_bytes), values(n * call.value_bytes);
  std::memcpy(keys.data(), call.keys_in, keys.size());
  if (!values.empty()) std::memcpy(values.data(), call.values_in, values.size());
  std::vector<std::uint64_t> bits(n);
  for (std::size_t i = 0; i < n; ++i) bits[i] = ordered_bits(keys.data() + i * call.key_bytes, call);
  std::vector<std::size_t> order(n);
  std::iota(order.begin(), order.end(), std::size_t{0});
  std::stable_sort(order.begin(), order.end(),
                   [&](auto a, auto b) { return call.descending ? bits[b] < bits[a] : bits[a] < bits[b]; });
  if (!write_memory(call.keys_out, keys.size(), call.name) ||
      (!values.empty() && !write_memory(call.values_out, values.size(), call.name)))
    return;
  for (std::size_t i = 0; i < n; ++i) {
    std::memcpy(static_cast<unsigned char*>(call.keys_out) + i * call.key_bytes,
                keys.data() + order[i] * call.key_bytes, call.key_bytes);
    if (!values.empty())
      std::memcpy(static_cast<unsigned char*>(call.values_out) + i * call.value_bytes,
                  values.data() + order[i] * call.value_bytes, call.value_bytes);
  }
}

} // namespace

cudaError_t sort(sort_call const& call) {
  auto error = begin_call(call.name);
  // More than nothing, and dependent on the count, so that a caller who asks for another count is found out.
  auto const wanted = call.count * (call.key_bytes + call.value_bytes) + 1;
  if (error != cudaSuccess) {
  } else if (call.temporary == nullptr) {
    *call.temporary_bytes = wanted;
  } else if (*call.temporary_bytes < wanted) {
    error = cudaErrorInvalidValue;
  } else {
    error = enqueue(call.stream, call.name, [call, wanted] {
      if (call.count > 0 && write_memory(call.temporary, wanted, call.name)) sort_now(call);
      return true;
    });
  }
  return finish_call(call.name, error);
}

} // namespace cuda_emulation
