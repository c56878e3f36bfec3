// requires: nccl
#include <tessera/comm/cuda/nccl.cuh>
#include <tessera/comm/threads.hpp>
#include <tessera/exec/copy_cuda.hpp>
#include <tessera/ops/add.hpp>
#include <tessera/ops/cuda/add.cuh>
#include <tessera/ops/cuda/scale.cuh>
#include <tessera/parallel/pipeline.hpp>

#include <map>
#include <mutex>

#include "support/devices.hpp"
#include <doctest/doctest.h>
#include <tessera/comm/self.hpp>
#include <tessera/exec/host.hpp>

using namespace tessera;
using layout::schedule_kind;

namespace {

constexpr index_t samples = 2, length = 3, width = 5;
constexpr int unit_total = 8;

/// Units of a few element-wise operations: unit k makes f_k x + b_k of x, where b_k has a value for each row
/// and column. The first has a constant for its x, the last one's loss is the sum of squares.
template <exec::space Ex>
class toy_unit final : public nn::unit<Ex, float, float> {
public:
  using memory = typename Ex::memory;
  using typename nn::unit<Ex, float, float>::blocks;
  using flat = view<float, 1, memory>;
  using flat_in = view<float const, 1, memory>;

  explicit toy_unit(int number) : number_(number), name_("unit." + std::to_string(number)) {
    map_.add(name_ + ".b", {samples * length, width}, layout::parameter_kind::bias, {});
  }

  std::string const& name() const override { return name_; }
  layout::parameter_map const& parameters() const override { return map_; }
  std::string const& tied_to() const override { return none_; }
  void reserve(int micro_batches) override { kept_.resize(static_cast<std::size_t>(micro_batches)); }
  void recompute(nn::recomputation) override {}
  index_t kept_bytes(nn::batch_shape shape) const override { return bytes(shape); }
  index_t kept_for_weights_bytes(nn::batch_shape shape) const override { return bytes(shape); }
  index_t scratch_bytes(nn::batch_shape) const override { return 0; }

  void forward(Ex& ex, blocks const& lent, nn::stream<Ex, float>& s, arena<memory>& activations,
               nn::pass const& p) override {
    auto const out = p.training || number_ == 0
                         ? activations.template take<float, 2>({s.shape().tokens(), width})
                         : s.hidden;
    if (number_ == 0)
      ops::fill(ex, all(out), static_cast<float>(p.first_sample + 1));
    else
      ops::scale(ex, all(out), flat_in(all(s.hidden)), factor());
    ops::add(ex, all(out), flat_in(all(out)), flat_in(lent.weights.data(), {out.size()}));
    s.hidden = out;
    if (p.training) kept(p) = out;
  }
  void backward(Ex& ex, blocks const& lent, nn::stream<Ex, float>& s, arena<memory>& activations,
                nn::pass const& p) override {
    if (p.part != nn::backward_part::weights) {
      if (number_ + 1 == unit_total) ops::scale(ex, all(s.gradient), flat_in(all(kept(p))), 2);
      auto const d = p.part == nn::backward_part::input
                         ? activations.template take<float, 2>(s.gradient.extents())
                         : kept(p);
      ops::scale(ex, all(d), flat_in(all(s.gradient)), 1);
      ops::scale(ex, all(s.gradient), flat_in(all(s.gradient)), factor());
      kept(p) = d;
    }
    if (p.part == nn::backward_part::input) return;
    auto const d = all(kept(p));
    flat const sum(lent.gradients.data(), d.extents());
    if (p.accumulate)
      ops::add(ex, sum, flat_in(sum), flat_in(d));
    else
      ops::scale(ex, sum, flat_in(d), 1);
  }

private:
  static index_t bytes(nn::batch_shape shape) {
    return arena<memory>::template bytes_for<float>(shape.tokens() * width);
  }
  static flat all(view<float, 2, memory> m) { return {m.data(), {m.size()}}; }
  float factor() const { return number_ % 2 == 0 ? 0.5f : 1.5f; }
  view<float, 2, memory>& kept(nn::pass const& p) { return kept_[static_cast<std::size_t>(p.slot)]; }

