/// swiglu on the host: one vectorised pass over each row.
#ifndef TESSERA_OPS_HOST_SWIGLU_HPP
#define TESSERA_OPS_HOST_SWIGLU_HPP

#include <tessera/ops/host/detail/convert.hpp>
#include <tessera/ops/host/detail/loops.hpp>
#include <tessera/ops/swiglu.hpp>

namespace tessera::inline TESSERA_ABI::ops {

template <>
struct swiglu_on<exec::host_backend> {
  /// Leaves gate_up in `kept`, too, where that is given and other memory.
  template <exec::host_space Ex, storage_scalar T, storage_scalar In>
  static void forward(Ex& ex, view<T, 2> out, view<In const, 2> gate_up, view<T, 2> kept = {}) {
    auto const width = out.extent(1);
    host_detail::for_rows(ex, out.extent(0), width, [=](index_t row) {
      auto const* gate = gate_up.data() + row * gate_up.stride(0);
      auto const* up = gate + width;
      auto* y = out.data() + row * out.stride(0);
      TESSERA_SIMD()
      for (index_t i = 0; i < width; ++i) store(y[i], silu_value(gate[i]) * static_cast<float>(up[i]));
      if constexpr (!std::same_as<T, In>)
        if (kept.data() != nullptr) host_detail::convert(kept.data() + row * kept.stride(0), gate, 2 * width);
    });
  }

  template <exec::host_space Ex, storage_scalar T>
  static void backward(Ex& ex, view<T, 2> d_gate_up, view<T const, 2> d_out, view<T const, 2> gate_up) {
    auto const width = d_out.extent(1);
    host_detail::for_rows(ex, d_out.extent(0), width, [=](index_t row) {
      auto const* gate = gate_up.data() + row * gate_up.stride(0);
      auto const* up = gate + width;
      auto const* dy = d_out.data() + row * d_out.stride(0);
      auto* d_gate = d_gate_up.data() + row * d_gate_up.stride(0);
      auto* d_up = d_gate + width;
      TESSERA_SIMD()
      for (index_t i = 0; i < width; ++i) {
        auto const silu = silu_with_slope(gate[i]);
        auto const d = static_cast<float>(dy[i]), u = static_cast<float>(up[i]);
        store(d_gate[i], d * u * silu.slope);
        store(d_up[i], d * silu.value);
      }
    });
  }
};

} // namespace tessera::inline TESSERA_ABI::ops

#endif
