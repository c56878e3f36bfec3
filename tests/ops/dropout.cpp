#include <tessera/ops/dropout.hpp>

#include "fixture.hpp"

using namespace fixture;

namespace {

/// What the header promises, element by element.
template <class T, class In>
tensor<T, 2> exact_dropout(tensor<In, 2> const& in, tensor<T, 2> const* residual,
                           ops::dropout_options const& o) {
  tensor<T, 2> out(in.extents());
  philox const random(o.seed, (o.layer << 48 ^ o.step) ^ 0x64726f706f757421u);
  for (index_t r = 0; r < in.extent(0); ++r)
    for (index_t c = 0; c < in.extent(1); ++c) {
      auto const sample = o.first_sample + r / o.rows_per_sample, row = r % o.rows_per_sample;
      auto const element = static_cast<std::uint64_t>((sample * o.rows_per_sample + row) * in.extent(1) + c);
      auto const kept = random.uniform(element) >= o.probability;
      auto const value = kept ? static_cast<float>(in(r, c)) * (1.0f / (1.0f - o.probability)) : 0.0f;
      out(r, c) = T(residual == nullptr ? value : static_cast<float>((*residual)(r, c)) + value);
    }
  return out;
}

} // namespace

TEST_CASE_TEMPLATE("dropout keeps and scales what its formula says, also where blocks begin unaligned", T,
                   float, bf16, fp16) {
  exec::host ex({.threads = 2});
  for (auto [rows, width] : {shape{0, 8}, {3, 0}, {1, 1}, {2, 3}, {7, 129}, {67, 17}, {1, 1021}, {40, 1000}})
    for (index_t first : {0, 1, 5})
      for (auto probability : {0.0f, 0.1f, 0.5f, 1.0f}) {
        ops::dropout_options const options{.probability = probability,
                                           .seed = 3,
                                           .step = 17,
                                           .layer = 2,
                                           .first_sample = first,
                                           .rows_per_sample = rows == 67 ? 67 : 1};
        auto in = reference::normal<T, 2>({rows, width}, 1);
        auto const residual = reference::normal<T, 2>({rows, width}, 2);
        tensor<T, 2> out({rows, width}), sum({rows, width});
        ops::dropout(ex, out.view(), in, options);
        ops::dropout_add(ex, sum.view(), residual, in, options);
        auto const expected = exact_dropout(in, static_cast<tensor<T, 2> const*>(nullptr), options);
        auto const expected_sum = exact_dropout(in, &residual, options);
        CHECK(bits(out) == bits(expected));
        // Here the multiplication and the addition may be fused into one rounding.
        CHECK(reference::max_relative_error(sum, reference::doubles(expected_sum.span())) <
              reference::tolerance<T>());
        ops::dropout(ex, in.view(), in, options);
        CHECK(bits(in) == bits(out));
      }
}

TEST_CASE_TEMPLATE("dropout between two types keeps and scales in fp32, and rounds once", P,
                   types<float, float, bf16>, types<float, float, fp16>, types<bf16, bf16, float>) {
  using Out = typename P::T;
  using In = typename P::R;
  exec::host ex({.threads = 2});
  for (auto [rows, width] : {shape{0, 8}, {3, 0}, {1, 1}, {2, 3}, {7, 129}, {67, 17}, {1, 1021}, {40, 1000}})
    for (auto probability : {0.0f, 0.1f, 1.0f}) {
      ops::dropout_options const options{
          .probability = probability, .seed = 3, .step = 17, .layer = 2, .first_sample = 5};
      auto const in = reference::normal<In, 2>({rows, width}, 1);
      tensor<Out, 2> out({rows, width});
      ops::dropout(ex, out.view(), in, options);
      CHECK(bits(out) == bits(exact_dropout(in, static_cast<tensor<Out, 2> const*>(nullptr), options)));
    }
}

TEST_CASE("the backward of dropout is the same call on the gradient") {
  exec::host ex({.threads = 1});
  ops::dropout_options const options{.probability = 0.3f, .seed = 1};
  auto const x = reference::normal<float, 2>({11, 13}, 1), dy = reference::normal<float, 2>({11, 13}, 2);
  tensor<float, 2> dx({11, 13}), y({11, 13});
  ops::dropout(ex, dx.view(), dy, options);
  ops::dropout(ex, y.view(), x, options);
  double forward = 0, backward = 0;
  for (index_t i = 0; i < x.size(); ++i) {
    forward += static_cast<double>(y.data()[i]) * static_cast<double>(dy.data()[i]);
    backward += static_cast<double>(x.data()[i]) * static_cast<double>(dx.data()[i]);
  }
  CHECK(forward == doctest::Approx(backward)); // a linear map and its transpose
}

TEST_CASE("the mask of a sample does not depend on how the batch is cut into micro-batches") {
  exec::host ex({.threads = 2});
  index_t const samples = 7, length = 5, width = 33;
  auto const in = reference::normal<bf16, 2>({samples * length, width}, 1);
  tensor<bf16, 2> whole({samples * length, width}), parts({samples * length, width});
  ops::dropout_options options{
      .probability = 0.4f, .seed = 9, .step = 4, .layer = 1, .rows_per_sample = length};
  ops::dropout(ex, whole.view(), in, options);
  for (index_t size : {1, 2, 3}) {
    for (index_t first = 0; first < samples; first += size) {
      options.first_sample = first;
      auto const begin = first * length, end = std::min(samples, first + size) * length;
      ops::dropout(ex, parts.view().slice(0, begin, end), in.view().slice(0, begin, end), options);
    }
    CHECK(bits(parts) == bits(whole));
  }
}

