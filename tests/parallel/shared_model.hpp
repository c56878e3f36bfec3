/// A small model shared by thread ranks along a mesh, run for one step, and its loss and gradients put
/// together again into whole parameters: what tests compare with one rank.
#ifndef TESSERA_TESTS_PARALLEL_SHARED_MODEL_HPP
#define TESSERA_TESTS_PARALLEL_SHARED_MODEL_HPP

#include <map>

#include <tessera/comm/threads.hpp>
#include <tessera/exec/copy.hpp>
#include <tessera/exec/host.hpp>
#include <tessera/layout/ownership.hpp>
#include <tessera/nn/make_transformer.hpp>
#include <tessera/nn/parameter_store.hpp>
#include <tessera/parallel/model_group.hpp>

#include "../nn/fixture.hpp"

namespace shared {

using namespace tessera;
using ex_t = exec::host;
using mesh_t = partition::mesh<comm::threads>;
using group_t = parallel::model_group<comm::threads>;

/// How a step is run.
struct manner {
  nn::recomputation recompute = nn::recomputation::none;
  bool split = false; ///< The backward in two parts, the second after the whole first.
  index_t micro_batches = 1;
};

/// One element of a parameter moved by some amount, on all ranks that hold it.
struct nudge {
  std::string parameter;
  index_t element = 0;
  float by = 0;
};

/// Element `index` of a parameter: small random numbers, gains near 1.
inline float value_of(layout::parameter const& p, index_t index, nudge const& moved) {
  auto const random = 2 * philox(layout::stream_of(p.name), 5).uniform(static_cast<std::uint64_t>(index)) - 1;
  auto const value = p.kind == layout::parameter_kind::norm_gain ? 1 + 0.3f * random : 0.3f * random;
  return p.name == moved.parameter && index == moved.element ? value + moved.by : value;
}

/// What one rank has after a step.
struct outcome {
  nn::loss_sum loss;
  std::vector<layout::parameter_map> maps;
  std::vector<std::vector<float>> gradients; ///< Of each map.
  index_t peak = 0, planned = 0;             ///< Bytes of activations.
  int tensor_rank = 0, context_rank = 0;
};

/// Units of either family, their weights stored as T. (A test that compiles for long makes its own.)
template <storage_scalar T = float>
struct any_family {
  using storage = T;

