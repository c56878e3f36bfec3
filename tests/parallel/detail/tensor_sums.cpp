/// Parameters that tensor ranks cut, hold copies of, or have summands for: the same bits as whole on one
/// rank, each element counted once, whatever is shared among the data ranks besides.
#include <tessera/parallel/detail/tensor_sums.hpp>

#include <map>
#include <mutex>

#include "../zero_fixture.hpp"

using namespace tessera;
using namespace fixture;

namespace {

using state_type = zero<comm::threads, host, float, float>;
constexpr int tensor_ranks = 4;
constexpr index_t samples = 2, steps = 2;

/// What tensor rank `t` of `n` holds. Uneven shards shift what stands after them in the block.
layout::parameter_map map_of(int n, int t) {
  using enum layout::parameter_kind;
  layout::parameter_map map;
  auto const cut = layout::shard_of(45, n, t);
  auto const share = [&](layout::parameter_share s) { return n == 1 ? layout::parameter_share{} : s; };
  map.add("cut", {45, 3}, matrix, {}, share({.dimension = 0, .pieces = {cut}}));
  map.add("gain", {33}, norm_gain, {}, share({.copies = 4, .partial = true}));
  map.add("bias", {5}, bias, {}, share({.copies = 4, .partial = true}));
  // Two ranks share each of two heads.
  map.add("heads", {2, 50}, matrix, {},
          share({.dimension = 0, .pieces = {{t / 2, t / 2 + 1}}, .copies = 2, .partial = true}));
  map.add("same", {7}, norm_bias, {}, share({.copies = 4}));
  return map;
}

/// A number for an element of a whole parameter.
index_t number_of(layout::parameter const& p, index_t element) {
  return static_cast<index_t>(layout::stream_of(p.name) % 1000) * 1000 + element;
}
/// The gradient of a sample; of a parameter with summands, that of one of the four ranks, or of two.
float summand_of(index_t step, index_t sample, layout::parameter const& p, index_t element, int which) {
  return gradient_of(step, sample + 100 * which, number_of(p, element));
}

struct outcome {
  std::map<std::string, std::vector<float>> weights; ///< Whole.
  std::vector<double> norms;
};

/// World rank: data rank * n + tensor rank.
outcome train(int data, int n, zero_options const& options) {
  outcome found;
  std::mutex guard;
  auto const whole = map_of(1, 0);
  for (auto const& p : whole) found.weights[p.name].assign(static_cast<std::size_t>(p.whole_size()), NAN);
  comm::run_threads(data * n, [&](comm::threads& world) {
    host ex({.threads = 1});
    auto const t = world.rank() % n, d = world.rank() / n;
    auto shards = world.split(t, world.rank());
    auto neighbours = world.split(d, world.rank());
    auto const map = map_of(n, t);
    zero_ranks<comm::threads> const groups{
        .gradients = shards, .world = world, .tensor = n > 1 ? &neighbours : nullptr};
    state_type state(groups, ex, {{.map = &map}}, {}, options);
    auto const each = [&](layout::range part, auto&& f) {
      for (auto const& s : layout::segments_of(map, part))
        for (index_t i = 0; i < s.in_block.size(); ++i)
          f(*s.whole, s.in_block.begin + i, s.first_element + i);
    };
    state.start_from(ex, [&](std::size_t, layout::range part, std::span<float> out) {
      std::fill(out.begin(), out.end(), 0.0f);
      each(part, [&](auto const& p, index_t at, index_t element) {
        out[static_cast<std::size_t>(at - part.begin)] =
            first_value(static_cast<std::size_t>(number_of(p, element)));
      });
    });
    layout::range const block{0, map.block_size()};
    auto const mine = samples / data;
    for (index_t step = 0; step < steps; ++step) {
      for (index_t i = 0; i < mine; ++i) {
        auto const sample = d * mine + i;
        auto const lent = state.lend(ex, 0);
        each(block, [&](auto const& p, index_t at, index_t element) {
          auto& g = lent.gradients[static_cast<std::size_t>(at)];
          if (!state.accumulates(i)) g = 0;
          auto const summands = p.name == "gain" || p.name == "bias" ? 4 : p.name == "heads" ? 2 : 1;
          if (n == 1)
            for (int k = 0; k < summands; ++k) g += summand_of(step, sample, p, element, k);
          else
            g += summand_of(step, sample, p, element, t % summands);
        });
        state.done(0);
        state.gradients_ready(ex, 0, i + 1 == mine);
      }
      auto const done =
          state.update(ex, t == 0 ? nn::loss_sum{1.0 / data, static_cast<double>(mine)} : nn::loss_sum{},
                       {.step = step + 1, .learning_rate = 0.01, .clip_norm = 1});
      if (world.rank() == 0) found.norms.push_back(done.gradient_norm);
    }
    auto const lent = state.lend(ex, 0, {.gradients = false});
    std::scoped_lock lock(guard);
    each(block, [&](auto const& p, index_t at, index_t element) {
      auto& known = found.weights[p.name][static_cast<std::size_t>(element)];
      auto const here = lent.weights[static_cast<std::size_t>(at)];
      if (!std::isnan(known) && known != here)
        throw numeric_error("T", site::here(), "ranks differ in ", p.name);
      known = here;
    });
    state.done(0);
  });
  return found;
}

} // namespace

TEST_CASE("Cut, copied and summed parameters end as they do whole, and the norm counts each element once") {
  auto const expected = train(1, 1, {.stage = 0});
  for (int stage : {0, 1, 2, 3})
    for (int data : {1, 2}) {
      CAPTURE(stage);
      CAPTURE(data);
      auto const found = train(data, tensor_ranks, {.stage = stage});
      CHECK(found.norms == expected.norms);
      for (auto const& [name, weights] : expected.weights) {
        CAPTURE(name);
        CHECK(same_bits(found.weights.at(name), weights));
      }
    }
}
