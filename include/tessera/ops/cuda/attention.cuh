/// attention on CUDA, in the manner of FlashAttention-2: scores exist in registers only, forward and
/// backward, and memory is linear in the number of tokens (backward keeps one float a query and head beside
/// the gradients). 16-bit storage goes through the tensor cores (mma.sync m16n8k16, fp32 sums; sm_80 and
/// newer) in tiles made for heads of 64, 96 and 128; narrower heads are filled up with zeros to the next of
/// these. fp32 storage, and wider heads, take the plain kernels. Results do not depend on anything but the
/// inputs: no atomic sums.
///
/// Rows that begin at multiples of 16 bytes are copied by cp.async, others element by element.
///
/// What is not used yet: on sm_90, wgmma would multiply 64-row tiles straight from shared memory and the TMA
/// would bring them, while mma.sync reaches about two thirds of that chip's matrix peak; on sm_100, tcgen05.
#ifndef TESSERA_OPS_CUDA_ATTENTION_CUH
#define TESSERA_OPS_CUDA_ATTENTION_CUH

#include <tessera/exec/scratch.hpp>
#include <tessera/ops/attention.hpp>
#include <tessera/ops/cuda/detail/attention_backward.cuh>
#include <tessera/ops/cuda/detail/attention_forward.cuh>
#include <tessera/ops/cuda/detail/attention_plain.cuh>

namespace tessera::inline TESSERA_ABI::ops {

template <>
struct attention_on<exec::cuda_backend> {
  template <class T>
  using heads = cuda_detail::attention_heads<T>;

  template <exec::cuda_space Ex, storage_scalar T>
  static void forward(Ex& ex, heads<T> out, view<float, 3, exec::cuda_memory> log_sum_exp, heads<T const> q,
                      heads<T const> k, heads<T const> v, detail::attention_shape const& shape,
                      site where = site::here()) {
    if (shape.width == 0) return;
    using namespace cuda_detail;
    attention_forward_arguments<T> const x{.out = out,
                                           .log_sum_exp = log_sum_exp.data(),
                                           .q = q,
                                           .k = k,
                                           .v = v,
                                           .sizes = attention_sizes(shape, where)};
    auto const tiled =
        rows_are_aligned(out, q, k, v) &&
        for_width<T>(shape.width, [&]<int Width>(std::integral_constant<int, Width>) {
          using tuning = attention_forward_tuning<Width>;
          launch_blocks<tuning>(ex, shape.batch * shape.heads * blocks_of(x.sizes.queries, tuning::queries),
                                attention_forward_tiles<T, Width>, x, where);
        });
    if (!tiled)
      launch_rows(ex, shape.batch, shape.heads * shape.queries, 2 * shape.width, attention_forward_plain<T>,
                  x, where);
  }

  template <exec::cuda_space Ex, storage_scalar T>
  static void backward(Ex& ex, heads<T> dq, heads<T> dk, heads<T> dv, heads<T const> d_out, heads<T const> q,
                       heads<T const> k, heads<T const> v, heads<T const> out,
                       view<float const, 3, exec::cuda_memory> log_sum_exp,
                       detail::attention_shape const& shape, site where = site::here()) {
    if (shape.width == 0) return;
    using namespace cuda_detail;
    auto const rows = shape.batch * shape.heads * shape.queries;
    auto& memory = ex.template handle<exec::scratch<delta_memory, exec::cuda_memory>>();
    auto* const delta = memory.template take<float>(rows, where);
    attention_backward_arguments<T> const x{.dq = dq,
                                            .dk = dk,
                                            .dv = dv,
                                            .d_out = d_out,
                                            .q = q,
                                            .k = k,
                                            .v = v,
                                            .out = out,
                                            .log_sum_exp = log_sum_exp.data(),
                                            .delta = delta,
                                            .sizes = attention_sizes(shape, where),
                                            .aligned = rows_are_aligned(dq, dk, dv, d_out, q, k, v, out)};
    exec::launch(ex,
                 {.grid = exec::grid_of((rows * 8 + attention_delta_threads - 1) / attention_delta_threads, 1,
                                        1, where),
                  .block = dim3(attention_delta_threads),
                  .where = where},
                 attention_delta<T>, x, rows);
    auto const tiled =
        x.aligned && for_width<T>(shape.width, [&]<int Width>(std::integral_constant<int, Width>) {
          using of_keys = attention_keys_tuning<Width>;
          using of_queries = attention_queries_tuning<Width>;
          launch_blocks<of_keys>(ex, shape.batch * shape.key_heads * blocks_of(x.sizes.keys, of_keys::keys),
                                 attention_backward_keys<T, Width>, x, where);
          launch_blocks<of_queries>(
              ex, shape.batch * shape.heads * blocks_of(x.sizes.queries, of_queries::queries),
              attention_backward_queries<T, Width>, x, where);
        });
    if (tiled) return;
    launch_rows(ex, shape.batch, shape.key_heads * shape.keys, 4 * shape.width,
                attention_backward_keys_plain<T>, x, where);
    launch_rows(ex, shape.batch, shape.heads * shape.queries, 3 * shape.width,
                attention_backward_queries_plain<T>, x, where);
  }

private:
  struct delta_memory {};

  /// Calls `with` with the narrowest tile that heads of `width` fit; false where there is none.
  template <storage_scalar T, class With>
  static bool for_width(index_t width, With&& with) {
    if constexpr (sizeof(T) == 2) {
      if (width <= 64)
        with(std::integral_constant<int, 64>());
      else if (width <= 96)
        with(std::integral_constant<int, 96>());
      else if (width <= 128)
        with(std::integral_constant<int, 128>());
      return width <= 128;
    } else {
      return false;
    }
  }

  template <class Tuning, exec::cuda_space Ex, class Arguments>
  static void launch_blocks(Ex& ex, index_t blocks, void (*kernel)(Arguments), Arguments const& x,
                            site where) {
    exec::launch(ex,
                 {.grid = exec::grid_of(narrow<int>(blocks, where), 1, 1, where),
                  .block = dim3(Tuning::threads),
                  .shared_bytes = Tuning::shared_bytes,
                  .where = where},
                 kernel, x);
  }

  /// A warp for each of `rows` rows of each sample, with so many floats of shared memory.
  template <exec::cuda_space Ex, class Arguments>
  static void launch_rows(Ex& ex, index_t batch, index_t rows, index_t floats, void (*kernel)(Arguments, int),
                          Arguments const& x, site where) {
    auto const threads = cuda_detail::attention_plain_tuning::threads(narrow<int>(floats, where));
    auto const warps = threads / 32;
    exec::launch(ex,
                 {.grid = exec::grid_of(narrow<int>((batch * rows + warps - 1) / warps, where), 1, 1, where),
                  .block = dim3(static_cast<unsigned>(threads)),
                  .shared_bytes = static_cast<std::size_t>(4 * floats * warps),
                  .where = where},
                 kernel, x, narrow<int>(batch, where));
  }
};

} // namespace tessera::inline TESSERA_ABI::ops

#endif