TEST_CASE_TEMPLATE("the mask of an element does not depend on how samples are cut among ranks", T, float,
                   bf16) {
  exec::host ex({.threads = 2});
  index_t const samples = 3, length = 12;
  for (index_t width : {1, 3, 32, 301}) {
    auto const in = reference::normal<T, 2>({samples * length, width}, 1);
    tensor<T, 2> whole({samples * length, width});
    ops::dropout_options const one{
        .probability = 0.4f, .seed = 9, .step = 4, .layer = 1, .first_sample = 5, .rows_per_sample = length};
    ops::dropout(ex, whole.view(), in, one);
    // A rank holds 6 tokens of each sample in two stretches, or one, or 12 in another order; of its flattened
    // rows it works on a part.
    struct share {
      index_t here;
      ops::token_positions positions;
    };
    for (auto const& [here, positions] : {share{6, {.first = 0, .split = 3, .second = 9}},
                                          {6, {.first = 3, .split = 3, .second = 6}},
                                          {6, {.first = 6}},
                                          {1, {.first = 11}},
                                          {12, {.first = 4, .split = 8, .second = 0}},
                                          {12, {}}})
      for (index_t begin = 0; begin < samples * here; begin += 5) {
        auto const end = std::min(begin + 5, samples * here);
        tensor<T, 2> part({end - begin, width}), expected(part.extents()), out(part.extents()),
            sum(part.extents());
        for (index_t row = begin; row < end; ++row)
          for (index_t c = 0; c < width; ++c) {
            auto const from = row / here * length + positions(row % here);
            part(row - begin, c) = in(from, c);
            expected(row - begin, c) = whole(from, c);
          }
        auto options = one;
        options.rows_per_sample = here;
        options.first_row = begin;
        options.whole_rows_per_sample = length;
        options.positions = positions;
        ops::dropout(ex, out.view(), part, options);
        CHECK(bits(out) == bits(expected));
        ops::dropout_add(ex, sum.view(), part, part, options);
        CHECK(reference::max_relative_error(sum, [&] {
                auto values = reference::doubles(expected.span());
                for (std::size_t i = 0; i < values.size(); ++i)
                  values[i] += static_cast<double>(static_cast<float>(part.data()[i]));
                return values;
              }()) < reference::tolerance<T>());
      }
  }
}

TEST_CASE("masks of other seeds, steps and layers are other masks, with the asked share of zeros") {
  exec::host ex({.threads = 1});
  tensor<float, 2> ones({100, 100});
  for (auto& v : ones.span()) v = 1;
  auto const mask_of = [&](ops::dropout_options options) {
    options.probability = 0.25f;
    tensor<float, 2> out({100, 100});
    ops::dropout(ex, out.view(), ones, options);
    return out;
  };
  auto const first = mask_of({.seed = 1, .step = 1, .layer = 1});
  double dropped = 0;
  for (auto v : first.span()) dropped += v == 0;
  CHECK(std::fabs(dropped - 2500) < 5 * std::sqrt(10000 * 0.25 * 0.75));
  for (auto const& other : {ops::dropout_options{.seed = 2, .step = 1, .layer = 1},
                            {.seed = 1, .step = 2, .layer = 1},
                            {.seed = 1, .step = 1, .layer = 2}}) {
    auto const second = mask_of(other);
    double both = 0;
    for (index_t i = 0; i < 10000; ++i) both += first.data()[i] == 0 && second.data()[i] == 0;
    CHECK(std::fabs(both - 625) < 5 * std::sqrt(10000 * 0.0625 * 0.9375)); // independent
  }
}

TEST_CASE("dropout gives the same bits for any number of threads") {
  same_bits_for_any_thread_count([](exec::host& ex) {
    auto x = reference::normal<bf16, 2>({301, 331}, 1);
    ops::dropout(ex, x.view(), x, {.probability = 0.2f, .seed = 5, .first_sample = 3});
    return bits(x);
  });
}

TEST_CASE("dropout refuses what is no probability and what its streams cannot hold") {
  exec::host ex({.threads = 1});
  tensor<float, 2> x({4, 6}), y({4, 5});
  auto const call = [&](ops::dropout_options options) {
    return [&ex, &x, options] { ops::dropout(ex, x.view(), x, options); };
  };
  for (auto p : {-0.1f, 1.1f, NAN})
    CHECK(test::error_of<config_error>(call({.probability = p})).id == "E-ops-012");
  CHECK(test::error_of<size_error>(call({.first_sample = -1})).id == "E-ops-013");
  CHECK(test::error_of<size_error>(call({.rows_per_sample = 0})).id == "E-ops-013");
  CHECK(test::error_of<size_error>(call({.first_row = -1})).id == "E-ops-013");
  CHECK(test::error_of<size_error>(call({.rows_per_sample = 4, .whole_rows_per_sample = 3})).id ==
        "E-ops-013");
  CHECK(test::error_of<size_error>(call({.rows_per_sample = 4, .positions = {.first = 1}})).says("1 + 4"));
  CHECK(test::error_of<size_error>(call({.step = std::uint64_t{1} << 48})).id == "E-ops-013");
  CHECK(test::error_of<size_error>(call({.layer = 1 << 16})).id == "E-ops-013");
  CHECK(test::error_of<size_error>([&] { ops::dropout(ex, x.view(), y, {}); }).id == "E-ops-001");
  CHECK(test::error_of<size_error>([&] { ops::dropout_add(ex, x.view(), y, x, {}); }).says("residual"));
}
