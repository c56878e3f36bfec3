/// Every configuration trains the same model: ranks, ZeRO stage, sharding groups, accumulation and
/// micro-batch size change the weights of a real transformer by rounding only, with padding in the batch and
/// with dropout on. (tests/parallel/layouts.cpp has the other axes.)
#include "../nn/fixture.hpp"
#include "fixture.hpp"
#include <tessera/nn/initialise.hpp>
#include <tessera/nn/make_transformer.hpp>
#include <tessera/parallel/loss.hpp>
#include <tessera/parallel/zero.hpp>

using namespace tessera;
using namespace fixture;
using host = exec::host;

namespace {

constexpr index_t length = 9, steps = 3;

struct way {
  int ranks, zero;
  index_t micro_batch;
  int groups = 1; ///< Of hybrid sharding.
};

struct run {
  std::vector<float> weights;
  std::vector<double> losses, norms;
};

/// The plainest runner of units whose blocks are lent by ZeRO.
template <class T, class G>
class rank_of_run {
public:
  using state_type = parallel::zero<comm::threads, host, T, G>;

  rank_of_run(comm::threads& comm, nn::transformer_config const& config, way const& how)
      : inner_(comm.size() / how.groups), shards_(comm.split(comm.rank() / inner_, comm.rank())),
        replicas_(comm.split(comm.rank() % inner_, comm.rank())),
        units_(nn::make_transformer<host, T, G>(config)),
        state_({.gradients = shards_, .world = comm, .replicas = how.groups > 1 ? &replicas_ : nullptr}, ex_,
               blocks_of(units_), {.epsilon = 1e-5}, {.stage = how.zero, .bucket_bytes = 3000}),
        starts_(units_.size()) {
    // A larger epsilon than in practice: the gradient of the keys' bias is zero but for rounding, and Adam
    // would blow that rounding up to whole steps.
    nn::batch_shape const shape{how.micro_batch, length};
    index_t bytes = 0;
    for (auto const& u : units_) {
      u->reserve(1);
      bytes += u->kept_bytes(shape) + u->scratch_bytes(shape);
    }
    width_ = config.width;
    memory_ = arena<>(bytes + arena<>::bytes_for<nn::residual_scalar>(shape.tokens() * width_));
    state_.start_from(ex_, [&](std::size_t u, layout::range part, std::span<float> out) {
      nn::initialise(ex_, units_[u]->parameters(), part, out, 5);
    });
  }

  nn::loss_sum micro_batch(batch const& all, layout::range samples, index_t step, index_t number, bool last) {
    arena_scope const scope(memory_);
    nn::stream<host, T> s{.tokens = all.token_view(samples.begin, samples.end),
                          .targets = all.target_view(samples.begin, samples.end)};
    s.gradient = memory_.take<nn::residual_scalar, 2>({s.shape().tokens(), width_});
    nn::pass const p{.seed = 9,
                     .step = static_cast<std::uint64_t>(step),
                     .first_sample = samples.begin,
                     .accumulate = state_.accumulates(number)};
    typename state_type::blocks lent;
    auto const end = units_.size();
    for (std::size_t u = 0; u < end; ++u) {
      auto const is_last = u + 1 == end;
      lent = state_.lend(ex_, u, {.next = is_last ? u - 1 : u + 1, .gradients = is_last});
      starts_[u] = memory_.mark();
      units_[u]->forward(ex_, lent, s, memory_, p);
      if (!is_last) state_.done(u);
    }
    for (auto u = end; u-- > 0;) {
      if (u + 1 < end) lent = state_.lend(ex_, u, {.next = u > 0 ? u - 1 : parallel::no_unit});
      units_[u]->backward(ex_, lent, s, memory_, p);
      memory_.release(starts_[u]);
      state_.done(u);
      state_.gradients_ready(ex_, u, last);
    }
    return s.loss;
  }

  std::vector<float> weights() {
    std::vector<float> all;
    for (std::size_t u = 0; u < units_.size(); ++u) {
      for (auto w : state_.lend(ex_, u, {.gradients = false}).weights) all.push_back(static_cast<float>(w));
      state_.done(u);
    }
    return all;
  }
  state_type& state() { return state_; }
  host& space() { return ex_; }

private:
  static std::vector<parallel::zero_unit> blocks_of(nn::unit_list<host, T, G> const& units) {
    std::vector<parallel::zero_unit> blocks;
    for (auto const& u : units) blocks.push_back({.map = &u->parameters()});
    if (!units.back()->tied_to().empty()) blocks.back().tied = 0;
    return blocks;
  }

