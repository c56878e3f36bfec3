/// What the tests of pipelines share: small models, a lender that holds this stage's blocks and its copy of a
/// tied embedding, and what one rank gives.
#ifndef TESSERA_TESTS_PARALLEL_PIPELINE_FIXTURE_HPP
#define TESSERA_TESTS_PARALLEL_PIPELINE_FIXTURE_HPP

#include <map>
#include <numeric>
#include <string>
#include <vector>

#include <nn/fixture.hpp>
#include <tessera/exec/host.hpp>
#include <tessera/nn/model.hpp>
#include <tessera/parallel/block_lender.hpp>

namespace fixture {

using host = exec::host;
using unit_list = nn::unit_list<host, float, float>;
using gradients_by_unit = std::map<std::string, std::vector<float>>;

/// Six blocks: enough for four stages of two chunks. Dropout shows whether each micro-batch, recomputed or
/// not, draws the masks of its own samples.
inline nn::transformer_config pipeline_gpt2() {
  auto config = odd_gpt2();
  config.layers = 6;
  config.dropout = 0.1f;
  return config;
}
inline nn::transformer_config pipeline_llama() {
  auto config = odd_llama();
  config.layers = 6;
  return config;
}

/// A step's micro-batches: some are smaller, one is empty.
struct step_batches {
  batch all;
  std::vector<layout::range> parts;

  explicit step_batches(index_t micro_batches, index_t vocabulary)
      : all(samples_of(micro_batches), 11, vocabulary) {
    for (index_t i = 0, at = 0; i < micro_batches; ++i) {
      parts.push_back({at, at + size_of(i)});
      at += size_of(i);
    }
  }
  static index_t size_of(index_t i) { return i == 1 ? 0 : i % 2 == 0 ? 2 : 1; }
  static index_t samples_of(index_t micro_batches) {
    index_t all = 0;
    for (index_t i = 0; i < micro_batches; ++i) all += size_of(i);
    return all;
  }
  index_t count() const { return static_cast<index_t>(parts.size()); }
  layout::range part(index_t i) const { return parts[static_cast<std::size_t>(i)]; }
  auto tokens(index_t i) const { return all.token_view(part(i).begin, part(i).end); }
  auto targets(index_t i) const { return all.target_view(part(i).begin, part(i).end); }
};

constexpr nn::batch_shape largest_micro_batch{2, 11};

/// Weights, and what one rank makes of a step.
struct one_rank_step {
  explicit one_rank_step(nn::transformer_config const& config, index_t micro_batches)
      : batches(micro_batches, config.vocabulary_size), model(config, largest_micro_batch) {
    host ex({.threads = 1});
    nn::initialise(ex, model.store(), 5);
    for (index_t i = 0; i < micro_batches; ++i)
      loss += model.forward_backward(
          ex, batches.tokens(i), batches.targets(i),
          {.seed = 3, .step = 2, .first_sample = batches.part(i).begin, .accumulate = i > 0});
    for (std::size_t u = 0; u < model.units().size(); ++u) {
      auto const g = model.store().gradients(u);
      gradients[model.units()[u]->name()] = {g.begin(), g.end()};
    }
  }

  step_batches batches;
  nn::model<host, float, float> model;
  nn::loss_sum loss;
  gradients_by_unit gradients;
};

/// Holds the blocks of some units, with the weights of a whole model on one rank.
class stage_lender {
public:
  stage_lender(unit_list const& units, nn::parameter_store<host, float, float> const& whole) {
    for (auto const& u : units) blocks_.push_back(block_of(u->name(), whole));
    for (std::size_t u = 0; u < units.size(); ++u)
      if (auto const& name = units[u]->tied_to(); !name.empty()) {
        tied_ = u;
        for (std::size_t other = 0; other < units.size(); ++other)
          if (units[other]->name() == name) owner_ = &blocks_[other];
        if (owner_ == nullptr) {
          borrowed_ = block_of(name, whole);
          // Of the embedding's block the head knows the table, which it overwrites, and leaves the rest
          // alone.
          auto const table = whole.parameters(0)[0].size;
          std::fill(borrowed_.gradients.begin() + table, borrowed_.gradients.end(), 0.0f);
          owner_ = &borrowed_;
        }
      }
  }

  nn::unit<host, float, float>::blocks lend(host&, std::size_t u, parallel::lend_options how) {
    CHECK(lent_ == parallel::no_unit);
    if (!how.weights) { // a backward's part `weights`; what comes next stays what it was
      CHECK(how.next == expected_);
      return {{}, blocks_[u].gradients, {}, {}};
    }
    if (expected_ != parallel::no_unit) CHECK(u == expected_);
    lent_ = u;
    expected_ = how.next;
    nn::unit<host, float, float>::blocks lent{blocks_[u].weights, blocks_[u].gradients, {}, {}};
    if (!how.gradients) lent.gradients = {};
    if (u == tied_) {
      lent.tied_weights = owner_->weights;
      lent.tied_gradients = owner_->gradients;
    }
    return lent;
  }
  bool accumulates(index_t micro_batch) const { return micro_batch > 0; }
  void done(std::size_t u) {
    CHECK(lent_ == u);
    lent_ = parallel::no_unit;
  }
  void gradients_ready(host&, std::size_t u, bool last) {
    ++blocks_[u].ready;
    if (last) blocks_[u].last = blocks_[u].ready;
  }

  /// Each unit's gradients were ready once a micro-batch, and the last time was said to be it.
  bool complete(int micro_batches) const {
    for (auto const& b : blocks_)
      if (b.ready != micro_batches || b.last != micro_batches) return false;
    return true;
  }
  /// Adds this stage's part.
  void add_to(gradients_by_unit& all) const {
    for (auto const& b : blocks_) add(all, b);
    if (!borrowed_.name.empty()) add(all, borrowed_);
  }

private:
  struct block {
    std::string name;
    std::vector<float> weights, gradients;
    int ready = 0, last = 0;
  };
  static block block_of(std::string const& name, nn::parameter_store<host, float, float> const& whole) {
    for (std::size_t u = 0; u < whole.units(); ++u)
      if (whole.unit_name(u) == name) {
        auto const w = whole.weights(u);
        block b{name, {w.begin(), w.end()}, std::vector<float>(w.size()), 0, 0};
        for (auto const& p : whole.parameters(u)) // the first micro-batch overwrites them
          for (auto i = p.offset; i < p.offset + p.size; ++i) b.gradients[static_cast<std::size_t>(i)] = 1e6f;
        return b;
      }
    return {};
  }
  static void add(gradients_by_unit& all, block const& b) {
    auto& sum = all[b.name];
    sum.resize(b.gradients.size());
    for (std::size_t i = 0; i < sum.size(); ++i) sum[i] += b.gradients[i];
  }

  std::vector<block> blocks_;
  block borrowed_;
  block* owner_ = nullptr;
  std::size_t tied_ = parallel::no_unit, lent_ = parallel::no_unit, expected_ = parallel::no_unit;
};

/// The largest distance of a unit's gradients from one rank's.
inline double distance(gradients_by_unit const& some, gradients_by_unit const& expected) {
  double most = some.size() == expected.size() ? 0 : 1e9;
  for (auto const& [name, values] : expected) {
    auto const at = some.find(name);
    most = (std::max)(
        most, at == some.end() || at->second.size() != values.size() ? 1e9 : distance(at->second, values));
  }
  return most;
}

} // namespace fixture

#endif
