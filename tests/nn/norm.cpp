#include <doctest/doctest.h>

#include <tessera/exec/host.hpp>
#include <tessera/nn/norm.hpp>

#include "fixture.hpp"

using namespace tessera;

namespace {

using ex_t = exec::host;

/// A norm of rows, in double. `mean` says whether the mean is taken out.
std::vector<double> expected(std::vector<float> const& in, index_t width, bool mean, float gain_of_all) {
  std::vector<double> out;
  for (std::size_t row = 0; row < in.size(); row += static_cast<std::size_t>(width)) {
    double m = 0, v = 0;
    for (index_t i = 0; i < width; ++i) m += in[row + static_cast<std::size_t>(i)];
    m = mean ? m / static_cast<double>(width) : 0;
    for (index_t i = 0; i < width; ++i) v += std::pow(in[row + static_cast<std::size_t>(i)] - m, 2);
    for (index_t i = 0; i < width; ++i)
      out.push_back((in[row + static_cast<std::size_t>(i)] - m) /
                    std::sqrt(v / static_cast<double>(width) + 1e-5) * gain_of_all);
  }
  return out;
}

template <class Norm, bool Mean>
void check_norm() {
  index_t const rows = 3, width = 13;
  ex_t ex({.threads = 1});
  layout::parameter_map map;
  Norm const norm(map, "n", width, 1e-5f);
  CHECK(map.size() == (Mean ? 2 : 1));
  CHECK(map[0].name == "n.weight");
  CHECK(map[0].kind == layout::parameter_kind::norm_gain);

  std::vector<float> weights(static_cast<std::size_t>(map.block_size())), gradients(weights.size());
  for (index_t i = 0; i < width; ++i) weights[static_cast<std::size_t>(i)] = 1.5f;
  auto a = fixture::numbers(rows * width, 1), b = fixture::numbers(rows * width, 2);
  std::vector<float> out(a.size()), sum(a.size()), d_in(a.size());
  auto const matrix = [&](std::vector<float>& x) { return view<float, 2>(x.data(), {rows, width}); };

  arena<> memory(4096);
  auto const statistics = norm.take(memory, rows);
  CHECK(memory.used() == nn::detail::planned_bytes<host_memory>([&](auto& plan) { norm.take(plan, rows); }));
  norm.forward(ex, std::span<float const>(weights), matrix(out), matrix(a), statistics);
  CHECK(fixture::distance(out, expected(a, width, Mean, 1.5f)) < 1e-6);

  norm.forward_sum(ex, std::span<float const>(weights), matrix(out), matrix(sum), matrix(a), matrix(b),
                   statistics);
  for (std::size_t i = 0; i < a.size(); ++i) CHECK(sum[i] == a[i] + b[i]);
  CHECK(fixture::distance(out, expected(sum, width, Mean, 1.5f)) < 1e-6);

  auto d_out = fixture::numbers(rows * width, 3);
  auto const backward = [&](nn::backward_options options) {
    norm.backward(ex, std::span<float const>(weights), std::span<float>(gradients), matrix(d_in),
                  matrix(d_out), matrix(sum), statistics, options);
  };
  backward({});
  auto const once = d_in, gradients_once = gradients;
  for (std::size_t i : {0u, 12u, 13u, 38u}) {
    auto const loss = [&] { return fixture::inner(expected(sum, width, Mean, 1.5f), d_out); };
    CHECK(d_in[i] == doctest::Approx(fixture::slope(loss, sum[i], 1e-2f)).epsilon(1e-4));
  }
  backward({.accumulate = true, .accumulate_input = true});
  for (std::size_t i = 0; i < d_in.size(); ++i) CHECK(d_in[i] == doctest::Approx(2 * once[i]));
  for (std::size_t i = 0; i < gradients.size(); ++i)
    CHECK(gradients[i] == doctest::Approx(2 * gradients_once[i]));
}

} // namespace

TEST_CASE("the layer norm layer is the formula, its backward its slope") {
  check_norm<nn::layer_norm<ex_t, float, float>, true>();
}

TEST_CASE("the RMS norm layer is the formula, its backward its slope") {
  check_norm<nn::rms_norm<ex_t, float, float>, false>();
}

TEST_CASE("both norms model the concept") {
  CHECK(nn::norm_layer<nn::layer_norm<ex_t, bf16, float>, ex_t, bf16, float>);
  CHECK(nn::norm_layer<nn::rms_norm<ex_t, fp16, float>, ex_t, fp16, float>);
  CHECK(!nn::norm_layer<int, ex_t, float, float>);
}
