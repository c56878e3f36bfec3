/// Where in its whole sequence a token stands that this rank holds. A decoder goes on behind what it was fed;
/// under context parallelism a rank holds one stretch of the sequence, or two (the zig-zag assignment).
///
///     ops::rotary(ex, q, {.positions = {.first = fed}});
///     ops::rotary(ex, q, {.positions = {.first = 128, .split = 64, .second = 704}});   // 64 tokens, then
///     positions(70);                                                                   // 710
#ifndef TESSERA_OPS_TOKEN_POSITIONS_HPP
#define TESSERA_OPS_TOKEN_POSITIONS_HPP

#include <limits>
#include <string>

#include <tessera/core/extents.hpp>

namespace tessera::inline TESSERA_ABI::ops {

/// Local tokens [0, split) stand at first, first + 1, ...; those from `split` on at second, second + 1, ...
struct token_positions {
  index_t first = 0;
  index_t split = (std::numeric_limits<index_t>::max)();
  index_t second = 0;

  TESSERA_HOST_DEVICE constexpr index_t operator()(index_t token) const noexcept {
    return token < split ? first + token : second + (token - split);
  }

  /// Tokens of the first stretch, of `count` in all.
  TESSERA_HOST_DEVICE constexpr index_t before_split(index_t count) const noexcept {
    return split < count ? split : count;
  }

  /// Which of `count` tokens stands at a position; -1 where none does.
  TESSERA_HOST_DEVICE constexpr index_t token_at(index_t position, index_t count) const noexcept {
    auto const head = before_split(count);
    if (position >= first && position - first < head) return position - first;
    if (position >= second && position - second < count - head) return head + (position - second);
    return -1;
  }

  /// Whether `count` tokens stand in [0, end), no two in one place.
  constexpr bool fit(index_t count, index_t end) const noexcept {
    auto const head = before_split(count), tail = count - head;
    auto const stretch_fits = [end](index_t begin, index_t size) {
      return begin >= 0 && (size == 0 || (size <= end && begin <= end - size));
    };
    return split >= 0 && stretch_fits(first, head) && stretch_fits(second, tail) &&
           (head == 0 || tail == 0 || second >= first + head || first >= second + tail);
  }

  /// One more than the last position of `count` tokens that fit.
  constexpr index_t end(index_t count) const noexcept {
    auto const head = before_split(count), tail = count - head;
    auto const of_first = head > 0 ? first + head : 0, of_second = tail > 0 ? second + tail : 0;
    return of_first > of_second ? of_first : of_second;
  }

  /// "5 + 7" or, of two stretches, "5 + 7 and 40 + 2": first position and number of tokens, for messages.
  std::string text(index_t count) const {
    auto const head = before_split(count);
    auto result = std::to_string(first) + " + " + std::to_string(head);
    if (head < count) result += " and " + std::to_string(second) + " + " + std::to_string(count - head);
    return result;
  }

  friend constexpr bool operator==(token_positions const&, token_positions const&) = default;
};

} // namespace tessera::inline TESSERA_ABI::ops

#endif
