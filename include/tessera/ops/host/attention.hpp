/// attention on the host. A worker takes one key head of one sample at a time, packs its keys and values into
/// panels once, and runs the query heads that read them over the panels in register tiles: the scores of a
/// few queries against a block of keys stay in the first cache from product to softmax to product. Gradients
/// of keys and values are added up by that one worker, in order.
#ifndef TESSERA_OPS_HOST_ATTENTION_HPP
#define TESSERA_OPS_HOST_ATTENTION_HPP

#include <tessera/ops/attention.hpp>
#include <tessera/ops/elementary.hpp>
#include <tessera/ops/host/detail/attention_head.hpp>

namespace tessera::inline TESSERA_ABI::ops {

template <>
struct attention_on<exec::host_backend> {
  template <exec::host_space Ex, storage_scalar T>
  static void forward(Ex& ex, view<T, 4> out, view<float, 3> log_sum_exp, view<T const, 4> q,
                      view<T const, 4> k, view<T const, 4> v, detail::attention_shape const& shape) {
    using head = host_detail::attention_forward<T>;
    for_key_heads(ex, shape, head::floats(shape), [&](float* memory, index_t sample, index_t key_head) {
      head worker(memory, shape, head_of(k, sample, key_head), head_of(v, sample, key_head));
      auto const group = shape.heads / shape.key_heads;
      for (auto h = key_head * group; h < (key_head + 1) * group; ++h)
        worker.run(head_of(out, sample, h), log_sum_exp[sample][h].data(), head_of(q, sample, h));
    });
  }

  template <exec::host_space Ex, storage_scalar T>
  static void backward(Ex& ex, view<T, 4> dq, view<T, 4> dk, view<T, 4> dv, view<T const, 4> d_out,
                       view<T const, 4> q, view<T const, 4> k, view<T const, 4> v, view<T const, 4> out,
                       view<float const, 3> log_sum_exp, detail::attention_shape const& shape) {
    using head = host_detail::attention_backward<T>;
    for_key_heads(ex, shape, head::floats(shape), [&](float* memory, index_t sample, index_t key_head) {
      head worker(memory, shape, head_of(k, sample, key_head), head_of(v, sample, key_head));
      auto const group = shape.heads / shape.key_heads;
      for (auto h = key_head * group; h < (key_head + 1) * group; ++h)
        worker.run(head_of(dq, sample, h), head_of(d_out, sample, h), head_of(q, sample, h),
                   head_of(out, sample, h), log_sum_exp[sample][h].data());
      worker.finish(head_of(dk, sample, key_head), head_of(dv, sample, key_head));
    });
  }

private:
  /// The [tokens, width] matrix of one head.
  template <class T>
  static view<T, 2> head_of(view<T, 4> x, index_t sample, index_t head) {
    return {
        x.data() + sample * x.stride(0) + head * x.stride(2), {x.extent(1), x.extent(3)}, {x.stride(1), 1}};
  }

  /// Calls body(memory, sample, key_head) for each key head, with `floats` of memory of the worker's own.
  template <exec::host_space Ex, std::invocable<float*, index_t, index_t> Body>
  static void for_key_heads(Ex& ex, detail::attention_shape const& shape, index_t floats, Body&& body) {
    auto const heads = shape.batch * shape.key_heads;
    if (heads == 0 || shape.width == 0) return;
    auto const workers = std::min<index_t>(ex.threads(), heads);
    auto& buffers = ex.template handle<host_detail::product_buffers>();
    buffers.reserve(narrow<int>(workers), floats);
    ex.parallel_for(workers, 1, [&](index_t begin, index_t end) {
      for (auto w = begin; w < end; ++w)
        for (auto i = heads * w / workers; i < heads * (w + 1) / workers; ++i)
          body(buffers.of(w), i / shape.key_heads, i % shape.key_heads);
    });
  }
};

} // namespace tessera::inline TESSERA_ABI::ops

#endif
