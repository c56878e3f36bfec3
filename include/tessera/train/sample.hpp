/// Chooses the next token from a model's logits: greedily at temperature 0, else at random from the softmax
/// of logits / temperature, cut to the `top_k` most probable tokens and to the smallest set of them whose
/// probabilities reach `top_p` (Holtzman et al., "The curious case of neural text degeneration", 2019). The
/// random number belongs to the token's index, so that a continuation does not depend on how it was made.
///
///     philox random(seed);
///     auto next = sample_token(logits, {.temperature = 0.8, .top_k = 50}, random, position);
#ifndef TESSERA_TRAIN_SAMPLE_HPP
#define TESSERA_TRAIN_SAMPLE_HPP

#include <algorithm>
#include <cmath>
#include <numeric>
#include <span>
#include <vector>

#include <tessera/core/extents.hpp>
#include <tessera/core/philox.hpp>

namespace tessera::inline TESSERA_ABI::train {

struct sampling {
  double temperature = 1; ///< Below 1: likely tokens become likelier; 0: always the most probable token.
  index_t top_k = 0;      ///< 0: all tokens.
  double top_p = 1;       ///< In (0, 1]; 1: all tokens.
};

/// Throws config_error for impossible options, numeric_error where no logit is finite or one is NaN.
inline std::int32_t sample_token(std::span<float const> logits, sampling const& options, philox const& random,
                                 std::uint64_t index, site where = site::here()) {
  if (!(options.temperature >= 0) || options.top_k < 0 || !(options.top_p > 0 && options.top_p <= 1))
    throw config_error("E-train-030", where, "temperature ", options.temperature, ", top_k ", options.top_k,
                       ", top_p ", options.top_p, ": the first two must be 0 or more, and top_p in (0, 1]");
  if (logits.empty()) throw size_error("E-train-031", where, "there are no logits to choose from");
  auto const first = std::max_element(logits.begin(), logits.end());
  auto const has_nan = std::any_of(logits.begin(), logits.end(), [](float x) { return std::isnan(x); });
  if (has_nan || !std::isfinite(*first))
    throw numeric_error("E-train-032", where, "the model's logits are not finite at token ", index,
                        "; the weights are broken");
  if (options.temperature == 0) return narrow<std::int32_t>(first - logits.begin());

  // Most probable first; equal logits in the order of their numbers, so that the order is one.
  std::vector<std::int32_t> order(logits.size());
  std::iota(order.begin(), order.end(), 0);
  auto const logit = [&](std::int32_t token) { return logits[static_cast<std::size_t>(token)]; };
  auto const kept =
      options.top_k == 0 ? order.size() : (std::min)(order.size(), static_cast<std::size_t>(options.top_k));
  auto const last = order.begin() + static_cast<std::ptrdiff_t>(kept);
  std::partial_sort(order.begin(), last, order.end(),
                    [&](auto a, auto b) { return logit(a) != logit(b) ? logit(a) > logit(b) : a < b; });
  order.erase(last, order.end());

  std::vector<double> until(order.size()); // probability, not normalised, of the tokens up to each one
  auto total = 0.0;
  for (std::size_t i = 0; i < order.size(); ++i)
    until[i] = total += std::exp((static_cast<double>(logit(order[i])) - *first) / options.temperature);
  auto const nucleus = std::lower_bound(until.begin(), until.end(), options.top_p * total);
  auto const end = nucleus == until.end() ? until.end() : nucleus + 1;

  auto const drawn = random.uniform(index) * *(end - 1);
  auto const chosen = std::upper_bound(until.begin(), end, drawn);
  return order[static_cast<std::size_t>((chosen == end ? end - 1 : chosen) - until.begin())];
}

} // namespace tessera::inline TESSERA_ABI::train

#endif
