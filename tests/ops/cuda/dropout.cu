#include <tessera/ops/cuda/dropout.cuh>

#include "ops/cuda/fixture.hpp"

using namespace cuda_fixture;

TEST_CASE_TEMPLATE("dropout drops and scales what the host does, to the bit, wherever arrays lie", T, float,
                   bf16, fp16) {
  exec::cuda ex;
  exec::host host({.threads = 1});
  for (auto [rows, width] : {fixture::shape{0, 8}, {3, 0}, {1, 1}, {2, 3}, {7, 129}, {33, 16}, {1, 1021}})
    for (index_t first : {0, 1, 5}) // with an odd width, samples begin in the middle of four random words
      for (auto probability : {0.0f, 0.1f, 1.0f})
        for (auto how : lyings) {
          CAPTURE(rows);
          CAPTURE(width);
          ops::dropout_options const options{
              .probability = probability, .seed = 3, .step = 17, .layer = 2, .first_sample = first};
          auto const x = reference::normal<T, 2>({rows, width}, 1),
                     r = reference::normal<T, 2>({rows, width}, 2);
          auto const flat = [&, rows = rows, width = width](tensor<T, 2> const& values) {
            tensor<T, 1> all({rows * width});
            for (index_t i = 0; i < all.size(); ++i) all(i) = values.data()[i];
            return all;
          };
          device_rows<T> in(ex, flat(x), how, 0), residual(ex, flat(r), how, 1),
              out(ex, how, 2, 1, rows * width), sum(ex, how, 3, 1, rows * width);
          auto const shaped = [rows = rows, width = width](device_rows<T>& array) {
            return array.flat().template reshape<2>({rows, width});
          };
          ops::dropout(ex, shaped(out), shaped(in), options);
          ops::dropout_add(ex, shaped(sum), shaped(residual), shaped(in), options);
          tensor<T, 2> host_out({rows, width}), host_sum({rows, width});
          ops::dropout(host, host_out.view(), x, options);
          ops::dropout_add(host, host_sum.view(), r, x, options);
          CHECK(bits(out.read(ex)) == bits(host_out));
          // Here the multiplication and the addition may be fused into one rounding.
          CHECK(reference::max_relative_error(sum.read(ex), reference::doubles(host_sum.span())) <
                reference::tolerance<T>());
          ops::dropout(ex, shaped(in), shaped(in), options);
          CHECK(bits(in.read(ex)) == bits(out.read(ex)));
        }
}

TEST_CASE_TEMPLATE("dropout between two types gives the host's bits, wherever arrays lie", P,
                   types<float, float, bf16>, types<float, float, fp16>, types<bf16, bf16, float>) {
  using Out = typename P::T;
  using In = typename P::R;
  exec::cuda ex;
  exec::host host({.threads = 1});
  for (auto [rows, width] : {fixture::shape{0, 8}, {3, 0}, {1, 1}, {2, 3}, {7, 129}, {33, 16}, {1, 1021}})
    for (auto probability : {0.0f, 0.1f, 1.0f})
      for (auto how : lyings) {
        CAPTURE(rows);
        CAPTURE(width);
        ops::dropout_options const options{
            .probability = probability, .seed = 3, .step = 17, .layer = 2, .first_sample = 5};
        auto const flat = reference::normal<In, 1>({rows * width}, 1);
        tensor<In, 2> x({rows, width});
        for (index_t i = 0; i < flat.size(); ++i) x.data()[i] = flat(i);
        device_rows<In> in(ex, flat, how, 0);
        device_rows<Out> out(ex, how, 1, 1, rows * width);
        auto const shaped = [rows = rows, width = width](auto& array) {
          return array.flat().template reshape<2>({rows, width});
        };
        ops::dropout(ex, shaped(out), shaped(in), options);
        tensor<Out, 2> expected({rows, width});
        ops::dropout(host, expected.view(), x, options);
        CHECK(bits(out.read(ex)) == bits(expected));
      }
}

TEST_CASE_TEMPLATE("parts of samples have the host's mask on CUDA", T, float, bf16) {
  exec::cuda ex;
  exec::host host({.threads = 1});
  for (index_t width : {1, 3, 16, 37}) // packs that straddle rows and stretches
    for (index_t first_row : {0, 4})
      for (auto how : lyings) {
        ops::dropout_options const options{.probability = 0.3f,
                                           .seed = 3,
                                           .first_sample = 2,
                                           .rows_per_sample = 5,
                                           .first_row = first_row,
                                           .whole_rows_per_sample = 13,
                                           .positions = {.first = 1, .split = 2, .second = 8}};
        auto const x = reference::normal<T, 2>({11, width}, 1);
        tensor<T, 1> flat({x.size()});
        for (index_t i = 0; i < x.size(); ++i) flat(i) = x.data()[i];
        device_rows<T> in(ex, flat, how, 0), out(ex, how, 1, 1, x.size()), sum(ex, how, 2, 1, x.size());
        auto const shaped = [width](device_rows<T>& array) {
          return array.flat().template reshape<2>({11, width});
        };
        ops::dropout(ex, shaped(out), shaped(in), options);
        ops::dropout_add(ex, shaped(sum), shaped(in), shaped(in), options);
        tensor<T, 2> host_out(x.extents()), host_sum(x.extents());
        ops::dropout(host, host_out.view(), x, options);
        ops::dropout_add(host, host_sum.view(), x, x, options);
        CHECK(bits(out.read(ex)) == bits(host_out));
        CHECK(reference::max_relative_error(sum.read(ex), reference::doubles(host_sum.span())) <
              reference::tolerance<T>());
      }
}
