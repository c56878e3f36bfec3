/// A model without layers for the tests of parallel/zero.hpp: blocks of parameters, gaps between them, and
/// gradients that are small integers, so that every way of sharing the work must give the same bits. The last
/// unit is tied to the first, as a head is to the embedding.
#ifndef TESSERA_TESTS_PARALLEL_ZERO_FIXTURE_HPP
#define TESSERA_TESTS_PARALLEL_ZERO_FIXTURE_HPP

#include "fixture.hpp"
#include <tessera/parallel/zero.hpp>

namespace fixture {

using parallel::zero;
using parallel::zero_options;
using parallel::zero_ranks;
using parallel::zero_unit;
using host = exec::host;

/// Units smaller than a granule of ownership, an empty one, an empty parameter, gaps of all lengths.
inline std::vector<layout::parameter_map> toy_maps() {
  using enum layout::parameter_kind;
  std::vector<layout::parameter_map> maps(6);
  maps[0].add("table", {37, 9}, token_embedding, {});
  maps[0].add("positions", {11, 9}, position_embedding, {});
  maps[1].add("a.matrix", {33, 31}, matrix, {});
  maps[1].add("a.bias", {1}, bias, {});
  maps[1].add("a.empty", {0, 5}, matrix, {});
  maps[1].add("a.gain", {7}, norm_gain, {});
  maps[3].add("b.gain", {1}, norm_gain, {});
  maps[4].add("c.matrix", {64, 65}, matrix, {});
  maps[4].add_joined("c.more", {3}, matrix, {});
  maps[5].add("head.gain", {31}, norm_gain, {});
  return maps;
}
inline std::vector<zero_unit> toy_units(std::vector<layout::parameter_map> const& maps) {
  std::vector<zero_unit> units;
  for (auto const& map : maps) units.push_back({.map = &map});
  units.back().tied = 0;
  return units;
}
inline std::vector<std::size_t> toy_starts(std::vector<layout::parameter_map> const& maps) {
  std::vector<std::size_t> starts{0};
  for (auto const& map : maps) starts.push_back(starts.back() + static_cast<std::size_t>(map.block_size()));
  return starts;
}

/// The first value of an element, by its number in the model.
inline float first_value(std::size_t element) {
  return philox(3, 5).normal(element) * 0.5f;
}

/// Integers, or numbers whose sums depend on the order.
enum class toy_gradients { integer, real };

/// Runs micro-batches on a rank's state as a runner of units would.
template <class State>
class toy_rank {
public:
  using G =
      typename std::remove_cvref_t<decltype(std::declval<typename State::blocks>().gradients)>::value_type;

  toy_rank(State& state, host& ex, std::vector<layout::parameter_map> const& maps,
           toy_gradients kind = toy_gradients::integer)
      : state_(state), ex_(ex), maps_(maps), kind_(kind), starts_(toy_starts(maps)) {}

  void start() {
    state_.start_from(ex_, [&](std::size_t u, layout::range part, std::span<float> out) {
      std::fill(out.begin(), out.end(), 0.0f);
      for (auto const& s : layout::segments_of(maps_[u], part))
        for (auto e = s.in_block.begin; e < s.in_block.end; ++e)
          out[static_cast<std::size_t>(e - part.begin)] =
              first_value(starts_[u] + static_cast<std::size_t>(e));
    });
  }

  void forward(index_t step, index_t sample, index_t micro_batch) {
    auto const end = maps_.size();
    for (std::size_t u = 0; u + 1 < end; ++u) {
      (void)state_.lend(ex_, u, {.next = u + 1, .gradients = false});
      state_.done(u);
    }
    auto const lent = state_.lend(ex_, end - 1, {.next = end - 2, .micro_batch = micro_batch});
    // As the head does: the table's gradient first, and its own.
    write(0, lent.tied_gradients, 0, step, sample + 1000, state_.accumulates(micro_batch));
    for (std::size_t p = 0; p < maps_.back().size(); ++p)
      write(end - 1, lent.gradients, p, step, sample, state_.accumulates(micro_batch));
  }
  template <class After>
  void backward(index_t step, index_t sample, index_t micro_batch, bool last, After&& after) {
    auto const end = maps_.size();
    for (auto u = end; u-- > 0;) {
      if (u + 1 < end) {
        auto const lent =
            state_.lend(ex_, u, {.next = u > 0 ? u - 1 : parallel::no_unit, .micro_batch = micro_batch});
        for (std::size_t p = 0; p < maps_[u].size(); ++p)
          write(u, lent.gradients, p, step, sample, state_.accumulates(micro_batch) || (u == 0 && p == 0));
      }
      state_.done(u);
      state_.gradients_ready(ex_, u, last);
      after(u);
    }
  }
  void micro_batch(index_t step, index_t sample, index_t number, bool last) {
    forward(step, sample, number);
    backward(step, sample, number, last, [](std::size_t) {});
  }

  /// All weights as they are lent.
  std::vector<float> weights() {
    std::vector<float> all;
    for (std::size_t u = 0; u < maps_.size(); ++u) {
      auto const lent = state_.lend(ex_, u, {.gradients = false});
      for (auto w : lent.weights) all.push_back(static_cast<float>(w));
      state_.done(u);
    }
    return all;
  }

private:
  void write(std::size_t u, std::span<G> block, std::size_t p, index_t step, index_t sample,
             bool accumulate) {
    auto const where = maps_[u][p].where();
    for (auto e = where.begin; e < where.end; ++e) {
      auto& g = block[static_cast<std::size_t>(e)];
      auto const number = static_cast<index_t>(starts_[u]) + e;
      auto const one = kind_ == toy_gradients::integer
                           ? gradient_of(step, sample, number)
                           : philox(static_cast<std::uint64_t>(step), static_cast<std::uint64_t>(sample))
                                 .normal(static_cast<std::uint64_t>(number));
      g = G((accumulate ? static_cast<float>(g) : 0.0f) + one);
    }
  }

  State& state_;
  host& ex_;
  std::vector<layout::parameter_map> const& maps_;
  toy_gradients kind_;
  std::vector<std::size_t> starts_;
};

/// The gradient of a step: samples [0, samples), in fp64, gaps zero.
inline std::vector<double> toy_gradient(std::vector<layout::parameter_map> const& maps, index_t step,
                                        index_t samples) {
  auto const starts = toy_starts(maps);
  std::vector<double> sum(starts.back());
  for (std::size_t u = 0; u < maps.size(); ++u)
    for (auto const& p : maps[u])
      for (auto e = p.where().begin; e < p.where().end; ++e) {
        auto const at = starts[u] + static_cast<std::size_t>(e);
        for (index_t s = 0; s < samples; ++s) {
          sum[at] += gradient_of(step, s, static_cast<index_t>(at));
          if (u == 0 && &p == &maps[0][0]) sum[at] += gradient_of(step, s + 1000, static_cast<index_t>(at));
        }
      }
  return sum;
}

} // namespace fixture

#endif
