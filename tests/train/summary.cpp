#include <doctest/doctest.h>

#include <tessera/train/summary.hpp>

using namespace tessera;

namespace {

index_t at(train::bytes_by_kind const& bytes, memory_kind kind) {
  return bytes[static_cast<std::size_t>(kind)];
}

} // namespace

TEST_CASE("the formula divides the optimizer's state, then the gradients, then the weights") {
  // 16 bytes a weight of mixed-precision Adam in the paper: 2 weights + 2 gradients + 12 state.
  auto const whole = train::zero_formula(
      1000, {.ranks = 4, .zero = 0, .weight_bytes = 2, .gradient_bytes = 2, .state_bytes = 12});
  CHECK(at(whole, memory_kind::parameters) + at(whole, memory_kind::gradients) +
            at(whole, memory_kind::optimizer_state) ==
        16000);
  auto const shared = train::zero_formula(
      1000, {.ranks = 4, .zero = 1, .weight_bytes = 2, .gradient_bytes = 2, .state_bytes = 12});
  CHECK(at(shared, memory_kind::parameters) == 2000);
  CHECK(at(shared, memory_kind::gradients) == 2000);
  CHECK(at(shared, memory_kind::optimizer_state) == 3000);
  CHECK(at(shared, memory_kind::activations) == -1);
  auto const sum = [](int zero) { // (2 + 14 / N) and 16 / N bytes a weight
    auto const bytes = train::zero_formula(
        1000, {.ranks = 4, .zero = zero, .weight_bytes = 2, .gradient_bytes = 2, .state_bytes = 12});
    return at(bytes, memory_kind::parameters) + at(bytes, memory_kind::gradients) +
           at(bytes, memory_kind::optimizer_state);
  };
  CHECK(sum(2) == 5500);
  CHECK(sum(3) == 4000);
}

TEST_CASE("the table shows peaks, the formula where there is one, and the sum") {
  memory_meter meter;
  {
    buffer<> weights(3 << 20, {&meter, memory_kind::parameters});
    buffer<> activations(5 << 20, {&meter, memory_kind::activations});
  }
  auto const table = train::memory_table(
      train::peaks_of(meter), train::zero_formula((3 << 20) / 2, {.ranks = 1, .zero = 1, .weight_bytes = 2}));
  CHECK(table.find("parameters             3.00 MiB       3.00 MiB\n") != std::string::npos);
  CHECK(table.find("activations            5.00 MiB") != std::string::npos);
  CHECK(table.find("sum                    8.00 MiB\n") != std::string::npos);
  CHECK(table.find("data") == std::string::npos);
}
