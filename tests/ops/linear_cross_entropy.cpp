#include <tessera/ops/linear_cross_entropy.hpp>

#include <tessera/exec/host.hpp>

#include <doctest/doctest.h>

#include "support/reference.hpp"
#include "support/thrown.hpp"

using namespace tessera;
using reference::doubles;
using reference::max_relative_error;

namespace {

struct exact {
  double sum = 0, count = 0;
  std::vector<double> d_in, d_weight;

  exact(index_t rows, index_t width, index_t classes, std::vector<double> const& in,
        std::vector<double> const& weight, std::span<std::int32_t const> targets,
        ops::linear_cross_entropy_options<> const& options)
      : d_in(in.size()), d_weight(weight.size()) {
    double const smooth = options.label_smoothing, z = options.z_loss, scale = options.gradient_scale;
    auto const size = static_cast<std::size_t>(classes);
    for (index_t r = 0; r < rows; ++r) {
      auto const target = targets[static_cast<std::size_t>(r)];
      if (target == ops::ignore_index) continue;
      std::vector<double> logit(size);
      double total = 0, mean = 0;
      for (index_t c = 0; c < classes; ++c) {
        auto& x = logit[static_cast<std::size_t>(c)];
        for (index_t d = 0; d < width; ++d)
          x += in[static_cast<std::size_t>(r * width + d)] * weight[static_cast<std::size_t>(c * width + d)];
        total += std::exp(x);
        mean += x / static_cast<double>(classes);
      }
      auto const log_total = std::log(total);
      sum += log_total - (1 - smooth) * logit[static_cast<std::size_t>(target)] - smooth * mean +
             z * log_total * log_total;
      count += 1;
      for (index_t c = 0; c < classes; ++c) {
        auto const p = std::exp(logit[static_cast<std::size_t>(c)]) / total;
        auto const d = scale * (p * (1 + 2 * z * log_total) - (c == target ? 1 - smooth : 0) -
                                smooth / static_cast<double>(classes));
        for (index_t w = 0; w < width; ++w) {
          d_in[static_cast<std::size_t>(r * width + w)] +=
              d * weight[static_cast<std::size_t>(c * width + w)];
          d_weight[static_cast<std::size_t>(c * width + w)] +=
              d * in[static_cast<std::size_t>(r * width + w)];
        }
      }
    }
  }
};

template <class T, class G>
void compare(index_t rows, index_t width, index_t classes, ops::linear_cross_entropy_options<> options) {
  CAPTURE(rows);
  CAPTURE(options.chunk_rows);
  exec::host ex({.threads = reference::threads(2)});
  auto in = reference::normal<T, 2>({rows, width}, 1),
       weight = reference::normal<T, 2>({classes, width}, 2, 0.5f);
  auto targets = reference::integers(rows, static_cast<std::int32_t>(classes), 3);
  if (rows > 2) targets(2) = ops::ignore_index;
  tensor<T, 2> d_in({rows, width});
  auto d_weight = reference::normal<G, 2>({classes, width}, 4);
  auto before = doubles(d_weight.span());
  exact expected(rows, width, classes, doubles(in.span()), doubles(weight.span()), targets.span(), options);
  if (options.accumulate)
    for (std::size_t i = 0; i < before.size(); ++i) expected.d_weight[i] += before[i];

  arena<> memory(ops::linear_cross_entropy_scratch_bytes<T>(rows, classes, options.chunk_rows));
  auto const loss = ops::linear_cross_entropy(ex, ops::linear_cross_entropy_gradients<T, G>{d_in, d_weight},
                                              in, weight, targets, options, memory);
  CHECK(loss.count == expected.count);
  CHECK(std::fabs(loss.sum - expected.sum) <= reference::tolerance<T>() * std::fabs(expected.sum));
  CHECK(max_relative_error(d_in, expected.d_in) < 2 * reference::tolerance<T>());
  CHECK(max_relative_error(d_weight, expected.d_weight) < 2 * reference::tolerance<T>());
  CHECK(memory.used() == 0);
  CHECK(memory.peak() == memory.capacity()); // the plan is exact

  auto const evaluated =
      ops::linear_cross_entropy<exec::host, T, G>(ex, {}, in, weight, targets, options, memory);
  CHECK(evaluated.sum == loss.sum);
  CHECK(evaluated.count == loss.count);
}

/// The gradient of the input in fp32 is the 16-bit one before it was rounded.
template <class T>
void compare_input_gradient(index_t rows, index_t width, index_t classes, index_t chunk) {
  exec::host ex({.threads = reference::threads(2)});
  auto const in = reference::normal<T, 2>({rows, width}, 1),
             weight = reference::normal<T, 2>({classes, width}, 2, 0.5f);
  auto const targets = reference::integers(rows, static_cast<std::int32_t>(classes), 3);
  ops::linear_cross_entropy_options<> const options{.chunk_rows = chunk};
  exact const expected(rows, width, classes, doubles(in.span()), doubles(weight.span()), targets.span(),
                       options);
  tensor<float, 2> d_in({rows, width}), d_weight({classes, width}), same_weight({classes, width});
  tensor<T, 2> rounded({rows, width});
  arena<> memory(ops::linear_cross_entropy_scratch_bytes<T>(rows, classes, chunk));
  auto const loss =
      ops::linear_cross_entropy(ex, ops::linear_cross_entropy_gradients<float, float>{d_in, d_weight}, in,
                                weight, targets, options, memory);
  CHECK(ops::linear_cross_entropy(ex, ops::linear_cross_entropy_gradients<T, float>{rounded, same_weight}, in,
                                  weight, targets, options, memory)
            .sum == loss.sum);
  CHECK(max_relative_error(d_weight, doubles(same_weight.span())) == 0);
  // The gradients of the logits have 16 bits.
  CHECK(max_relative_error(d_in, expected.d_in) < reference::tolerance<T>());
  for (index_t i = 0; i < d_in.size(); ++i) {
    auto const value = d_in.data()[i];
    CHECK(std::fabs(value - static_cast<float>(rounded.data()[i])) <= 0x1p-8f * std::fabs(value) + 1e-6f);
  }
}

/// Ranks that hold slices of the vocabulary, one after the other: a first round leaves each one's statistics,
/// a second one merges what was left.
template <class T, class G>
void compare_sliced(index_t rows, index_t width, index_t classes, std::vector<index_t> const& cuts,
                    ops::linear_cross_entropy_options<> options) {
  CAPTURE(rows);
  CAPTURE(cuts.size());
  CAPTURE(options.chunk_rows);
  exec::host ex({.threads = reference::threads(2)});
  auto in = reference::normal<T, 2>({rows, width}, 1),
       weight = reference::normal<T, 2>({classes, width}, 2, 0.5f);
  auto targets = reference::integers(rows, static_cast<std::int32_t>(classes), 3);
  if (rows > 2) targets(2) = ops::ignore_index;
  auto d_weight = reference::normal<G, 2>({classes, width}, 4);
  auto const before = doubles(d_weight.span());
  exact expected(rows, width, classes, doubles(in.span()), doubles(weight.span()), targets.span(), options);
  if (options.accumulate)
    for (std::size_t i = 0; i < before.size(); ++i) expected.d_weight[i] += before[i];

  auto const ranks = static_cast<index_t>(cuts.size()) - 1;
  auto const chunk = options.chunk_rows > 0 ? std::min(options.chunk_rows, rows) : rows;
  std::vector<tensor<float, 3>> left; // one for each chunk
  for (index_t row = 0; row < rows; row += chunk)
    left.emplace_back(extents<3>{ranks, std::min(chunk, rows - row), 4});
  std::vector<double> d_in(static_cast<std::size_t>(rows * width));
  options.classes = classes;
  for (auto round : {0, 1})
    for (index_t rank = 0; rank < ranks; ++rank) {
      auto const begin = cuts[static_cast<std::size_t>(rank)], end = cuts[static_cast<std::size_t>(rank) + 1];
      options.first_class = begin;
      std::size_t call = 0;
      auto const merge = [&](exec::host& space, view<float, 2> statistics) {
        auto const parts = left[call++].view();
        if (round == 1) return ops::merge_softmax_statistics(space, statistics, parts);
        for (index_t i = 0; i < statistics.size(); ++i) parts[rank].data()[i] = statistics.data()[i];
      };
      tensor<T, 2> part({rows, width});
      arena<> memory(ops::linear_cross_entropy_scratch_bytes<T>(rows, end - begin, options.chunk_rows, true));
      ops::linear_cross_entropy_gradients<T, G> gradients;
      if (round == 1) gradients = {part, d_weight.view().slice(0, begin, end)};
      auto const loss = ops::linear_cross_entropy(ex, gradients, in, weight.view().slice(0, begin, end),
                                                  targets, options, memory, merge);
      CHECK(call == left.size());
      CHECK(memory.peak() == memory.capacity());
      if (round == 0) continue;
      CHECK(loss.count == expected.count);
      CHECK(std::fabs(loss.sum - expected.sum) <= reference::tolerance<T>() * std::fabs(expected.sum));
      for (std::size_t i = 0; i < d_in.size(); ++i)
        d_in[i] += static_cast<double>(static_cast<float>(part.data()[i]));
    }
  tensor<float, 2> sum({rows, width});
  for (std::size_t i = 0; i < d_in.size(); ++i) sum.data()[i] = static_cast<float>(d_in[i]);
  CHECK(max_relative_error(sum, expected.d_in) < 2 * reference::tolerance<T>());
  CHECK(max_relative_error(d_weight, expected.d_weight) < 2 * reference::tolerance<T>());
}

} // namespace

