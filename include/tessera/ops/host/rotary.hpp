/// rotary on the host: a table of cosines and sines for each (theta, D) that came by, then one pass.
#ifndef TESSERA_OPS_HOST_ROTARY_HPP
#define TESSERA_OPS_HOST_ROTARY_HPP

#include <vector>

#include <tessera/ops/detail/rotary_angles.hpp>
#include <tessera/ops/host/detail/loops.hpp>
#include <tessera/ops/rotary.hpp>

namespace tessera::inline TESSERA_ABI::ops {

template <>
struct rotary_on<exec::host_backend> {
  template <exec::host_space Ex, storage_scalar T>
  static void run(Ex& ex, view<T, 4> x, rotary_options const& options, site where) {
    auto const batch = x.extent(0), sequence = x.extent(1), heads = x.extent(2), half = x.extent(3) / 2;
    if (x.empty()) return;
    auto const* angles =
        ex.template handle<tables>().of(options.theta, half, options.positions.end(sequence), where);
    auto const sign = options.inverse ? -1.0f : 1.0f;
    auto const positions = options.positions;
    host_detail::for_rows(ex, batch * sequence, heads * 2 * half, [=](index_t row) {
      auto const t = row % sequence;
      auto const* cosine = angles + positions(t) * 2 * half;
      auto const* sine = cosine + half;
      auto* token = x.data() + row / sequence * x.stride(0) + t * x.stride(1);
      for (index_t h = 0; h < heads; ++h) {
        auto* first = token + h * x.stride(2);
        auto* second = first + half;
        TESSERA_SIMD()
        for (index_t i = 0; i < half; ++i) {
          auto a = static_cast<float>(first[i]), b = static_cast<float>(second[i]);
          detail::rotate(a, b, cosine[i], sign * sine[i]);
          store(first[i], a);
          store(second[i], b);
        }
      }
    });
  }

private:
  /// For each position a row of D / 2 cosines and D / 2 sines, computed in double.
  class tables {
  public:
    explicit tables(memory_account account) noexcept : account_(account) {}

    float const* of(float theta, index_t half, index_t positions, site where) {
      for (auto& known : tables_)
        if (known.theta == theta && known.half == half) return known.up_to(positions, account_, where);
      tables_.push_back({theta, half, 0, {}});
      return tables_.back().up_to(positions, account_, where);
    }

  private:
    struct table {
      float theta;
      index_t half, positions;
      buffer<host_memory> memory;

      float const* up_to(index_t needed, memory_account account, site where) {
        if (needed > positions) {
          auto const size = 2 * positions > needed ? 2 * positions : needed;
          auto const count = element_count<3>({size, 2 * half, index_t{sizeof(float)}}, where);
          memory = buffer<host_memory>(count, account, where);
          positions = size;
          detail::fill_rotary_table(static_cast<float*>(memory.data()), theta, half, size);
        }
        return static_cast<float const*>(memory.data());
      }
    };
    memory_account account_;
    std::vector<table> tables_;
  };
};

} // namespace tessera::inline TESSERA_ABI::ops

#endif
