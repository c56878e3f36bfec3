/// Benchmarks of operations: sizes and bytes come from the tests' catalog, so that both speak of the same
/// thing.
#ifndef TESSERA_BENCH_SUPPORT_OPERATION_HPP
#define TESSERA_BENCH_SUPPORT_OPERATION_HPP

#include <stdexcept>

#include <tessera/core/philox.hpp>

#include "../../tests/ops/catalog.hpp"
#include "support/bare_products.hpp"

namespace bench {

inline catalog::operation const& described(std::string_view name) {
  for (auto const& each : catalog::operations)
    if (each.name == name) return each;
  throw std::runtime_error("tests/ops/catalog.hpp does not describe " + std::string(name));
}

/// A tensor of normal numbers.
template <tessera::storage_scalar T, int Rank>
tessera::tensor<T, Rank> drawn(tessera::extents<Rank> const& sizes, std::uint64_t stream) {
  tessera::tensor<T, Rank> x(sizes);
  tessera::philox const random(1, stream);
  for (index_t i = 0; i < x.size(); ++i)
    x.data()[i] = static_cast<T>(random.normal(static_cast<std::uint64_t>(i)));
  return x;
}

/// Token or target numbers below `end`.
inline tessera::tensor<std::int32_t, 1> drawn_tokens(index_t count, index_t end) {
  tessera::tensor<std::int32_t, 1> x({count});
  tessera::philox const random(2);
  for (index_t i = 0; i < count; ++i)
    x.data()[i] = static_cast<std::int32_t>(random.bits(static_cast<std::uint64_t>(i)) %
                                            static_cast<std::uint32_t>(end));
  return x;
}

/// Registers `make(ex, shape)`, which returns the call to measure, as "ops/HEADER/NAME_fp32" and "..._bf16".
/// Memory-bound operations stand beside the triad over as many bytes.
template <class Make>
void memory_bound(std::string_view name, Make make) {
  auto const add = [&]<class T>(T, char const* suffix) {
    auto const& op = described(name);
    auto title = "ops/" + std::string(op.header) + "/" + std::string(op.name) + suffix;
    std::replace(title.begin(), title.end(), ' ', '_');
    benchmark::RegisterBenchmark(title.c_str(), [&op, make](benchmark::State& state) {
      tessera::exec::host ex;
      auto run = make.template operator()<T>(ex, op.usual);
      against_triad(state, ex, op.bytes(op.usual, sizeof(T)), [&] {
        run();
        benchmark::ClobberMemory();
      });
    })->UseManualTime();
  };
  add(float{}, "_fp32");
  add(tessera::bf16{}, "_bf16");
}

/// The same for operations that are bound by arithmetic: beside bare oneDNN products of `shapes`, scaled to
/// as many operations where the products are not the very same ones.
template <class Make>
void product_bound(std::string_view name, std::vector<product_shape> shapes, Make make) {
  auto const add = [&]<class T>(T, char const* suffix) {
    auto const& op = described(name);
    auto const title = "ops/" + std::string(op.header) + "/" + std::string(op.name) + suffix;
    benchmark::RegisterBenchmark(title.c_str(), [&op, shapes, make](benchmark::State& state) {
      tessera::exec::host ex;
      auto run = make.template operator()<T>(ex, op.usual);
      bare_products<T> bare(shapes);
      double bare_operations = 0;
      for (auto const& s : shapes) bare_operations += s.operations();
      auto const times = run_by_turns(
          state,
          [&] {
            run();
            benchmark::ClobberMemory();
          },
          bare);
      publish(state, times, "times_peer", bare.name(), op.flops(op.usual) / bare_operations);
    })->UseManualTime();
  };
  add(float{}, "_fp32");
  add(tessera::bf16{}, "_bf16");
}

} // namespace bench

#endif
