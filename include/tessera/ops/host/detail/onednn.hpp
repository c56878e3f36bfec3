/// The matrix product by oneDNN: the only file that includes dnnl.hpp, and where its versions 2 and 3 differ.
///
/// fp32 goes to dnnl_sgemm, which needs no compiled object and is as fast as the matmul primitive. bf16 goes
/// to matmul primitives, kept by shape, where the processor has bf16 matrix instructions; elsewhere, and for
/// fp16 and mixtures, to the portable product, which widens operands to fp32 as it packs them.
#ifndef TESSERA_OPS_HOST_DETAIL_ONEDNN_HPP
#define TESSERA_OPS_HOST_DETAIL_ONEDNN_HPP

#include <unordered_map>

#include <dnnl.hpp>

#include <tessera/ops/host/detail/loops.hpp>
#include <tessera/ops/host/detail/portable_product.hpp>

namespace tessera::inline TESSERA_ABI::ops::host_detail {

/// Gives oneDNN, which asks OpenMP, this many threads until the end of a scope. The setting belongs to the
/// calling thread, so that ranks that are threads do not disturb each other. (Without OpenMP on this side
/// oneDNN takes what OMP_NUM_THREADS says.)
class onednn_threads {
public:
#if defined(_OPENMP)
  explicit onednn_threads(int count) noexcept : held_(omp_get_max_threads()) {
    if (held_ != count) omp_set_num_threads(count);
  }
  ~onednn_threads() {
    omp_set_num_threads(held_);
  }

private:
  int held_;
#else
  explicit onednn_threads(int) noexcept {}
#endif
};

/// Calls f; an exception of oneDNN leaves as library_error.
template <std::invocable F>
decltype(auto) with_onednn(char const* what, F&& f) {
  try {
    return f();
  } catch (dnnl::error const& failure) {
    throw library_error("E-ops-105", site::here(), "oneDNN could not ", what, ": ", failure.message,
                        " (status ", static_cast<int>(failure.status), ")");
  }
}

/// One matrix as oneDNN sees it: element (i, j) at i * row + j * column, one of which is 1.
struct onednn_matrix {
  dnnl::memory::data_type type;
  index_t rows, columns, row, column;

  bool operator==(onednn_matrix const&) const = default;
  dnnl::memory::desc describe() const { return {{rows, columns}, type, dnnl::memory::dims{row, column}}; }
};

template <storage_scalar T>
onednn_matrix onednn_matrix_of(view<T const, 2> x) {
  auto const type = std::same_as<T, float> ? dnnl::memory::data_type::f32 : dnnl::memory::data_type::bf16;
  return {type, x.extent(0), x.extent(1), x.stride(0), x.stride(1)};
}

/// Compiled products of one execution space, by shape.
class onednn_products {
public:
  explicit onednn_products(memory_account account) : account_(account) {}

  /// Whether products of bf16 are fast: oneDNN would emulate them, or refuse, on lesser processors.
  bool native_bf16() const noexcept { return native_bf16_; }

  /// True once, for a notice to the user.
  bool first_widening() noexcept { return !std::exchange(widened_, true); }

  void run(int threads, void* c, void const* a, void const* b, onednn_matrix const& shape_c,
           onednn_matrix const& shape_a, onednn_matrix const& shape_b, bool accumulate) {
    with_onednn("multiply matrices", [&] {
      auto& product = find(threads, shape_c, shape_a, shape_b, accumulate);
      product.memory.at(DNNL_ARG_SRC).set_data_handle(const_cast<void*>(a)); // NOLINT: oneDNN only reads it
      product.memory.at(DNNL_ARG_WEIGHTS).set_data_handle(const_cast<void*>(b)); // NOLINT
      product.memory.at(DNNL_ARG_DST).set_data_handle(c);
      product.memory.at(DNNL_ARG_SCRATCHPAD).set_data_handle(scratchpad_.data());
      product.run.execute(stream_, product.memory);
      stream_.wait();
    });
  }

private:
  struct compiled {
    int threads;
    onednn_matrix c, a, b;
    bool accumulate;
    dnnl::matmul run;
    std::unordered_map<int, dnnl::memory> memory;
  };
  /// More shapes than any model has; a program that makes ever new ones starts over here.
  static constexpr std::size_t most = 512;