  host ex_{{.threads = 1}};
  int inner_;
  comm::threads shards_, replicas_;
  nn::unit_list<host, T, G> units_;
  state_type state_;
  std::vector<arena<>::position> starts_;
  arena<> memory_;
  index_t width_ = 0;
};

/// Trains on `samples` samples a step, which the ranks share in stretches as even as they go.
template <class T, class G>
std::vector<run> train(nn::transformer_config const& config, index_t samples, way const& how) {
  std::vector<run> runs(static_cast<std::size_t>(how.ranks));
  comm::run_threads(how.ranks, [&](comm::threads& comm) {
    rank_of_run<T, G> rank(comm, config, how);
    auto& mine = runs[static_cast<std::size_t>(comm.rank())];
    auto const part = layout::shard_of(samples, comm.size(), comm.rank());
    auto const most =
        (layout::shard_of(samples, comm.size(), 0).size() + how.micro_batch - 1) / how.micro_batch;
    for (index_t step = 0; step < steps; ++step) {
      batch const all(samples, length, config.vocabulary_size, static_cast<std::uint64_t>(100 + step));
      nn::loss_sum loss;
      for (index_t i = 0; i < most; ++i) {
        auto const first = std::min(part.begin + i * how.micro_batch, part.end),
                   last = std::min(first + how.micro_batch, part.end);
        if (first < last)
          loss += rank.micro_batch(all, {first, last}, step, i, i + 1 == most);
        else
          rank.state().nothing_to_add(rank.space(), i + 1 == most);
      }
      auto const done = rank.state().update(
          rank.space(), loss, {.step = step + 1, .learning_rate = 0.01, .clip_norm = step == 1 ? 0.5 : 0});
      mine.losses.push_back(parallel::mean_of(done.loss));
      mine.norms.push_back(done.gradient_norm);
    }
    mine.weights = rank.weights();
  });
  return runs;
}

std::vector<way> ways() {
  std::vector<way> all;
  for (int ranks : {1, 2, 3, 4})
    for (int zero : {0, 1, 2, 3})
      for (index_t micro_batch : {1, 2, 7})
        if (zero == 1 || micro_batch != 7) all.push_back({ranks, zero, micro_batch});
  for (int zero : {1, 2, 3}) all.push_back({4, zero, 2, 2});
  return all;
}

template <class T, class G>
void check_all_ways(nn::transformer_config const& config, index_t samples, double tolerance) {
  auto const alone = train<T, G>(config, samples, {1, 0, samples}).front();
  for (auto const& how : ways()) {
    CAPTURE(how.ranks);
    CAPTURE(how.zero);
    CAPTURE(how.micro_batch);
    CAPTURE(how.groups);
    auto const runs = train<T, G>(config, samples, how);
    CHECK(distance(runs.front().weights, alone.weights) < tolerance);
    CHECK(distance(runs.front().losses, alone.losses) < tolerance);
    CHECK(distance(runs.front().norms, alone.norms) < tolerance);
    for (auto const& each : runs) {
      CHECK(same_bits(each.weights, runs.front().weights));
      CHECK(each.losses == runs.front().losses);
      CHECK(each.norms == runs.front().norms);
    }
  }
}

} // namespace

TEST_CASE("GPT-2: any ranks, ZeRO stage and micro-batches train the same model") {
  check_all_ways<float, float>(odd_gpt2(), 7, 1e-5);
}

TEST_CASE("Llama: any ranks, ZeRO stage and micro-batches train the same model") {
  check_all_ways<float, float>(odd_llama(), 7, 1e-5);
}

TEST_CASE("With dropout on, whose masks follow the sample and not the rank") {
  auto gpt2 = odd_gpt2();
  gpt2.dropout = 0.25f;
  check_all_ways<float, float>(gpt2, 5, 1e-5);
  auto llama = odd_llama();
  llama.dropout = 0.25f;
  llama.tied_head = true;
  check_all_ways<float, float>(llama, 5, 1e-5);
}

TEST_CASE("With fewer samples than ranks, so that some ranks have none") {
  check_all_ways<float, float>(odd_gpt2(), 2, 1e-5);
}

TEST_CASE("With bf16 weights and fp32 gradients, within what bf16 activations round") {
  check_all_ways<bf16, float>(odd_llama(), 5, 1e-2);
}
