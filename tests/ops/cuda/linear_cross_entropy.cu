#include <tessera/ops/cuda/linear_cross_entropy.cuh>

#include "ops/cuda/fixture.hpp"
#include "support/cuda.hpp"

using namespace cuda_fixture;
using test::on_device;

namespace {

using device_arena = arena<exec::cuda_memory>;

struct exact {
  double sum = 0, count = 0;
  numbers d_in, d_weight;

  exact(index_t rows, index_t width, index_t classes, numbers const& in, numbers const& weight,
        std::span<std::int32_t const> targets, float gradient_scale)
      : d_in(in.size()), d_weight(weight.size()) {
    auto const cell = [width](index_t row, index_t column) {
      return static_cast<std::size_t>(row * width + column);
    };
    for (index_t r = 0; r < rows; ++r) {
      auto const target = targets[static_cast<std::size_t>(r)];
      if (target == ops::ignore_index) continue;
      numbers logit(static_cast<std::size_t>(classes));
      double total = 0;
      for (index_t c = 0; c < classes; ++c) {
        auto& x = logit[static_cast<std::size_t>(c)];
        for (index_t d = 0; d < width; ++d) x += in[cell(r, d)] * weight[cell(c, d)];
        total += std::exp(x);
      }
      sum += std::log(total) - logit[static_cast<std::size_t>(target)];
      count += 1;
      for (index_t c = 0; c < classes; ++c) {
        auto const p = std::exp(logit[static_cast<std::size_t>(c)]) / total;
        auto const d = static_cast<double>(gradient_scale) * (p - (c == target ? 1 : 0));
        for (index_t w = 0; w < width; ++w) {
          d_in[cell(r, w)] += d * weight[cell(c, w)];
          d_weight[cell(c, w)] += d * in[cell(r, w)];
        }
      }
    }
  }
};

template <class T, class G>
void compare(index_t rows, index_t width, index_t classes, index_t chunk, bool accumulate) {
  CAPTURE(rows);
  CAPTURE(chunk);
  exec::cuda ex;
  auto const in = reference::normal<T, 2>({rows, width}, 1),
             weight = reference::normal<T, 2>({classes, width}, 2, 0.5f);
  auto targets = reference::integers(rows, static_cast<std::int32_t>(classes), 3);
  if (rows > 2) targets(2) = ops::ignore_index;
  auto const before = reference::normal<G, 2>({classes, width}, 4);
  exact expected(rows, width, classes, reference::doubles(in.span()), reference::doubles(weight.span()),
                 targets.span(), 0.5f);
  auto const added = reference::doubles(before.span());
  if (accumulate)
    for (std::size_t i = 0; i < added.size(); ++i) expected.d_weight[i] += added[i];

  on_device<T, 2> device_in(ex, in), device_weight(ex, weight), d_in(ex, {rows, width});
  on_device<G, 2> d_weight(ex, before);
  on_device<std::int32_t, 1> device_targets(ex, targets);
  on_device<double, 1> totals(ex, {2});
  device_arena memory(ops::linear_cross_entropy_scratch_bytes<T, exec::cuda_memory>(rows, classes, chunk));
  ops::linear_cross_entropy_options<exec::cuda_memory> options{
      .gradient_scale = 0.5f, .accumulate = accumulate, .chunk_rows = chunk};
  auto const loss = ops::linear_cross_entropy(
      ex, ops::linear_cross_entropy_gradients<T, G, exec::cuda_memory>{d_in, d_weight}, device_in.view(),
      device_weight, device_targets, options, memory);
  CHECK(loss.count == expected.count);
  CHECK(std::fabs(loss.sum - expected.sum) <= reference::tolerance<T>() * std::fabs(expected.sum));
  CHECK(reference::max_relative_error(d_in.read(ex), expected.d_in) < 2 * reference::tolerance<T>());
  CHECK(reference::max_relative_error(d_weight.read(ex), expected.d_weight) < 2 * reference::tolerance<T>());
  CHECK(memory.used() == 0);
  CHECK(memory.peak() == memory.capacity());

  options.totals = totals;
  auto const evaluated = ops::linear_cross_entropy<exec::cuda, T, G>(ex, {}, device_in.view(), device_weight,
                                                                     device_targets, options, memory);
  CHECK(evaluated.count == 0);
  auto const sums = totals.read(ex);
  CHECK(sums(0) == doctest::Approx(loss.sum).epsilon(1e-12));
  CHECK(sums(1) == loss.count);
}

} // namespace