  compiled& find(int threads, onednn_matrix const& c, onednn_matrix const& a, onednn_matrix const& b,
                 bool accumulate) {
    for (auto& known : compiled_)
      if (known.c == c && known.a == a && known.b == b && known.accumulate == accumulate &&
          known.threads == threads)
        return known;
    dnnl::primitive_attr attributes;
    attributes.set_scratchpad_mode(dnnl::scratchpad_mode::user);
    if (accumulate) {
      dnnl::post_ops after;
      after.append_sum(1.0f);
      attributes.set_post_ops(after);
    }
#if DNNL_VERSION_MAJOR >= 3
    dnnl::matmul::primitive_desc const plan(engine_, a.describe(), b.describe(), c.describe(), attributes);
#else
    dnnl::matmul::primitive_desc const plan({a.describe(), b.describe(), c.describe()}, attributes, engine_);
#endif
    auto const without_data = [&](dnnl::memory::desc const& shape) {
      return dnnl::memory(shape, engine_, DNNL_MEMORY_NONE);
    };
    auto const scratch_bytes = static_cast<index_t>(plan.scratchpad_desc().get_size());
    if (scratchpad_.bytes() < scratch_bytes) scratchpad_ = buffer<>(scratch_bytes, account_);
    if (compiled_.size() == most) compiled_.clear();
    compiled_.push_back({threads,
                         c,
                         a,
                         b,
                         accumulate,
                         dnnl::matmul(plan),
                         {{DNNL_ARG_SRC, without_data(a.describe())},
                          {DNNL_ARG_WEIGHTS, without_data(b.describe())},
                          {DNNL_ARG_DST, without_data(c.describe())},
                          {DNNL_ARG_SCRATCHPAD, without_data(plan.scratchpad_desc())}}});
    return compiled_.back();
  }

  dnnl::engine engine_ = with_onednn("start", [] { return dnnl::engine(dnnl::engine::kind::cpu, 0); });
  dnnl::stream stream_ = with_onednn("start", [this] { return dnnl::stream(engine_); });
  bool native_bf16_ = (static_cast<unsigned>(dnnl_get_effective_cpu_isa()) & dnnl_cpu_isa_avx512_core_bf16) ==
                      dnnl_cpu_isa_avx512_core_bf16;
  bool widened_ = false;
  std::vector<compiled> compiled_;
  memory_account account_;
  buffer<> scratchpad_;
};

template <>
struct product_by<exec::onednn_product> {
  template <exec::host_space Ex, storage_scalar C, storage_scalar A, storage_scalar B>
  static void run(Ex& ex, view<C, 2> c, view<A const, 2> a, view<B const, 2> b, bool accumulate) {
    using portable = product_by<exec::portable_product>;
    auto const regular = a.extent(1) > 0 && leading(c) > 0 && leading(a) > 0 && leading(b) > 0;
    if constexpr (std::same_as<C, float> && std::same_as<A, float> && std::same_as<B, float>) {
      if (regular && !slow_in_onednn(c, b)) return multiply(ex, c, a, b, accumulate);
    } else if constexpr (std::same_as<A, bf16> && std::same_as<B, bf16> && !std::same_as<C, fp16>) {
      auto& products = ex.template handle<onednn_products>();
      if (regular && products.native_bf16()) {
        onednn_threads const threads(ex.threads());
        return products.run(ex.threads(), c.data(), a.data(), b.data(), onednn_matrix_of<C>(c),
                            onednn_matrix_of<A>(a), onednn_matrix_of<B>(b), accumulate);
      }
      if (!products.native_bf16() && products.first_widening())
        ex.note("this processor has no bf16 matrix instructions: products of bf16 are computed in fp32");
    }
    portable::run(ex, c, a, b, accumulate);
  }

private:
  /// The distance between adjacent lines, or 0 where lines overlap, which oneDNN does not take.
  template <class T>
  static index_t leading(view<T, 2> x) {
    auto const rows_dense = x.stride(1) == 1;
    auto const lines = x.extent(rows_dense ? 0 : 1), length = x.extent(rows_dense ? 1 : 0);
    auto const stride = x.stride(rows_dense ? 0 : 1);
    if (stride >= length) return stride;
    return lines == 1 ? length : 0;
  }

  /// Rows of b that lie a multiple of 4 KiB apart fall into the same sets of the first cache, and dnnl_sgemm
  /// reads few rows of c's width from them in place: half its usual speed (measured with oneDNN 2.6 on AVX2).
  static bool slow_in_onednn(view<float, 2> c, view<float const, 2> b) {
    constexpr index_t page = 4096 / sizeof(float);
    return b.stride(1) == 1 && b.stride(0) % page == 0 && c.extent(0) < 1024;
  }

  template <exec::host_space Ex>
  static void multiply(Ex& ex, view<float, 2> c, view<float const, 2> a, view<float const, 2> b,
                       bool accumulate) {
    onednn_threads const threads(ex.threads());
    auto const transposed = [](view<float const, 2> x) { return x.stride(1) == 1 ? 'N' : 'T'; };
    auto const status =
        dnnl_sgemm(transposed(a), transposed(b), c.extent(0), c.extent(1), a.extent(1), 1.0f, a.data(),
                   leading(a), b.data(), leading(b), accumulate ? 1.0f : 0.0f, c.data(), leading(c));
    if (status != dnnl_success)
      throw library_error("E-ops-105", site::here(), "oneDNN could not multiply ", text_of(a.extents()),
                          " by ", text_of(b.extents()), " (status ", static_cast<int>(status), ")");
  }
};

} // namespace tessera::inline TESSERA_ABI::ops::host_detail

#endif
