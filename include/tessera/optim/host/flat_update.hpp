/// The host's pass over a flat shard: one contiguous range a thread, cut where the decay changes, each piece
/// a single vectorised loop.
#ifndef TESSERA_OPTIM_HOST_FLAT_UPDATE_HPP
#define TESSERA_OPTIM_HOST_FLAT_UPDATE_HPP

#include <tessera/exec/host.hpp>
#include <tessera/optim/flat_update.hpp>

namespace tessera::inline TESSERA_ABI::optim {

template <>
struct flat_update_on<exec::host_backend> {
  /// Elements that are worth a thread, and the granule of a thread's share: threads touch no common line.
  static constexpr index_t chunk = 4096;

  template <exec::host_space Ex, storage_scalar T, storage_scalar G, int Slots, update_rule Rule>
  static void run(Ex& ex, flat_shard<T, G, Slots> const& shard, Rule const& rule, float decay, site) {
    auto const n = static_cast<index_t>(shard.weights.size());
    ex.parallel_for((n + chunk - 1) / chunk, 1, [&](index_t first, index_t last) {
      auto const share = layout::range{first * chunk, last * chunk < n ? last * chunk : n};
      auto reached = share.begin;
      for (auto const& range : shard.decayed) {
        auto const inside = layout::intersection(range, share);
        if (inside.empty()) continue;
        piece(shard, {reached, inside.begin}, rule, 0);
        piece(shard, inside, rule, decay);
        reached = inside.end;
      }
      piece(shard, {reached, share.end}, rule, 0);
    });
  }

  template <exec::host_space Ex, storage_scalar From>
  static void copy(Ex& ex, std::span<float> out, std::span<From const> in, site) {
    ex.parallel_for(static_cast<index_t>(out.size()), chunk, [&](index_t begin, index_t end) {
      for (auto i = begin; i < end; ++i)
        out[static_cast<std::size_t>(i)] = static_cast<float>(in[static_cast<std::size_t>(i)]);
    });
  }

private:
  template <class T, class G, int Slots, class Rule>
  static void piece(flat_shard<T, G, Slots> const& shard, layout::range part, Rule const& rule, float decay) {
    if (shard.master.empty())
      loop<false>(shard, part, rule, decay);
    else
      loop<true>(shard, part, rule, decay);
  }

  template <bool HasMaster, class T, class G, int Slots, class Rule>
  static void loop(flat_shard<T, G, Slots> const& shard, layout::range part, Rule rule, float decay) {
    auto* __restrict weights = shard.weights.data();
    auto* __restrict master = shard.master.data();
    auto const* __restrict gradients = shard.gradients.data();
    float* __restrict first = nullptr, * __restrict second = nullptr;
    if constexpr (Slots > 0) first = shard.state[0].data();
    if constexpr (Slots > 1) second = shard.state[1].data();
    TESSERA_SIMD()
    for (index_t i = part.begin; i < part.end; ++i)
      element<HasMaster>(weights + i, master + i, gradients + i, first + i, second + i, rule, decay);
  }

  // A function of its own: g++ does not vectorise a 16-bit temporary that is written in the loop itself.
  template <bool HasMaster, class T, class G, class Rule>
  [[gnu::always_inline]] static void element(T* weight, float* master, G const* gradient, float* first,
                                             float* second, Rule const& rule, float decay) {
    float value;
    if constexpr (HasMaster)
      value = *master;
    else
      value = static_cast<float>(*weight);
    if constexpr (Rule::slots == 0)
      value = rule(value, static_cast<float>(*gradient), decay);
    else if constexpr (Rule::slots == 1)
      value = rule(value, static_cast<float>(*gradient), decay, *first);
    else
      value = rule(value, static_cast<float>(*gradient), decay, *first, *second);
    if constexpr (HasMaster) *master = value;
    *weight = static_cast<T>(value);
  }
};

} // namespace tessera::inline TESSERA_ABI::optim

#endif