TEST_CASE("ranks with slices of the vocabulary get the whole loss and their parts of the gradients") {
  for (auto const& cuts : {std::vector<index_t>{0, 37}, {0, 18, 37}, {0, 0, 11, 11, 30, 37, 37}})
    for (index_t chunk : {0, 1, 5}) {
      compare_sliced<float, float>(17, 13, 37, cuts, {.chunk_rows = chunk});
      compare_sliced<bf16, float>(17, 13, 37, cuts,
                                  {.label_smoothing = 0.1f,
                                   .z_loss = 0.01f,
                                   .gradient_scale = 0.5f,
                                   .accumulate = true,
                                   .chunk_rows = chunk});
    }
  compare_sliced<float, float>(0, 3, 5, {0, 2, 5}, {});
  compare_sliced<float, float>(1, 1, 2, {0, 1, 2}, {});
}

TEST_CASE("a slice of the vocabulary needs a merge") {
  exec::host ex({.threads = 1});
  tensor<float, 2> in({4, 3}), weight({6, 3});
  tensor<std::int32_t, 1> targets({4});
  arena<> memory(ops::linear_cross_entropy_scratch_bytes<float>(4, 6, 0, true));
  auto const id_of = [&](ops::linear_cross_entropy_options<> const& options, auto&& merge) {
    return test::error_of<size_error>([&] {
             ops::linear_cross_entropy<exec::host, float, float>(ex, {}, in, weight, targets, options, memory,
                                                                 merge);
           })
        .id;
  };
  CHECK(id_of({.classes = 7}, ops::whole_vocabulary{}) == "E-ops-015");
  CHECK(id_of({.first_class = 2, .classes = 7}, [](exec::host&, view<float, 2>) {}) == "E-ops-014");
  CHECK(memory.used() == 0);
}