  template <class Ex, class Group>
  nn::unit_list<Ex, T, float> make(nn::transformer_config const& config, Group const& group) const {
    return nn::make_transformer<Ex, T, float>(config, group, {0, nn::unit_count(config)});
  }
};

/// One forward and backward over the batch. Tokens are whole; a rank picks its positions.
template <class Ex, class Group, class Family = any_family<>>
outcome run(Ex& ex, nn::transformer_config const& config, Group const& group, fixture::batch const& batch,
            manner how = {}, nudge const& moved = {}, Family const& family = {}) {
  using memory_t = typename Ex::memory;
  using T = typename Family::storage;
  auto units = family.template make<Ex>(config, group);
  nn::parameter_store<Ex, T, float> store(units);
  for (std::size_t u = 0; u < units.size(); ++u) {
    units[u]->recompute(how.recompute);
    std::vector<T> weights(static_cast<std::size_t>(store.unit_range(u).size()));
    for (auto const& part : layout::segments_of(units[u]->parameters(), {0, store.unit_range(u).size()}))
      for (index_t i = 0; i < part.in_block.size(); ++i)
        weights[static_cast<std::size_t>(part.in_block.begin + i)] =
            T(value_of(*part.whole, part.first_element + i, moved));
    copy(ex, store.weights(u), std::span<T const>(weights));
  }

  auto const length = group.local_sequence(batch.length);
  auto const places = group.positions(batch.length);
  tensor<std::int32_t, 2> host_tokens({batch.samples, length}), host_targets({batch.samples, length});
  for (index_t b = 0; b < batch.samples; ++b)
    for (index_t t = 0; t < length; ++t) {
      host_tokens(b, t) = batch.token_view()(b, places(t));
      host_targets(b, t) = batch.target_view()(b, places(t));
    }
  tensor<std::int32_t, 2, memory_t> tokens(host_tokens.extents()), targets(host_tokens.extents());
  copy(ex, tokens.span(), std::span<std::int32_t const>(host_tokens.span()));
  copy(ex, targets.span(), std::span<std::int32_t const>(host_targets.span()));

  outcome done;
  auto const rows_of = [&](index_t samples) { return group.rows(samples * length).size(); };
  auto const samples = batch.samples / how.micro_batches;
  nn::batch_shape const shape{samples, batch.length};
  index_t kept = arena<>::bytes_for<float>(rows_of(samples) * config.width), scratch = 0;
  for (auto const& u : units) {
    auto const for_weights = u->kept_for_weights_bytes(shape);
    kept += u->kept_bytes(shape) + (how.split ? for_weights : 0);
    scratch = (std::max)(scratch, u->scratch_bytes(shape));
  }
  done.planned = kept + scratch;
  arena<memory_t> memory(done.planned);

  tensor<double, 1, memory_t> totals({2});
  for (index_t m = 0; m < how.micro_batches; ++m) {
    arena_scope const scope(memory);
    auto const part = [&](auto& all) { return all.view().slice(0, m * samples, (m + 1) * samples); };
    nn::stream<Ex, T> s{.tokens = part(tokens),
                        .targets = part(targets),
                        .whole_length = batch.length,
                        .totals = totals.view()};
    s.gradient = memory.template take<float, 2>({rows_of(samples), config.width});
    nn::pass p{.seed = 3, .step = 4, .first_sample = 2 + m * samples, .accumulate = m > 0};
    for (std::size_t u = 0; u < units.size(); ++u) units[u]->forward(ex, store.lend(u), s, memory, p);
    p.part = how.split ? nn::backward_part::input : nn::backward_part::both;
    for (auto u = units.size(); u-- > 0;) units[u]->backward(ex, store.lend(u), s, memory, p);
    if (!how.split) continue;
    p.part = nn::backward_part::weights;
    for (auto u = units.size(); u-- > 0;) {
      auto lent = store.lend(u);
      lent.weights = {}; // not read
      units[u]->backward(ex, lent, s, memory, p);
    }
  }
  double sums[2];
  copy(ex, std::span<double>(sums), memory_span<double const, memory_t>(totals.span()));
  done.loss = {sums[0], sums[1]};
  done.peak = memory.peak();
  for (std::size_t u = 0; u < units.size(); ++u) {
    done.maps.push_back(units[u]->parameters());
    done.gradients.emplace_back(static_cast<std::size_t>(store.unit_range(u).size()));
    copy(ex, std::span<float>(done.gradients.back()), memory_span<float const, memory_t>(store.gradients(u)));
  }
  return done;
}

/// What all ranks have together.
struct whole_outcome {
  nn::loss_sum loss;
  std::map<std::string, std::vector<double>> gradients;
};

/// Losses and gradients over tensor x context ranks: each element counted once, as its parameter's share
/// says.
inline whole_outcome together(std::vector<outcome> const& ranks) {
  whole_outcome all;
  for (auto const& r : ranks) {
    all.loss += r.loss;
    for (std::size_t u = 0; u < r.maps.size(); ++u)
      for (auto const& part : layout::segments_of(r.maps[u], {0, r.maps[u].block_size()})) {
        auto const& p = *part.whole;
        auto& whole = all.gradients[p.name];
        whole.resize(static_cast<std::size_t>(p.whole_size()));
        if (!p.share.partial && !layout::counts(p, r.tensor_rank)) continue;
        for (index_t i = 0; i < part.in_block.size(); ++i)
          whole[static_cast<std::size_t>(part.first_element + i)] +=
              double{r.gradients[u][static_cast<std::size_t>(part.in_block.begin + i)]};
      }
  }
  return all;
}

/// The axes and choices of a group.
struct axes {
  int tensor = 1, context = 1;
  parallel::model_group_options options = {};
};

/// Runs body(ex, group) on tensor x context thread ranks, checked, and returns what each gave.
template <class Body>
auto on_ranks(axes const& on, Body body) {
  using result = decltype(body(std::declval<ex_t&>(), std::declval<group_t const&>()));
  std::vector<result> results(static_cast<std::size_t>(on.tensor * on.context));
  comm::run_threads(on.tensor * on.context,
                    [&](comm::threads& world) {
                      ex_t ex({.threads = 1});
                      mesh_t mesh(world, {.context = on.context, .tensor = on.tensor});
                      results[static_cast<std::size_t>(world.rank())] = body(ex, group_t(mesh, on.options));
                    },
                    {.checked = true, .stall_limit = 20});
  return results;
}

template <class Family = any_family<>>
std::vector<outcome> run_on(axes const& on, nn::transformer_config const& config, fixture::batch const& batch,
                            manner how = {}, nudge const& moved = {}, Family const& family = {}) {
  auto results = on_ranks(
      on, [&](ex_t& ex, group_t const& group) { return run(ex, config, group, batch, how, moved, family); });
  for (std::size_t r = 0; r < results.size(); ++r) {
    results[r].tensor_rank = narrow<int>(static_cast<index_t>(r)) % on.tensor;
    results[r].context_rank = narrow<int>(static_cast<index_t>(r)) / on.tensor;
  }
  return results;
}

} // namespace shared

#endif