  int number_;
  std::string name_, none_;
  layout::parameter_map map_;
  std::vector<view<float, 2, memory>> kept_;
};

using gradients_by_unit = std::map<std::string, std::vector<float>>;

/// Runs a step twice, and an evaluation between; adds this stage's gradients.
template <class Comm, exec::space Ex>
void run_stage(Comm& stages, Ex& ex, layout::schedule const& plan, gradients_by_unit& together,
               std::mutex& lock) {
  nn::unit_list<Ex, float, float> units;
  std::vector<layout::range> chunks;
  for (int chunk = 0; chunk < plan.shape.chunks; ++chunk) {
    auto const part = layout::shard_of(unit_total, plan.parts(), plan.part_of(stages.rank(), chunk));
    chunks.push_back({std::ssize(units), std::ssize(units) + part.size()});
    for (auto u = part.begin; u < part.end; ++u)
      units.push_back(std::make_unique<toy_unit<Ex>>(narrow<int>(u)));
  }
  nn::parameter_store<Ex, float, float> store(units);
  std::vector<float> values(static_cast<std::size_t>(store.size()));
  for (std::size_t u = 0; u < units.size(); ++u)
    for (index_t i = 0; i < samples * length * width; ++i)
      values[static_cast<std::size_t>(store.unit_range(u).begin + i)] =
          static_cast<float>((7 * i + static_cast<index_t>(units[u]->name().back())) % 11) / 8;
  exec::copy(ex, store.weights(), std::span<float const>(values));
  parallel::store_lender<Ex, float, float> lender(store);

  tensor<std::int32_t, 2, typename Ex::memory> tokens({samples, length});
  auto const supply = [&](index_t i) {
    view<std::int32_t const, 2, typename Ex::memory> const some(tokens.data(),
                                                                {i == 1 ? 0 : samples, length});
    return parallel::pipeline_micro_batch<Ex>{.tokens = some, .targets = some, .first_sample = i};
  };
  parallel::pipeline<Comm, Ex, float, float> pipe(stages, units, chunks, plan,
                                                  {.width = width, .largest = {samples, length}});
  pipe.run(ex, lender, supply);
  auto const evaluated = pipe.evaluate(ex, lender, 3, supply);
  CHECK(evaluated.count == 0);
  pipe.run(ex, lender, supply);
  exec::copy(ex, std::span<float>(values), store.gradients());
  ex.synchronize();
  std::lock_guard const guard(lock);
  for (std::size_t u = 0; u < units.size(); ++u) {
    auto const begin = values.begin() + store.unit_range(u).begin;
    together[units[u]->name()] = {begin, begin + samples * length * width};
  }
}

} // namespace

TEST_CASE("stages that are devices give what one host stage gives, under every schedule") {
  for (int stages : {1, 2, 4}) {
    if (test::ranks_here(stages) < stages) continue;
    for (auto kind : {schedule_kind::gpipe, schedule_kind::one_forward_one_backward,
                      schedule_kind::interleaved_one_forward_one_backward, schedule_kind::zero_bubble})
      for (int m : {1, 3, 6}) {
        CAPTURE(stages);
        CAPTURE(std::string(name_of(kind)));
        CAPTURE(m);
        std::mutex lock;
        gradients_by_unit expected, got;
        {
          comm::self alone;
          exec::host ex({.threads = 1});
          run_stage(alone, ex, layout::make_schedule(schedule_kind::gpipe, {.micro_batches = m}), expected,
                    lock);
        }
        auto const chunks = kind == schedule_kind::interleaved_one_forward_one_backward ? 2 : 1;
        auto const plan = layout::make_schedule(kind, {stages, m, chunks});
        for (bool checked : {false, true})
          comm::run_threads(stages, [&](comm::threads& hosts) {
            exec::cuda ex({.device = hosts.rank()});
            comm::nccl ranks(hosts, ex, {.checked = checked, .stall_limit = 30});
            run_stage(ranks, ex, plan, got, lock);
          });
        CHECK(got == expected);
      }
  }
}
