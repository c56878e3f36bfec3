/// dropout on the host: random words for a block of elements at a time, several counters side by side in
/// vector registers, then one pass over the block.
#ifndef TESSERA_OPS_HOST_DROPOUT_HPP
#define TESSERA_OPS_HOST_DROPOUT_HPP

#include <algorithm>

#include <tessera/ops/dropout.hpp>
#include <tessera/ops/host/detail/convert.hpp>
#include <tessera/ops/host/detail/loops.hpp>

namespace tessera::inline TESSERA_ABI::ops {

template <>
struct dropout_on<exec::host_backend> {
  template <exec::host_space Ex, storage_scalar T, storage_scalar In, dropout_numbers Numbers>
  static void run(Ex& ex, view<T, 2> out, view<T const, 2> residual, view<In const, 2> in,
                  dropout_mask<Numbers> const& mask) {
    host_detail::for_elements(ex, in.size(), [&](index_t begin, index_t end) {
      for (index_t count = 0; begin < end; begin += count) {
        auto const numbers = mask.numbers(begin);
        count = std::min({end - begin, block, numbers.count});
        auto const* x = in.data() + begin;
        auto const* r = residual.data() == nullptr ? nullptr : residual.data() + begin;
        auto* y = out.data() + begin;
        std::uint32_t words[block + 4];
        if (mask.probability > 0) fill(words, mask.random, numbers.index / 4);
        auto const* bits = words + numbers.index % 4;
        if (mask.probability > 0 && r != nullptr) {
          TESSERA_SIMD()
          for (index_t i = 0; i < count; ++i)
            store(y[i], static_cast<float>(r[i]) + mask.apply(x[i], bits[i]));
        } else if (mask.probability > 0) {
          TESSERA_SIMD()
          for (index_t i = 0; i < count; ++i) store(y[i], mask.apply(x[i], bits[i]));
        } else if (r != nullptr) {
          TESSERA_SIMD()
          for (index_t i = 0; i < count; ++i)
            store(y[i], static_cast<float>(r[i]) + static_cast<float>(x[i]));
        } else {
          host_detail::convert(y, x, count);
        }
      }
    });
  }

private:
  static constexpr index_t block = 256;

  /// The words of the counters first .. first + block / 4, the last of which only an unaligned block needs.
  static void fill(std::uint32_t (&words)[block + 4], philox random, std::uint64_t first) {
    TESSERA_SIMD()
    for (index_t q = 0; q < block / 4 + 1; ++q) {
      auto const four = random.words(first + static_cast<std::uint64_t>(q));
      for (int w = 0; w < 4; ++w) words[4 * q + w] = four.word[w];
    }
  }
};

} // namespace tessera::inline TESSERA_ABI::ops

#endif
