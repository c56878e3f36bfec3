/// Matrix products straight from oneDNN, the peer of everything here that multiplies: operands, and in bf16
/// the compiled products, are made beforehand, so that a run is nothing but calls of oneDNN.
#ifndef TESSERA_BENCH_SUPPORT_BARE_PRODUCTS_HPP
#define TESSERA_BENCH_SUPPORT_BARE_PRODUCTS_HPP

#include <unordered_map>

#include <dnnl.hpp>

#include <tessera/core/scalar.hpp>

#include "support/measure.hpp"

namespace bench {

/// c[m, n] = op(a) op(b) with op(a) [m, k] and op(b) [k, n].
struct product_shape {
  index_t m, n, k;
  bool transpose_a = false;
  bool transpose_b = false;

  double operations() const {
    return 2.0 * static_cast<double>(m) * static_cast<double>(n) * static_cast<double>(k);
  }
};

inline bool machine_multiplies_bf16() {
  return (static_cast<unsigned>(dnnl_get_effective_cpu_isa()) & dnnl_cpu_isa_avx512_core_bf16) ==
         dnnl_cpu_isa_avx512_core_bf16;
}

/// A list of products with operands of type T. bf16 where the processor has no bf16 matrix instructions runs
/// the same products in fp32, as Tessera does; `name()` says which it is.
template <tessera::storage_scalar T>
class bare_products {
public:
  explicit bare_products(std::vector<product_shape> shapes) : shapes_(std::move(shapes)) {
    index_t a = 0, b = 0, c = 0;
    for (auto const& s : shapes_) {
      a = std::max(a, s.m * s.k);
      b = std::max(b, s.k * s.n);
      c = std::max(c, s.m * s.n);
    }
    if (native_) {
      a16_ = tessera::tensor<tessera::bf16, 1>({a});
      b16_ = tessera::tensor<tessera::bf16, 1>({b});
      c16_ = tessera::tensor<tessera::bf16, 1>({c});
      for (auto const& s : shapes_) compile(s);
    } else {
      a_ = tessera::tensor<float, 1>({a});
      b_ = tessera::tensor<float, 1>({b});
      c_ = tessera::tensor<float, 1>({c});
    }
  }

  std::string name() const { return std::string("bare oneDNN products in ") + (native_ ? "bf16" : "fp32"); }

  void operator()() {
    if (native_) {
      for (auto& p : compiled_) p.run.execute(stream_, p.memory);
      stream_.wait();
      return;
    }
    for (auto const& s : shapes_) {
      auto const status =
          dnnl_sgemm(s.transpose_a ? 'T' : 'N', s.transpose_b ? 'T' : 'N', s.m, s.n, s.k, 1.0f, a_.data(),
                     s.transpose_a ? s.m : s.k, b_.data(), s.transpose_b ? s.k : s.n, 0.0f, c_.data(), s.n);
      if (status != dnnl_success) std::abort();
    }
  }

private:
  struct compiled {
    dnnl::matmul run;
    std::unordered_map<int, dnnl::memory> memory;
  };

  void compile(product_shape const& s) {
    using desc = dnnl::memory::desc;
    using dims = dnnl::memory::dims;
    constexpr auto type = dnnl::memory::data_type::bf16;
    desc const a({s.m, s.k}, type, s.transpose_a ? dims{1, s.m} : dims{s.k, 1});
    desc const b({s.k, s.n}, type, s.transpose_b ? dims{1, s.k} : dims{s.n, 1});
    desc const c({s.m, s.n}, type, dims{s.n, 1});
#if DNNL_VERSION_MAJOR >= 3
    dnnl::matmul::primitive_desc const plan(engine_, a, b, c);
#else
    dnnl::matmul::primitive_desc const plan({a, b, c}, engine_);
#endif
    compiled_.push_back({dnnl::matmul(plan),
                         {{DNNL_ARG_SRC, {a, engine_, a16_.data()}},
                          {DNNL_ARG_WEIGHTS, {b, engine_, b16_.data()}},
                          {DNNL_ARG_DST, {c, engine_, c16_.data()}}}});
  }

  bool native_ = std::same_as<T, tessera::bf16> && machine_multiplies_bf16();
  std::vector<product_shape> shapes_;
  dnnl::engine engine_{dnnl::engine::kind::cpu, 0};
  dnnl::stream stream_{engine_};
  tessera::tensor<float, 1> a_, b_, c_;
  tessera::tensor<tessera::bf16, 1> a16_, b16_, c16_;
  std::vector<compiled> compiled_;
};

} // namespace bench

#endif