TEST_CASE("loss and gradients of the head on CUDA are those of float64 whatever the chunk") {
  for (index_t chunk : {0, 1, 7, 100}) {
    compare<float, float>(17, 13, 37, chunk, false);
    compare<bf16, float>(19, 16, 70, chunk, true);
  }
  compare<bf16, bf16>(19, 16, 50, 0, false);
  compare<float, float>(1, 1, 2, 0, false);
}

TEST_CASE("the gradient of the head's input may be stored in more bits than the input on CUDA") {
  exec::cuda ex;
  index_t const rows = 19, width = 13, classes = 37, chunk = 7;
  auto const in = reference::normal<bf16, 2>({rows, width}, 1),
             weight = reference::normal<bf16, 2>({classes, width}, 2, 0.5f);
  auto const targets = reference::integers(rows, static_cast<std::int32_t>(classes), 3);
  exact const expected(rows, width, classes, reference::doubles(in.span()), reference::doubles(weight.span()),
                       targets.span(), 1.0f);
  on_device<bf16, 2> device_in(ex, in), device_weight(ex, weight), rounded(ex, {rows, width});
  on_device<float, 2> d_in(ex, {rows, width}), d_weight(ex, {classes, width});
  on_device<std::int32_t, 1> device_targets(ex, targets);
  device_arena memory(ops::linear_cross_entropy_scratch_bytes<bf16, exec::cuda_memory>(rows, classes, chunk));
  ops::linear_cross_entropy_options<exec::cuda_memory> const options{.chunk_rows = chunk};
  (void)ops::linear_cross_entropy(
      ex, ops::linear_cross_entropy_gradients<float, float, exec::cuda_memory>{d_in, d_weight},
      device_in.view(), device_weight, device_targets, options, memory);
  (void)ops::linear_cross_entropy(
      ex, ops::linear_cross_entropy_gradients<bf16, float, exec::cuda_memory>{rounded, d_weight},
      device_in.view(), device_weight, device_targets, options, memory);
  auto const exactly = d_in.read(ex);
  auto const once = rounded.read(ex);
  CHECK(reference::max_relative_error(exactly, expected.d_in) < reference::tolerance<bf16>());
  for (index_t i = 0; i < exactly.size(); ++i) {
    auto const value = exactly.data()[i];
    CHECK(std::fabs(value - static_cast<float>(once.data()[i])) <= 0x1p-8f * std::fabs(value) + 1e-6f);
  }
}

