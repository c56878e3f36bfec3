/// The norms of transformer blocks as layers: each adds its parameters to a unit's map, and runs forward and
/// backward over the unit's block, from the residual stream to the operand of a product. Both take the
/// residual sum before them into the same pass over memory.
///
///     layer_norm<Ex, T, G> norm(map, "ln_f", width, 1e-5f);
///     auto statistics = norm.take(arena, rows);
///     norm.forward(ex, weights, out, in, statistics);
#ifndef TESSERA_NN_NORM_HPP
#define TESSERA_NN_NORM_HPP

#include <tessera/nn/detail/parameter_views.hpp>
#include <tessera/nn/detail/pieces.hpp>
#include <tessera/nn/tensor_part.hpp>
#include <tessera/nn/unit.hpp>
#include <tessera/ops/layer_norm.hpp>
#include <tessera/ops/rms_norm.hpp>

namespace tessera::inline TESSERA_ABI::nn {

/// How a layer's backward leaves its gradients.
struct backward_options {
  bool accumulate = false;       ///< Add to the parameters' gradients.
  bool accumulate_input = false; ///< Add to the gradient of the input.
};

/// A norm over rows of one width. Semantics: `forward_sum` leaves a + b in `sum` and its norm in `out`;
/// `backward` needs what the forward read as `in` (the sum) and its statistics.
template <class N, class Ex, class T, class G>
concept norm_layer = requires(N const& norm, Ex& ex, memory_span<T const, typename Ex::memory> weights,
                              memory_span<G, typename Ex::memory> gradients,
                              view<T, 2, typename Ex::memory> out, residual_rows<typename Ex::memory> x,
                              arena<typename Ex::memory>& memory, typename N::statistics statistics) {
  { norm.take(memory, index_t{}) } -> std::same_as<typename N::statistics>;
  norm.forward(ex, weights, out, x, statistics);
  norm.forward_sum(ex, weights, out, x, x, x, statistics);
  norm.backward(ex, weights, gradients, x, x, x, statistics, backward_options{});
};

/// Mean and deviation removed, gain and bias learned.
template <exec::space Ex, storage_scalar T, storage_scalar G>
class layer_norm {
public:
  using memory = typename Ex::memory;
  using matrix = view<T, 2, memory>;
  using rows = residual_rows<memory>;
  using rows_in = view<residual_scalar const, 2, memory>;

  struct statistics {
    view<float, 1, memory> mean, reciprocal_deviation;
  };

  layer_norm(layout::parameter_map& map, std::string const& name, index_t width, float epsilon,
             tensor_part part = {})
      : options_{.epsilon = epsilon} {
    using enum layout::parameter_kind;
    gain_ = detail::place_of(
        map[map.add(name + ".weight", {width}, norm_gain, layout::constant_values(1), part.copy_on_rows())]);
    bias_ = detail::place_of(
        map[map.add(name + ".bias", {width}, norm_bias, layout::constant_values(0), part.copy_on_rows())]);
  }

  template <detail::piece_source<memory> Source>
  statistics take(Source& source, index_t rows) const {
    return {source.template take<float, 1>({rows}), source.template take<float, 1>({rows})};
  }

  void forward(Ex& ex, memory_span<T const, memory> weights, matrix out, rows_in in, statistics kept) const {
    ops::layer_norm(ex, out, kept.mean, kept.reciprocal_deviation, in, gain_.vector<memory>(weights),
                    bias_.vector<memory>(weights), options_);
  }

  void forward_sum(Ex& ex, memory_span<T const, memory> weights, matrix out, rows sum, rows_in a, rows_in b,
                   statistics kept) const {
    ops::residual_layer_norm(ex, out, sum, kept.mean, kept.reciprocal_deviation, a, b,
                             gain_.vector<memory>(weights), bias_.vector<memory>(weights), options_);
  }

  void backward(Ex& ex, memory_span<T const, memory> weights, memory_span<G, memory> gradients, rows d_in,
                rows_in d_out, rows_in in, statistics kept, backward_options options) const {
    ops::layer_norm_backward(
        ex, d_in, gain_.vector<memory>(gradients), bias_.vector<memory>(gradients), d_out, in, kept.mean,
        kept.reciprocal_deviation, gain_.vector<memory>(weights),
        {.accumulate = options.accumulate, .accumulate_input = options.accumulate_input});
  }

private:
  detail::place gain_, bias_;
  ops::norm_options options_;
};

/// The root mean square divided out, gain learned.
template <exec::space Ex, storage_scalar T, storage_scalar G>
class rms_norm {
public:
  using memory = typename Ex::memory;
  using matrix = view<T, 2, memory>;
  using rows = residual_rows<memory>;
  using rows_in = view<residual_scalar const, 2, memory>;

  struct statistics {
    view<float, 1, memory> reciprocal_deviation;
  };

  rms_norm(layout::parameter_map& map, std::string const& name, index_t width, float epsilon,
           tensor_part part = {})
      : options_{.epsilon = epsilon} {
    using enum layout::parameter_kind;
    gain_ = detail::place_of(
        map[map.add(name + ".weight", {width}, norm_gain, layout::constant_values(1), part.copy_on_rows())]);
  }

  template <detail::piece_source<memory> Source>
  statistics take(Source& source, index_t rows) const {
    return {source.template take<float, 1>({rows})};
  }

  void forward(Ex& ex, memory_span<T const, memory> weights, matrix out, rows_in in, statistics kept) const {
    ops::rms_norm(ex, out, kept.reciprocal_deviation, in, gain_.vector<memory>(weights), options_);
  }

  void forward_sum(Ex& ex, memory_span<T const, memory> weights, matrix out, rows sum, rows_in a, rows_in b,
                   statistics kept) const {
    ops::residual_rms_norm(ex, out, sum, kept.reciprocal_deviation, a, b, gain_.vector<memory>(weights),
                           options_);
  }

  void backward(Ex& ex, memory_span<T const, memory> weights, memory_span<G, memory> gradients, rows d_in,
                rows_in d_out, rows_in in, statistics kept, backward_options options) const {
    ops::rms_norm_backward(ex, d_in, gain_.vector<memory>(gradients), d_out, in, kept.reciprocal_deviation,
                           gain_.vector<memory>(weights),
                           {.accumulate = options.accumulate, .accumulate_input = options.accumulate_input});
  }

private:
  detail::place gain_;
  ops::norm_options options_;
};

} // namespace tessera::inline TESSERA_ABI::nn

#endif
