/// How surprising a text is to the simplest models, in nats per byte: the marks that a trained model's loss
/// has to beat.
///
///     auto const marks = data::text_statistics_of(text);
///     marks.unigram_entropy;   // H(X): knows how often each byte occurs
///     marks.bigram_entropy;    // H(X_t | X_t-1): knows the byte before
///
/// Both are the entropies of the text's own counts (so the best possible values of such models on this very
/// text), with natural logarithms: H = -sum p ln p. The bigram entropy is over the bytes that have one before
/// them: -sum_ab p(ab) ln (p(ab) / p(a)). Texts too short to have any uncertainty give 0.
#ifndef TESSERA_DATA_TEXT_STATISTICS_HPP
#define TESSERA_DATA_TEXT_STATISTICS_HPP

#include <cmath>
#include <string_view>
#include <vector>

#include <tessera/core/extents.hpp>

namespace tessera::inline TESSERA_ABI::data {

struct text_statistics {
  index_t bytes = 0;
  double unigram_entropy = 0; ///< nats per byte
  double bigram_entropy = 0;  ///< nats per byte, given the byte before
};

namespace detail {

/// n ln n, the term of which entropies of counts are made: N H = N ln N - sum n ln n.
inline double times_own_log(index_t count) noexcept {
  auto const n = static_cast<double>(count);
  return count > 1 ? n * std::log(n) : 0.0;
}

} // namespace detail

/// One pass over the text.
inline text_statistics text_statistics_of(std::string_view text) {
  constexpr std::size_t values = 256;
  std::vector<index_t> pairs(values * values), single(values), before(values);
  for (std::size_t n = 0; n < text.size(); ++n) {
    auto const byte = static_cast<unsigned char>(text[n]);
    ++single[byte];
    if (n == 0) continue;
    auto const last = static_cast<unsigned char>(text[n - 1]);
    ++before[last];
    ++pairs[last * values + byte];
  }
  auto const sum_over = [](std::vector<index_t> const& counts) {
    double sum = 0;
    for (auto count : counts) sum += detail::times_own_log(count);
    return sum;
  };
  text_statistics result{static_cast<index_t>(text.size()), 0, 0};
  auto const per = [](double sum, index_t count) {
    return count > 0 && sum > 0 ? sum / static_cast<double>(count) : 0.0;
  };
  result.unigram_entropy = per(detail::times_own_log(result.bytes) - sum_over(single), result.bytes);
  result.bigram_entropy = per(sum_over(before) - sum_over(pairs), result.bytes - 1);
  return result;
}

} // namespace tessera::inline TESSERA_ABI::data

#endif
