/// CUDA's pass over a flat shard: one kernel, in which each thread looks up the decay of its elements. The
/// decayed ranges go along as a parameter of the kernel, so that nothing has to be copied beforehand; a shard
/// with more of them than a parameter holds takes one kernel for each stretch that has so many.
#ifndef TESSERA_OPTIM_CUDA_FLAT_UPDATE_CUH
#define TESSERA_OPTIM_CUDA_FLAT_UPDATE_CUH

#include <tuple>

#include <tessera/exec/elements.cuh>
#include <tessera/optim/flat_update.hpp>

namespace tessera::inline TESSERA_ABI::optim {

namespace cuda_detail {

/// Disjoint ranges in order. Parameters of a kernel may take 4096 bytes together.
struct decayed_ranges {
  static constexpr int most = 192;
  int count = 0;
  layout::range range[most];

  /// Bit i: element first + i stands in a range, for i in [0, n).
  TESSERA_HOST_DEVICE unsigned among(index_t first, int n) const noexcept {
    int at = 0, after = count; // the first range that ends behind `first`
    while (at < after) {
      auto const middle = (at + after) / 2;
      if (range[middle].end <= first)
        at = middle + 1;
      else
        after = middle;
    }
    auto bits = 0u;
    for (; at < count && range[at].begin < first + n; ++at) {
      auto const from = range[at].begin > first ? int(range[at].begin - first) : 0;
      auto const to = range[at].end < first + n ? int(range[at].end - first) : n;
      bits |= (1u << to) - (1u << from);
    }
    return bits;
  }
};

/// A rule with what it needs beside the arrays: (weight, gradient, state...), or where there is a master
/// (weight, master, gradient, state...), of which the weight is only written.
template <class Rule, bool HasMaster>
struct update_elements {
  Rule rule;
  float decay;
  decayed_ranges decayed;

  template <int N, class... State>
    requires(!HasMaster)
  TESSERA_HOST_DEVICE void operator()(index_t first, float (&weight)[N], float (&gradient)[N],
                                      State&... state) const noexcept {
    update(first, weight, gradient, state...);
  }
  template <int N, class... State>
    requires(HasMaster)
  TESSERA_HOST_DEVICE void operator()(index_t first, float (&weight)[N], float (&master)[N],
                                      float (&gradient)[N], State&... state) const noexcept {
    update(first, master, gradient, state...);
    for (int i = 0; i < N; ++i) weight[i] = master[i];
  }

private:
  template <int N, class... State>
  TESSERA_HOST_DEVICE void update(index_t first, float (&weight)[N], float const (&gradient)[N],
                                  State&... state) const noexcept {
    auto const decays = decayed.among(first, N);
    for (int i = 0; i < N; ++i)
      weight[i] = rule(weight[i], gradient[i], (decays >> i & 1u) != 0 ? decay : 0.0f, state[i]...);
  }
};

struct widened_element {
  TESSERA_HOST_DEVICE void operator()(float& y, float x) const noexcept { y = x; }
};

} // namespace cuda_detail

template <>
struct flat_update_on<exec::cuda_backend> {
  template <exec::cuda_space Ex, storage_scalar T, storage_scalar G, int Slots, update_rule Rule>
  static void run(Ex& ex, flat_shard<T, G, Slots, typename Ex::memory> const& shard, Rule const& rule,
                  float decay, site) {
    cuda_detail::decayed_ranges decayed;
    index_t done = 0;
    for (auto const& range : shard.decayed) {
      if (decayed.count == cuda_detail::decayed_ranges::most) {
        stretch(ex, shard, {done, range.begin}, rule, decay, decayed);
        done = range.begin;
        decayed.count = 0;
      }
      decayed.range[decayed.count++] = {range.begin - done, range.end - done};
    }
    stretch(ex, shard, {done, static_cast<index_t>(shard.weights.size())}, rule, decay, decayed);
  }

  template <exec::cuda_space Ex, storage_scalar From>
  static void copy(Ex& ex, device_span<float, typename Ex::memory> out,
                   device_span<From const, typename Ex::memory> in, site) {
    exec::for_elements(ex, static_cast<index_t>(out.size()), cuda_detail::widened_element{},
                       exec::writes(out.data()), exec::reads(in.data()));
  }

private:
  template <class Ex, class T, class G, int Slots, class M, class Rule>
  static void stretch(Ex& ex, flat_shard<T, G, Slots, M> const& shard, layout::range part, Rule const& rule,
                      float decay, cuda_detail::decayed_ranges const& decayed) {
    auto const run = [&](auto... state) {
      auto* const weights = shard.weights.data() + part.begin;
      auto const gradients = exec::reads(shard.gradients.data() + part.begin);
      if (shard.master.empty())
        exec::for_elements(ex, part.size(), cuda_detail::update_elements<Rule, false>{rule, decay, decayed},
                           exec::updates(weights), gradients, exec::updates(state.data() + part.begin)...);
      else
        exec::for_elements(ex, part.size(), cuda_detail::update_elements<Rule, true>{rule, decay, decayed},
                           exec::writes(weights), exec::updates(shard.master.data() + part.begin), gradients,
                           exec::updates(state.data() + part.begin)...);
    };
    std::apply(run, shard.state);
  }
};

} // namespace tessera::inline TESSERA_ABI::optim

#endif