TEST_CASE("loss and gradients of the head are those of float64 whatever the chunk") {
  for (index_t chunk : {0, 1, 3, 17, 100}) {
    compare<float, float>(17, 13, 37, {.chunk_rows = chunk});
    compare<float, float>(17, 13, 37,
                          {.label_smoothing = 0.1f,
                           .z_loss = 0.01f,
                           .gradient_scale = 0.5f,
                           .accumulate = true,
                           .chunk_rows = chunk});
  }
  compare<float, float>(1, 1, 2, {});
  compare<bf16, float>(19, 16, 50, {.chunk_rows = 7});
  compare<bf16, bf16>(19, 16, 50, {});
}

TEST_CASE("the gradient of the head's input may be stored in more bits than the input") {
  for (index_t chunk : {0, 1, 7}) {
    compare_input_gradient<bf16>(19, 13, 37, chunk);
    compare_input_gradient<fp16>(17, 16, 50, chunk);
  }
}

TEST_CASE("no rows give no loss and zero gradients") {
  exec::host ex({.threads = 1});
  tensor<float, 2> in({0, 3}), weight({5, 3}), d_weight({5, 3});
  tensor<std::int32_t, 1> targets({0});
  reference::fill_normal(d_weight.span(), 1);
  arena<> memory(ops::linear_cross_entropy_scratch_bytes<float>(0, 5));
  auto const loss = ops::linear_cross_entropy(
      ex, ops::linear_cross_entropy_gradients<float, float>{in, d_weight}, in, weight, targets, {}, memory);
  CHECK(loss.sum == 0);
  CHECK(loss.count == 0);
  for (auto value : d_weight.span()) CHECK(value == 0);
}

