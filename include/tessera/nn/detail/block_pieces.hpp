/// What a transformer block keeps between its forward and its backward, and what its parameters are called.
#ifndef TESSERA_NN_DETAIL_BLOCK_PIECES_HPP
#define TESSERA_NN_DETAIL_BLOCK_PIECES_HPP

#include <tessera/nn/feed_forward.hpp>
#include <tessera/nn/norm.hpp>
#include <tessera/nn/self_attention.hpp>

namespace tessera::inline TESSERA_ABI::nn::detail {

/// A matrix product's part of a backward, kept for its parameters' gradients.
template <class Inner, class Matrix>
struct branch_gradients {
  Matrix d_out;
  Inner inner;
};

template <class Norm, class Attention, class FeedForward, storage_scalar T, memory_space M>
struct block_pieces {
  using matrix = view<T, 2, M>;
  using rows = residual_rows<M>;

  struct attention_half {
    typename Norm::statistics norm;
    matrix normed;
    typename Attention::pieces attention;
  };
  struct feed_forward_half {
    rows middle;
    typename Norm::statistics norm;
    matrix normed;
    typename FeedForward::pieces feed_forward;
  };

  rows in; ///< Kept by the unit before.
  rows out;
  attention_half first;
  feed_forward_half second;
  // From a backward's part `input` to its part `weights`.
  branch_gradients<typename Attention::inner_gradients, matrix> d_first;
  branch_gradients<typename FeedForward::inner_gradients, matrix> d_second;
};

/// Writes a product into a matrix of either type.
template <class F, class A, class B>
concept writes_either = std::invocable<F&, A> && std::invocable<F&, B>;

/// The prefixes of a block's parameters.
struct block_names {
  std::string norm_1, attention, norm_2, feed_forward;

  static block_names of(transformer_family family, index_t layer) {
    auto const number = std::to_string(layer);
    if (family == transformer_family::gpt2) {
      auto const h = "h." + number;
      return {h + ".ln_1", h + ".attn", h + ".ln_2", h + ".mlp"};
    }
    auto const h = "model.layers." + number;
    return {h + ".input_layernorm", h + ".self_attn", h + ".post_attention_layernorm", h + ".mlp"};
  }
};

} // namespace tessera::inline TESSERA_ABI::nn::detail

#endif
