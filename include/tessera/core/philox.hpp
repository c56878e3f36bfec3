/// Random numbers addressed by index instead of drawn in turn: Philox4x32-10 (Salmon, Moraes, Dror and Shaw,
/// "Parallel random numbers: as easy as 1, 2, 3", 2011). Element i of stream s under seed k is the same
/// number whoever asks, in whatever order, on whatever rank.
///
///     philox random(seed, stream);
///     float u = random.uniform(global_index);   // in [0, 1)
///     float g = random.normal(global_index);    // mean 0, variance 1
#ifndef TESSERA_CORE_PHILOX_HPP
#define TESSERA_CORE_PHILOX_HPP

#include <cmath>
#include <cstdint>

#include <tessera/core/abi.hpp>

namespace tessera::inline TESSERA_ABI {

class philox {
public:
  struct block {
    std::uint32_t word[4];
  };

  TESSERA_HOST_DEVICE constexpr explicit philox(std::uint64_t seed, std::uint64_t stream = 0) noexcept
      : seed_(seed), stream_(stream) {}

  /// The bijection itself: ten rounds over a 128-bit counter under a 64-bit key.
  static TESSERA_HOST_DEVICE constexpr block rounds(block counter, std::uint32_t key0,
                                                    std::uint32_t key1) noexcept {
    for (int round = 0; round < 10; ++round) {
      auto const product0 = std::uint64_t{0xD2511F53u} * counter.word[0];
      auto const product1 = std::uint64_t{0xCD9E8D57u} * counter.word[2];
      counter = {{static_cast<std::uint32_t>(product1 >> 32) ^ counter.word[1] ^ key0,
                  static_cast<std::uint32_t>(product1),
                  static_cast<std::uint32_t>(product0 >> 32) ^ counter.word[3] ^ key1,
                  static_cast<std::uint32_t>(product0)}};
      key0 += 0x9E3779B9u;
      key1 += 0xBB67AE85u;
    }
    return counter;
  }

  /// Four random words: counter = (index, stream), key = seed.
  TESSERA_HOST_DEVICE constexpr block words(std::uint64_t index) const noexcept {
    return rounds({{static_cast<std::uint32_t>(index), static_cast<std::uint32_t>(index >> 32),
                    static_cast<std::uint32_t>(stream_), static_cast<std::uint32_t>(stream_ >> 32)}},
                  static_cast<std::uint32_t>(seed_), static_cast<std::uint32_t>(seed_ >> 32));
  }

  /// 32 random bits for one element. Elements 4q .. 4q + 3 share one evaluation of `words(q)`.
  TESSERA_HOST_DEVICE constexpr std::uint32_t bits(std::uint64_t index) const noexcept {
    // Chosen in two steps: an array with a computed index would not stay in a device's registers.
    auto const four = words(index / 4);
    auto const low = index % 2 == 0 ? four.word[0] : four.word[1];
    auto const high = index % 2 == 0 ? four.word[2] : four.word[3];
    return index % 4 < 2 ? low : high;
  }

  /// Uniform in [0, 1), a multiple of 2^-24.
  TESSERA_HOST_DEVICE constexpr float uniform(std::uint64_t index) const noexcept {
    return unit_interval(bits(index));
  }
  static TESSERA_HOST_DEVICE constexpr float unit_interval(std::uint32_t bits) noexcept {
    return static_cast<float>(bits >> 8) * 0x1p-24f;
  }

  /// Standard normal by Box and Muller, in double and rounded: elements 2q and 2q + 1 share a pair of
  /// uniforms. A device's double functions differ from the host's by a unit in the last place, so that a few
  /// of the rounded numbers do.
  TESSERA_HOST_DEVICE float normal(std::uint64_t index) const noexcept {
    auto const w = words(index / 2);
    auto const low = (std::uint64_t{w.word[1]} << 32 | w.word[0]) >> 11;
    auto const high = (std::uint64_t{w.word[3]} << 32 | w.word[2]) >> 11;
    auto const radius =
        std::sqrt(-2.0 * std::log((static_cast<double>(low) + 1.0) * 0x1p-53)); // log of (0, 1]
    auto const turn = static_cast<double>(high) * 0x1p-53;
#if defined(__CUDA_ARCH__)
    return static_cast<float>(radius * (index % 2 == 0 ? cospi(2 * turn) : sinpi(2 * turn)));
#else
    auto const angle = 6.283185307179586476925 * turn;
    return static_cast<float>(radius * (index % 2 == 0 ? std::cos(angle) : std::sin(angle)));
#endif
  }

private:
  std::uint64_t seed_;
  std::uint64_t stream_;
};

} // namespace tessera::inline TESSERA_ABI

#endif
