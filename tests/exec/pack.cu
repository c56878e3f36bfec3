#include <tessera/exec/pack.cuh>

#include <tessera/exec/launch.cuh>

#include "support/device_rows.hpp"

using namespace tessera;
using test::device_rows;
using test::lying;

namespace {

/// One thread moves a part of at most a pack.
template <class T, class U>
__global__ void move_part(U* out, T const* in, index_t count, bool aligned) {
  constexpr int n = exec::pack_size<T, U>;
  float values[n];
  exec::load_part(values, in, count, aligned);
  for (int i = 0; i < n; ++i) values[i] += i < count ? 1.0f : 1e9f;
  exec::store_part(out, values, count, aligned);
}

template <class T, class U>
void check_moves(exec::cuda& ex, lying how) {
  constexpr index_t n = exec::pack_size<T, U>;
  for (index_t count = 0; count <= n; ++count) {
    CAPTURE(count);
    tensor<T, 1> x({count});
    for (index_t i = 0; i < count; ++i) x(i) = T(static_cast<float>(i));
    device_rows<T> in(ex, x, how, 1);
    device_rows<U> out(ex, how, 1, 1, count);
    exec::launch(ex, {}, move_part<T, U>, out.flat().data(), static_cast<T const*>(in.flat().data()), count,
                 how == lying::aligned);
    auto const y = out.read(ex);
    for (index_t i = 0; i < count; ++i) CHECK(static_cast<float>(y.data()[i]) == static_cast<float>(i + 1));
  }
}

} // namespace

TEST_CASE_TEMPLATE("a part of a pack moves and leaves what is around it", T, float, bf16, fp16) {
  exec::cuda ex;
  for (auto how : {lying::aligned, lying::apart}) {
    check_moves<T, float>(ex, how);
    check_moves<T, bf16>(ex, how);
    check_moves<T, fp16>(ex, how);
  }
}

TEST_CASE("a pack is 16 bytes of the narrowest type") {
  static_assert(exec::pack_size<float> == 4);
  static_assert(exec::pack_size<bf16> == 8);
  static_assert(exec::pack_size<float, fp16, float> == 8);
}
