#include <doctest/doctest.h>

#include <tessera/parallel/overlapped_linear.hpp>

#include <tessera/comm/self.hpp>
#include <tessera/comm/threads.hpp>

#include "overlapped_fixture.hpp"
#include "support/ranks.hpp"
#include "support/thrown.hpp"

using namespace tessera;

namespace {

/// On 1 to 4 ranks that find out when a buffer lent to a request is touched.
template <class Body>
void on_checked_ranks(Body body) {
  test::on_thread_ranks(4, body, {.checked = true, .stall_limit = 20});
}

} // namespace

TEST_CASE_TEMPLATE("Rows that arrive while others are multiplied give the product of all rows, and gradients",
                   T, float, bf16) {
  on_checked_ranks([](comm::threads& comm) {
    exec::host ex({.threads = 1});
    for (auto const& p : overlapped::problems())
      for (bool const activated : {false, true}) overlapped::check_gather<T>(ex, comm, p, activated);
  });
}

TEST_CASE_TEMPLATE(
    "Products summed chunk by chunk have the bits of products and then one reduce_scatter, and gradients", T,
    float, bf16) {
  on_checked_ranks([](comm::threads& comm) {
    exec::basic_host<exec::portable_product> ex({.threads = 1});
    for (auto const& p : overlapped::problems())
      for (auto const order : {comm::summation::rank_order, comm::summation::binary_tree})
        overlapped::check_scatter<T>(ex, comm, p, order);
  });
}

TEST_CASE("One rank alone takes no memory and sends nothing") {
  comm::self comm;
  exec::host ex({.threads = 1});
  for (auto const& p : overlapped::problems()) {
    overlapped::check_gather<float>(ex, comm, p, true);
    overlapped::check_scatter<float>(ex, comm, p, comm::summation::rank_order);
  }
  CHECK(comm.meter().total().sent == 0);
  CHECK(parallel::linear_scatter_scratch_bytes<float>(100, 64, 1) == 0);
  CHECK(parallel::gather_linear_scratch_bytes<float>(100, 64, 1) == 0);
}

TEST_CASE("No more is sent than the collectives would send, and nothing is allocated once sizes repeat") {
  comm::run_threads(4, [](comm::threads& comm) {
    exec::host ex({.threads = 1});
    constexpr index_t rows = 40, k = 8, n = 12;
    auto const in = reference::normal<bf16, 2>({rows / 4, k}, 1),
               weight = reference::normal<bf16, 2>({n, k}, 2);
    tensor<bf16, 2> out({rows, n}), back({rows / 4, k});
    arena<> memory(1 << 16);
    auto const both = [&] {
      parallel::gather_linear(ex, comm, out.view(), in.view(), weight.view(), {}, {}, memory);
      ops::linear_gradients<bf16, float> gradients{back.view(), {}, {}};
      auto const gathered = reference::normal<bf16, 2>({rows, k}, 3);
      parallel::gather_linear_backward(ex, comm, gradients, out.view(), gathered.view(), weight.view(), {},
                                       {}, memory);
    };
    both();
    auto const scratch = ex.scratch().allocations();
    comm.meter().reset();
    both();
    CHECK(comm.meter().of(comm::collective::send).sent == 2 * rows * k * 3 / 4);
    CHECK(comm.meter().of(comm::collective::send).calls == 3);
    CHECK(comm.meter().of(comm::collective::reduce_scatter).sent == 2 * rows * k * 3 / 4);
    CHECK(comm.meter().of(comm::collective::reduce_scatter).calls == 2);
    for (int again = 0; again < 10; ++again) both();
    // Two pieces of memory (tables, what was exchanged) for each of three requests in flight at once.
    CHECK(comm.memory().allocations() <= 6);
    CHECK(ex.scratch().allocations() == scratch);
  });
}

TEST_CASE(
    "Blocks that do not fit, and what a sum over ranks cannot have, are errors before anything is sent") {
  comm::run_threads(2, [](comm::threads& comm) {
    exec::host ex({.threads = 1});
    tensor<float, 2> three({3, 4}), six({6, 4}), weight({4, 4});
    arena<> memory(1 << 12);
    index_t const short_rows[] = {3, 2}, three_blocks[] = {3, 3, 0}, mine[] = {2, 4}, negative[] = {7, -1};
    auto const gather = [&](parallel::overlap_options overlap) {
      parallel::gather_linear(ex, comm, six.view(), three.view(), weight.view(), {}, {.overlap = overlap},
                              memory);
    };
    auto const size_id = [](auto f) { return test::error_of<size_error>(f).id; };
    auto const config_id = [](auto f) { return test::error_of<config_error>(f).id; };
    CHECK(size_id([&] { gather({.rows = short_rows}); }) == "E-parallel-090");
    CHECK(size_id([&] { gather({.rows = three_blocks}); }) == "E-parallel-090");
    CHECK(size_id([&] { gather({.rows = mine}); }) == "E-parallel-090");
    CHECK(size_id([&] { gather({.rows = negative}); }) == "E-parallel-090");
    CHECK(config_id([&] { gather({.chunks = 0}); }) == "E-parallel-091");
    ops::linear_gradients<float, float> const gradients{three.view(), weight.view(), {}};
    CHECK(config_id([&] {
            parallel::gather_linear_backward(ex, comm, gradients, six.view(), six.view(), weight.view(),
                                             {.accumulate_input = true}, {}, memory);
          }) == "E-parallel-091");
    CHECK(size_id([&] { // an activation, and nowhere to put its gradient
            parallel::gather_linear_backward(
                ex, comm, gradients, six.view(), six.view(), weight.view(),
                {.activation = ops::activation::gelu_tanh, .pre_activation = six.view()}, {}, memory);
          }) == "E-ops-001");
    CHECK(config_id([&] {
            parallel::linear_scatter_backward(
                ex, comm, ops::linear_gradients<float, float>{six.view(), weight.view(), {}}, three.view(),
                six.view(), weight.view(), {.activation = ops::activation::gelu_tanh}, {}, memory);
          }) == "E-parallel-091");
    arena<> too_small(1);
    CHECK(test::error_of<out_of_memory>([&] {
            parallel::linear_scatter(ex, comm, three.view(), six.view(), weight.view(), {}, {}, too_small);
          }).id == "E-core-011");
    CHECK(comm.all_reduce(1) == 2);
  });
}
