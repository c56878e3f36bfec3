/// One description of each operation: what tests and benchmarks need to know about it without calling it. The
/// test of ops/shapes.hpp fails when a header of ops/ is missing here.
#ifndef TESSERA_TESTS_OPS_CATALOG_HPP
#define TESSERA_TESTS_OPS_CATALOG_HPP

#include <string_view>

#include <tessera/core/extents.hpp>

namespace catalog {

using tessera::index_t;

/// Rows of `width` elements; `depth` is the summed dimension of a product, the number of keys of an attention
/// (whose rows are all heads' queries), the vocabulary of an embedding or of a head.
struct shape {
  index_t rows, width, depth = 0;

  constexpr double elements() const { return static_cast<double>(rows) * static_cast<double>(width); }
  /// Multiplications and additions of a product over the depth.
  constexpr double product() const { return 2 * elements() * static_cast<double>(depth); }
};

struct rectangle {
  index_t rows, width;
};

/// Numbers of elements and shapes that break loops: nothing, one, primes, one more and one less than vectors
/// and blocks are long.
inline constexpr index_t counts[] = {0, 1, 7, 17, 255, 257, 1021, 40009};
inline constexpr rectangle shapes[] = {{0, 8}, {3, 0}, {1, 1}, {2, 3}, {7, 129}, {67, 17}, {1, 1021}};

struct tolerance {
  double fp32 = 1e-5; ///< Relative to the largest element: rounding of fp32 sums.
  double bf16 = 1e-2; ///< Rounding of one 16-bit store.
};

struct operation {
  std::string_view header; ///< ops/HEADER.hpp
  std::string_view name;
  shape usual;            ///< A size of GPT-2 124M, for benchmarks.
  double moved;           ///< Elements that pass between memory and processor, for each of rows * width.
  double (*flops)(shape); ///< Floating-point operations.
  tolerance against_double = {};

  constexpr double bytes(shape s, int element_size) const { return moved * s.elements() * element_size; }
};

/// So many operations an element.
template <int PerElement>
constexpr double each(shape s) {
  return PerElement * s.elements();
}
constexpr double product(shape s) {
  return s.product();
}
template <int Products>
constexpr double products(shape s) {
  return Products * s.product();
}

inline constexpr shape hidden = {1024, 768}, wide = {1024, 3072}, logits = {256, 50257};

inline constexpr operation operations[] = {
    {"add", "add", wide, 3, each<1>},
    {"attention", "attention", {12288, 64, 1024}, 4, products<2>},
    {"attention", "attention_backward", {12288, 64, 1024}, 8, products<5>},
    {"cast", "cast", wide, 2, each<0>},
    {"copy_rows", "copy_rows", wide, 2, each<0>},
    {"copy_rows", "add_rows", wide, 3, each<1>},
    {"cross_entropy", "cross_entropy", logits, 1, each<16>},
    {"cross_entropy", "cross_entropy with gradient", logits, 2, each<32>},
    {"dropout", "dropout", wide, 2, each<20>},
    {"dropout", "dropout_add", wide, 3, each<21>},
    {"embedding", "embedding", hidden, 3, each<1>},
    {"embedding", "embedding_backward", hidden, 3, each<2>},
    {"gelu", "gelu", wide, 2, each<25>},
    {"gelu", "gelu_backward", wide, 3, each<32>},
    {"layer_norm", "layer_norm", hidden, 2, each<7>},
    {"layer_norm", "residual_layer_norm", hidden, 4, each<8>},
    {"layer_norm", "layer_norm_backward", hidden, 3, each<14>},
    {"linear", "linear", {1024, 768, 768}, 2, product},
    {"linear", "linear_backward", {1024, 768, 768}, 3, products<2>},
    {"linear_cross_entropy", "linear_cross_entropy", {256, 50257, 768}, 2, products<3>},
    {"linear_swiglu", "linear_swiglu", {1024, 2048, 768}, 4, products<2>},
    {"matmul", "matmul", {1024, 768, 768}, 1, product},
    {"matmul", "matmul_batched", {1024, 768, 768}, 1, product},
    {"merge_attention", "merge_attention", {12288, 64}, 3, each<3>},
    {"random_normal", "random_normal", wide, 1, each<120>},
    {"reduce", "sum", wide, 1, each<1>},
    {"reduce", "sum_of_squares", wide, 1, each<2>},
    {"reduce", "all_finite", wide, 1, each<1>},
    {"rms_norm", "rms_norm", hidden, 2, each<5>},
    {"rms_norm", "residual_rms_norm", hidden, 4, each<6>},
    {"rms_norm", "rms_norm_backward", hidden, 3, each<12>},
    {"rotary", "rotary", hidden, 2, each<3>},
    {"scale", "scale", wide, 2, each<1>},
    {"scale", "fill", wide, 1, each<0>},
    {"sliced_cross_entropy", "softmax_statistics", logits, 1, each<16>},
    {"sliced_cross_entropy", "cross_entropy_of", logits, 2, each<16>},
    {"sliced_cross_entropy", "merge_softmax_statistics", {4096, 4, 8}, 9, each<16>},
    {"swiglu", "swiglu", {1024, 2048}, 3, each<22>},
    {"swiglu", "swiglu_backward", {1024, 2048}, 5, each<28>},
};

} // namespace catalog

#endif
