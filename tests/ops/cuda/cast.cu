#include <tessera/ops/cuda/cast.cuh>

#include "ops/cuda/fixture.hpp"

using namespace cuda_fixture;

namespace {

template <class To, class From>
void check_cast(exec::cuda& ex, tensor<From, 1> const& x, lying how) {
  exec::host host({.threads = 1});
  device_rows<From> in(ex, x, how, 0);
  device_rows<To> out(ex, how, 1, 1, x.size());
  tensor<To, 1> expected({x.size()});
  ops::cast(ex, out.flat(), in.flat());
  ops::cast(host, expected.view(), x.view());
  CHECK(bits(out.read(ex)) == bits(expected));
}

} // namespace

TEST_CASE_TEMPLATE("cast rounds as the host does, wherever arrays lie", From, float, bf16, fp16) {
  exec::cuda ex;
  for (auto n : counts)
    for (auto how : lyings) {
      CAPTURE(n);
      auto const x = reference::normal<From, 1>({n}, 1);
      check_cast<float>(ex, x, how);
      check_cast<bf16>(ex, x, how);
      check_cast<fp16>(ex, x, how);
    }
}

TEST_CASE("cast keeps infinities, signs of zero and ties, and rounds to subnormal numbers") {
  exec::cuda ex;
  tensor<float, 1> x({12});
  float const hard[] = {INFINITY, -INFINITY, 0.0f,   -0.0f,       65519.0f,    65520.0f,
                        1e-7f,    -3e-8f,    1e-40f, 1.00390625f, 1.01171875f, 3.4e38f};
  for (index_t i = 0; i < x.size(); ++i) x(i) = hard[i];
  check_cast<bf16>(ex, x, lying::aligned);
  check_cast<fp16>(ex, x, lying::aligned);
  x(0) = NAN;
  device_rows<float> in(ex, x, lying::aligned, 0);
  device_rows<bf16> out(ex, lying::aligned, 1, 1, x.size());
  device_rows<fp16> half(ex, lying::aligned, 1, 1, x.size());
  ops::cast(ex, out.flat(), in.flat());
  ops::cast(ex, half.flat(), in.flat());
  CHECK(std::isnan(static_cast<float>(out.read(ex)(0, 0))));
  CHECK(std::isnan(static_cast<float>(half.read(ex)(0, 0))));
}

TEST_CASE_TEMPLATE("every 16-bit number widens, and numbers of all sizes round, as on the host", T, bf16,
                   fp16) {
  exec::cuda ex;
  tensor<T, 1> all({65536});
  tensor<float, 1> numbers_of_all_sizes({40000});
  index_t numbers = 0;
  for (std::uint32_t bits = 0; bits < 65536; ++bits) {
    auto const x = T::from_bits(static_cast<std::uint16_t>(bits));
    if (!std::isnan(static_cast<float>(x))) all(numbers++) = x; // the rest stays zero
  }
  check_cast<float>(ex, all, lying::aligned);
  philox const random(5);
  for (index_t i = 0; i < numbers_of_all_sizes.size(); ++i) {
    auto const x = std::bit_cast<float>(random.bits(static_cast<std::uint64_t>(i)));
    numbers_of_all_sizes(i) = std::isnan(x) ? 1.0f : x;
  }
  check_cast<T>(ex, numbers_of_all_sizes, lying::aligned);
}
