/// In which order samples are visited: every epoch is a permutation of all samples of its own, computed, not
/// stored. The order depends on the seed and the number of samples and on nothing else, so any number of
/// ranks shares it, and resuming needs the position only.
///
///     data::sampler order(samples, {.seed = 7});
///     for (index_t position = resumed; ; ++position)    // rank r of R takes the positions that are its own
///       order.sample_at(position);
///
/// The permutation is a Feistel network (Luby and Rackoff, 1988) over the next power of four, with Philox as
/// its round function; numbers beyond the last sample are sent through again (Black and Rogaway, "Ciphers
/// with arbitrary finite domains", 2002). Cost: O(1) memory, at most four walks on average (more below 64
/// samples), about a microsecond.
#ifndef TESSERA_DATA_SAMPLER_HPP
#define TESSERA_DATA_SAMPLER_HPP

#include <tessera/core/extents.hpp>
#include <tessera/core/philox.hpp>
#include <tessera/layout/parameters.hpp>

namespace tessera::inline TESSERA_ABI::data {

/// A permutation of [0, size) chosen by a seed and a stream.
class keyed_permutation {
public:
  /// Throws size_error for a negative size.
  constexpr keyed_permutation(index_t size, std::uint64_t seed, std::uint64_t stream,
                              site where = site::here())
      : size_(size), random_(seed, stream) {
    if (size < 0) throw size_error("E-data-006", where, "a permutation of ", size, " elements");
    while (half_bits_ < 32 && std::uint64_t{1} << (2 * half_bits_) < static_cast<std::uint64_t>(size))
      ++half_bits_;
  }

  constexpr index_t size() const noexcept { return size_; }

  /// Where `at` is sent. Different places go to different places. Throws size_error outside [0, size).
  constexpr index_t operator()(index_t at, site where = site::here()) const {
    if (at < 0 || at >= size_)
      throw size_error("E-data-006", where, "element ", at, " of a permutation of ", size_);
    auto walker = static_cast<std::uint64_t>(at);
    do walker = network(walker);
    while (walker >= static_cast<std::uint64_t>(size_));
    return static_cast<index_t>(walker);
  }

private:
  static constexpr int rounds = 8;

  /// (left, right) -> (right, left xor f(round, right)), eight times: a permutation of [0, 4^half_bits).
  constexpr std::uint64_t network(std::uint64_t value) const noexcept {
    auto const mask = (std::uint64_t{1} << half_bits_) - 1;
    auto left = value >> half_bits_;
    auto right = value & mask;
    for (std::uint64_t round = 0; round < rounds; ++round) {
      auto const mixed = left ^ (random_.words(round << 32 | right).word[0] & mask);
      left = right;
      right = mixed;
    }
    return left << half_bits_ | right;
  }

  index_t size_;
  philox random_;
  int half_bits_ = 3;
};

struct sampler_options {
  std::uint64_t seed = 0;
  bool shuffle = true; ///< false: 0, 1, 2, ... in every epoch.
};

class sampler {
public:
  /// Throws size_error if there are no samples.
  explicit constexpr sampler(index_t samples, sampler_options options = {}, site where = site::here())
      : samples_(samples), options_(options) {
    if (samples < 1)
      throw size_error("E-data-007", where, "there is nothing to sample from: ", samples, " samples");
  }

  constexpr index_t samples() const noexcept { return samples_; }
  constexpr index_t epoch_of(index_t position) const noexcept { return position / samples_; }

  /// The sample at a position of the endless order; position p is the (p % samples)-th of epoch p / samples.
  /// Throws size_error for a negative position.
  constexpr index_t sample_at(index_t position, site where = site::here()) const {
    if (position < 0) throw size_error("E-data-007", where, "the position ", position, " is negative");
    auto const place = position % samples_;
    if (!options_.shuffle) return place;
    auto const stream =
        layout::stream_of("order of samples") + static_cast<std::uint64_t>(epoch_of(position));
    return keyed_permutation(samples_, options_.seed, stream)(place);
  }

private:
  index_t samples_;
  sampler_options options_;
};

} // namespace tessera::inline TESSERA_ABI::data

#endif
