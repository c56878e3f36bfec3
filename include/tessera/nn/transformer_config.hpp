/// The sizes and choices of a decoder-only transformer: everything that decides which parameters it has and
/// what it computes.
///
///     auto config = tiny_llama();
///     config.layers = 4;
///     config.validate();                                   // throws config_error that says how to fix it
///     auto units = make_transformer<exec::host, float, float>(config);
#ifndef TESSERA_NN_TRANSFORMER_CONFIG_HPP
#define TESSERA_NN_TRANSFORMER_CONFIG_HPP

#include <tessera/core/extents.hpp>

namespace tessera::inline TESSERA_ABI::nn {

/// gpt2: learned positions, layer norm, biases, GELU (tanh form).
/// llama: rotary positions, RMS norm, no biases, SwiGLU, grouped key/value heads.
enum class transformer_family { gpt2, llama };

constexpr char const* name_of(transformer_family family) noexcept {
  return family == transformer_family::gpt2 ? "gpt2" : "llama";
}

struct transformer_config {
  transformer_family family = transformer_family::gpt2;
  index_t vocabulary_size = 50257;
  index_t sequence_length = 1024; ///< The longest sample.
  index_t width = 768;            ///< Of the residual stream.
  index_t layers = 12;
  index_t heads = 12;
  index_t key_value_heads = 0; ///< Llama: heads that share a key and value; 0 means one for each head.
  index_t feed_forward = 0;    ///< Inner width; 0 means 4 width (gpt2), 8/3 width rounded up to 32 (llama).
  float dropout = 0;           ///< Of the embedding's output and of both residual branches of each block.
  bool tied_head = true;       ///< The head multiplies by the token embedding instead of its own matrix.
  float norm_epsilon = 1e-5f;
  float rotary_theta = 10000;      ///< Llama only.
  float initial_deviation = 0.02f; ///< Of matrices; residual projections have it divided by sqrt(2 layers).
  float label_smoothing = 0;       ///< Of the training loss; the evaluated loss is always the plain one.
  float z_loss = 0;                ///< Of the training loss.

  constexpr index_t head_width() const noexcept { return width / heads; }
  constexpr index_t kv_heads() const noexcept { return key_value_heads == 0 ? heads : key_value_heads; }
  constexpr index_t inner_width() const noexcept {
    if (feed_forward != 0) return feed_forward;
    return family == transformer_family::gpt2 ? 4 * width : ((8 * width + 2) / 3 + 31) / 32 * 32;
  }
  friend bool operator==(transformer_config const&, transformer_config const&) = default;

  /// Throws config_error where no such model exists. Every message names the field, its value and the remedy.
  void validate(site where = site::here()) const {
    constexpr auto most = index_t{1} << 40; // above any model, and sums of a few such sizes fit
    auto const positive = [&](char const* field, index_t value) {
      if (value < 1)
        throw config_error("E-nn-001", where, "transformer_config: ", field, " is ", value,
                           ", set it to 1 or more");
      if (value > most)
        throw config_error("E-nn-001", where, "transformer_config: ", field, " is ", value, ", set it to ",
                           most, " or less");
    };
    positive("vocabulary_size", vocabulary_size);
    positive("sequence_length", sequence_length);
    positive("width", width);
    positive("layers", layers);
    positive("heads", heads);
    positive("key_value_heads (0 counts as heads)", kv_heads());
    positive("feed_forward (0 counts as the family's default)", inner_width());
    if (vocabulary_size > std::numeric_limits<std::int32_t>::max())
      throw config_error("E-nn-002", where, "transformer_config: vocabulary_size is ", vocabulary_size,
                         ", tokens are 32-bit: set it to at most 2147483647");
    if (width % heads != 0)
      throw config_error("E-nn-003", where, "transformer_config: width ", width,
                         " is not a multiple of heads ", heads, "; ", width / heads * heads, " or ",
                         (width / heads + 1) * heads, " would be");
    if (heads % kv_heads() != 0)
      throw config_error("E-nn-004", where, "transformer_config: heads ", heads,
                         " is not a multiple of key_value_heads ", kv_heads(),
                         "; choose a divisor of heads, or 0 for one key and value a head");
    if (family == transformer_family::gpt2 && kv_heads() != heads)
      throw config_error("E-nn-005", where, "transformer_config: gpt2 has one key and value a head (", heads,
                         "), key_value_heads is ", kv_heads(), "; set it to 0, or family to llama");
    if (family == transformer_family::llama && head_width() % 2 != 0)
      throw config_error("E-nn-006", where, "transformer_config: rotary positions turn pairs, a head is ",
                         head_width(), " wide; choose width and heads so that width / heads is even");
    auto const in_unit_interval = [&](char const* field, float value) {
      if (!(value >= 0 && value < 1))
        throw config_error("E-nn-007", where, "transformer_config: ", field, " is ", double{value},
                           ", set it to 0 or more and below 1");
    };
    in_unit_interval("dropout", dropout);
    in_unit_interval("label_smoothing", label_smoothing);
    auto const above = [&](char const* field, float value, bool fits, char const* bound) {
      if (!fits)
        throw config_error("E-nn-008", where, "transformer_config: ", field, " is ", double{value},
                           ", set it ", bound);
    };
    above("norm_epsilon", norm_epsilon, norm_epsilon > 0 && norm_epsilon < 1, "above 0, such as 1e-5");
    above("rotary_theta", rotary_theta, rotary_theta > 1 && rotary_theta < 1e30f, "above 1, such as 10000");
    above("initial_deviation", initial_deviation, initial_deviation > 0 && initial_deviation < 1e3f,
          "above 0, such as 0.02");
    above("z_loss", z_loss, z_loss >= 0 && z_loss < 1e3f, "to 0 or more, such as 1e-4");
  }
};

/// The published 124 million parameter GPT-2. The vocabulary is not padded.
inline transformer_config gpt2_124m() {
  return {};
}

/// Small enough for tests and first runs: bytes as tokens, about 0.2 million parameters.
inline transformer_config tiny_gpt2() {
  return {.family = transformer_family::gpt2,
          .vocabulary_size = 256,
          .sequence_length = 64,
          .width = 64,
          .layers = 4,
          .heads = 4};
}
inline transformer_config tiny_llama() {
  return {.family = transformer_family::llama,
          .vocabulary_size = 256,
          .sequence_length = 64,
          .width = 64,
          .layers = 4,
          .heads = 4,
          .key_value_heads = 2,
          .tied_head = false};
}

} // namespace tessera::inline TESSERA_ABI::nn

#endif