TEST_CASE_TEMPLATE("ranks with slices of the vocabulary get the whole loss and their parts on CUDA", T, float,
                   bf16) {
  // One after the other: a first round leaves each rank's statistics, a second one merges what was left.
  exec::cuda ex;
  index_t const rows = 13, width = 16, classes = 43, cuts[] = {0, 17, 17, 43}, ranks = 3, chunk = 8;
  auto const in = reference::normal<T, 2>({rows, width}, 1),
             weight = reference::normal<T, 2>({classes, width}, 2, 0.5f);
  auto targets = reference::integers(rows, static_cast<std::int32_t>(classes), 3);
  targets(2) = ops::ignore_index;
  exact const expected(rows, width, classes, reference::doubles(in.span()), reference::doubles(weight.span()),
                       targets.span(), 0.5f);
  on_device<T, 2> device_in(ex, in), device_weight(ex, weight);
  on_device<float, 2> d_weight(ex, {classes, width});
  on_device<std::int32_t, 1> device_targets(ex, targets);
  tensor<float, 3, exec::cuda_memory> left[] = {
      tensor<float, 3, exec::cuda_memory>({ranks, chunk, 4}),
      tensor<float, 3, exec::cuda_memory>({ranks, rows - chunk, 4})};
  numbers d_in(expected.d_in.size());
  for (auto round : {0, 1})
    for (index_t rank = 0; rank < ranks; ++rank) {
      auto const begin = cuts[rank], end = cuts[rank + 1];
      int call = 0;
      auto const merge = [&](exec::cuda& space, view<float, 2, exec::cuda_memory> statistics) {
        auto const parts = left[call++].view();
        if (round == 1)
          ops::merge_softmax_statistics(space, statistics, parts);
        else
          exec::copy(space, parts[rank].span(),
                     memory_span<float const, exec::cuda_memory>(statistics.span()));
      };
      on_device<T, 2> part(ex, {rows, width});
      device_arena memory(
          ops::linear_cross_entropy_scratch_bytes<T, exec::cuda_memory>(rows, end - begin, chunk, true));
      ops::linear_cross_entropy_gradients<T, float, exec::cuda_memory> gradients;
      if (round == 1) gradients = {part, d_weight.view().slice(0, begin, end)};
      auto const loss = ops::linear_cross_entropy(
          ex, gradients, device_in.view(), device_weight.view().slice(0, begin, end), device_targets,
          {.gradient_scale = 0.5f, .chunk_rows = chunk, .first_class = begin, .classes = classes}, memory,
          merge);
      CHECK(call == 2);
      if (round == 0) continue;
      CHECK(loss.count == expected.count);
      CHECK(std::fabs(loss.sum - expected.sum) <= reference::tolerance<T>() * std::fabs(expected.sum));
      auto const summand = reference::doubles(part.read(ex).span());
      for (std::size_t i = 0; i < d_in.size(); ++i) d_in[i] += summand[i];
    }
  tensor<float, 2> sum({rows, width});
  for (std::size_t i = 0; i < d_in.size(); ++i) sum.data()[i] = static_cast<float>(d_in[i]);
  CHECK(reference::max_relative_error(sum, expected.d_in) < 2 * reference::tolerance<T>());
  CHECK(reference::max_relative_error(d_weight.read(ex), expected.d_weight) < 2 * reference::tolerance<T>());
}

TEST_CASE("no rows give no loss and zero gradients on CUDA") {
  exec::cuda ex;
  on_device<float, 2> in(ex, {0, 3}), weight(ex, {5, 3}),
      d_weight(ex, reference::normal<float, 2>({5, 3}, 1));
  on_device<std::int32_t, 1> targets(ex, {0});
  device_arena memory(ops::linear_cross_entropy_scratch_bytes<float, exec::cuda_memory>(0, 5));
  auto const loss = ops::linear_cross_entropy(
      ex, ops::linear_cross_entropy_gradients<float, float, exec::cuda_memory>{in, d_weight}, in.view(),
      weight, targets, {}, memory);
  CHECK(loss.count == 0);
  auto const zeros = d_weight.read(ex);
  for (auto value : zeros.span()) CHECK(value == 0);
}

TEST_CASE("a bad target of the head is named once somebody waits") {
  exec::cuda ex;
  tensor<std::int32_t, 1> targets({4});
  targets(3) = 6;
  on_device<float, 2> in(ex, {4, 3}), weight(ex, {6, 3});
  on_device<std::int32_t, 1> device_targets(ex, targets);
  on_device<double, 1> totals(ex, {2});
  device_arena memory(ops::linear_cross_entropy_scratch_bytes<float, exec::cuda_memory>(4, 6));
  (void)ops::linear_cross_entropy<exec::cuda, float, float>(ex, {}, in.view(), weight, device_targets,
                                                            {.totals = totals}, memory);
  auto const caught = test::error_of<size_error>([&] { ex.synchronize(); });
  CHECK(caught.id == "E-ops-004");
  CHECK(caught.says("is 6"));
}