TEST_CASE("rows that are all ignored count nothing and give zero gradients") {
  exec::host ex({.threads = 1});
  auto in = reference::normal<float, 2>({4, 3}, 1), weight = reference::normal<float, 2>({5, 3}, 2);
  auto d_in = reference::normal<float, 2>({4, 3}, 3), d_weight = reference::normal<float, 2>({5, 3}, 4);
  tensor<std::int32_t, 1> targets({4});
  for (auto& target : targets.span()) target = ops::ignore_index;
  arena<> memory(ops::linear_cross_entropy_scratch_bytes<float>(4, 5));
  auto const loss = ops::linear_cross_entropy(
      ex, ops::linear_cross_entropy_gradients<float, float>{d_in, d_weight}, in, weight, targets, {}, memory);
  CHECK(loss.count == 0);
  for (auto value : d_in.span()) CHECK(value == 0);
  for (auto value : d_weight.span()) CHECK(value == 0);
}

TEST_CASE("the head adds sum and count to totals where they are given") {
  exec::host ex({.threads = 1});
  auto in = reference::normal<float, 2>({7, 3}, 1), weight = reference::normal<float, 2>({5, 3}, 2);
  auto const targets = reference::integers(7, 5, 3);
  arena<> memory(ops::linear_cross_entropy_scratch_bytes<float>(7, 5));
  tensor<double, 1> totals({2});
  auto const run = [&](view<double, 1> to) {
    return ops::linear_cross_entropy<exec::host, float, float>(ex, {}, in, weight, targets,
                                                               {.chunk_rows = 3, .totals = to}, memory);
  };
  auto const expected = run({});
  CHECK(run(totals).count == 0);
  CHECK(totals(0) == doctest::Approx(expected.sum).epsilon(1e-14));
  CHECK(totals(1) == expected.count);
}

TEST_CASE("gradients of the head agree with finite differences") {
  exec::host ex({.threads = 1});
  auto in = reference::normal<float, 2>({4, 3}, 1), weight = reference::normal<float, 2>({6, 3}, 2);
  auto const targets = reference::integers(4, 6, 3);
  tensor<float, 2> d_in({4, 3}), d_weight({6, 3});
  arena<> memory(ops::linear_cross_entropy_scratch_bytes<float>(4, 6));
  ops::linear_cross_entropy_options<> const options{.label_smoothing = 0.2f, .z_loss = 0.05f};
  ops::linear_cross_entropy(ex, ops::linear_cross_entropy_gradients<float, float>{d_in, d_weight}, in, weight,
                            targets, options, memory);
  auto const loss = [&] {
    return ops::linear_cross_entropy<exec::host, float, float>(ex, {}, in, weight, targets, options, memory)
        .sum;
  };
  auto const check = [&](std::span<float> values, std::span<float> gradient) {
    for (std::size_t i = 0; i < values.size(); ++i)
      CHECK(std::fabs(reference::central_difference(values[i], 1e-2f, loss) -
                      static_cast<double>(gradient[i])) < 2e-3);
  };
  check(in.span(), d_in.span());
  check(weight.span(), d_weight.span());
}

TEST_CASE("the head refuses shapes, targets and arenas that do not fit") {
  exec::host ex({.threads = 1});
  tensor<float, 2> in({4, 3}), weight({6, 3}), narrow({6, 2});
  tensor<std::int32_t, 1> targets({4}), few({3});
  arena<> memory(ops::linear_cross_entropy_scratch_bytes<float>(4, 6)), small(64);
  auto const run = [&](auto const& w, auto const& t, arena<>& m) {
    return ops::linear_cross_entropy<exec::host, float, float>(ex, {}, in, w, t, {}, m);
  };
  CHECK_THROWS_AS(run(narrow, targets, memory), size_error);
  CHECK_THROWS_AS(run(weight, few, memory), size_error);
  CHECK_THROWS_AS(run(weight, targets, small), out_of_memory);
  CHECK_THROWS_AS(ops::linear_cross_entropy(ex, ops::linear_cross_entropy_gradients<float, float>{in, in}, in,
                                            weight, targets, {}, memory),
                  size_error);
  targets(3) = 6;
  CHECK_THROWS_AS(run(weight, targets, memory), size_error);
}
