/// What the tests of nn/ share: batches, small configs, and the distance of two lists of numbers.
#ifndef TESSERA_TESTS_NN_FIXTURE_HPP
#define TESSERA_TESTS_NN_FIXTURE_HPP

#include <cmath>
#include <vector>

#include <tessera/core/philox.hpp>
#include <tessera/nn/transformer_config.hpp>
#include <tessera/ops/cross_entropy.hpp>

namespace fixture {

using namespace tessera;

/// Tokens and targets of a batch; every seventh target is ignored, and sample 1 is padded from position 3 on.
struct batch {
  index_t samples, length;
  std::vector<std::int32_t> tokens, targets;

  batch(index_t samples_, index_t length_, index_t vocabulary, std::uint64_t seed = 1)
      : samples(samples_), length(length_) {
    philox random(seed, 7);
    for (index_t i = 0; i < samples * length; ++i) {
      auto const draw = random.words(static_cast<std::uint64_t>(i));
      tokens.push_back(static_cast<std::int32_t>(draw.word[0] % static_cast<std::uint32_t>(vocabulary)));
      targets.push_back(static_cast<std::int32_t>(draw.word[1] % static_cast<std::uint32_t>(vocabulary)));
      if (i % 7 == 6 || (i / length == 1 && i % length >= 3)) targets.back() = ops::ignore_index;
    }
  }
  /// Samples [begin, end).
  view<std::int32_t const, 2> token_view(index_t begin, index_t end) const {
    return {tokens.data() + begin * length, {end - begin, length}};
  }
  view<std::int32_t const, 2> target_view(index_t begin, index_t end) const {
    return {targets.data() + begin * length, {end - begin, length}};
  }
  view<std::int32_t const, 2> token_view() const { return token_view(0, samples); }
  view<std::int32_t const, 2> target_view() const { return target_view(0, samples); }
};

/// Odd sizes on purpose: no multiple of a vector, of a cache line or of each other.
inline nn::transformer_config odd_gpt2() {
  return {.vocabulary_size = 37,
          .sequence_length = 11,
          .width = 15,
          .layers = 2,
          .heads = 3,
          .feed_forward = 29,
          .initial_deviation = 0.2f};
}
inline nn::transformer_config odd_llama() {
  return {.family = nn::transformer_family::llama,
          .vocabulary_size = 41,
          .sequence_length = 11,
          .width = 24,
          .layers = 2,
          .heads = 4,
          .key_value_heads = 2,
          .feed_forward = 19,
          .tied_head = false,
          .initial_deviation = 0.2f};
}

/// |a - b| / |b| in the Euclidean norm; |a| where b is zero.
template <class A, class B>
double distance(A const& a, B const& b) {
  double difference = 0, size = 0;
  auto at = b.begin();
  for (auto x : a) {
    auto const y = static_cast<double>(*at++);
    difference += (static_cast<double>(x) - y) * (static_cast<double>(x) - y);
    size += y * y;
  }
  return std::sqrt(size > 0 ? difference / size : difference);
}

/// Numbers in [-1, 1) that depend on seed and index alone.
inline std::vector<float> numbers(index_t count, std::uint64_t seed) {
  philox random(seed, 11);
  std::vector<float> values(static_cast<std::size_t>(count));
  for (std::size_t i = 0; i < values.size(); ++i) values[i] = 2 * random.uniform(i) - 1;
  return values;
}

/// The inner product in double: a scalar loss whose gradient in `a` is `b`.
template <class A, class B>
double inner(A const& a, B const& b) {
  double sum = 0;
  auto at = b.begin();
  for (auto x : a) sum += static_cast<double>(x) * static_cast<double>(*at++);
  return sum;
}

/// d loss() / d at by central differences of fourth order: a step large enough for fp32, an error small
/// enough for a tight comparison.
template <class Loss>
double slope(Loss&& loss, float& at, float step = 0.03f) {
  auto const start = at;
  auto const value = [&](float offset) {
    at = start + offset;
    auto const l = loss();
    at = start;
    return l;
  };
  return (8 * (value(step) - value(-step)) - (value(2 * step) - value(-2 * step))) /
         (12 * static_cast<double>(step));
}

} // namespace fixture

#endif
