// requires: mpi
// smoke: f32/ranks:2/rows:256/chunks:2
// Products overlapped with their collective beside the collective and the product one after the other, on the
// sizes of a GPT-2 block: rows of width 768, a hidden layer of 3072 shared by the ranks. Run under mpiexec.
#include <memory>

#include <tessera/parallel/overlapped_linear.hpp>

#include "support/ranks.hpp"

namespace {

using namespace tessera;

/// What one rank holds of `rows` rows.
template <class T>
struct block {
  block(comm::mpi& ranks, index_t all_rows)
      : rows(all_rows), mine(layout::shard_of(rows, ranks.size(), ranks.rank()).size()),
        hidden(index_t{3072} / ranks.size()), in({mine, width}), all({rows, width}), middle({rows, hidden}),
        out({mine, width}), up({hidden, width}), down({width, hidden}),
        memory(parallel::linear_scatter_scratch_bytes<T>(rows, width, ranks.size()) +
               parallel::gather_linear_scratch_bytes<T>(rows, width, ranks.size())) {
    for (int r = 0; r < ranks.size(); ++r)
      counts.push_back(layout::shard_of(rows, ranks.size(), r).size() * width);
    for (auto* each : {&in, &middle, &up, &down})
      for (auto& value : each->span()) value = T(0.01f);
  }

  static constexpr index_t width = 768;
  index_t rows, mine, hidden;
  tensor<T, 2> in, all, middle, out, up, down;
  arena<> memory;
  std::vector<index_t> counts;
};

template <class T>
void register_type(comm::mpi& ranks, double seconds, std::string const& type) {
  for (index_t const rows : {256, 1024})
    for (int const chunks : {1, 2, 4}) {
      parallel::overlap_options const overlap{.chunks = chunks};
      auto const title = [&](char const* name) {
        return "parallel/overlapped_linear/" + std::string(name) + "/" + type +
               "/ranks:" + std::to_string(ranks.size()) + "/rows:" + std::to_string(rows) +
               "/chunks:" + std::to_string(chunks);
      };
      bench::register_on_ranks(title("gather_linear"), [=, &ranks](benchmark::State& state) {
        exec::host ex({.threads = 1});
        block<T> b(ranks, rows);
        bench::by_turns_on_ranks(
            state, seconds, "all_gather, then linear",
            [&] {
              parallel::gather_linear(ex, ranks, b.middle.view(), b.in.view(), b.up.view(), {},
                                      {.gathered = b.all.view(), .overlap = overlap}, b.memory);
            },
            [&] {
              ranks.all_gather_v(b.all.span(), b.in.span(), b.counts);
              ops::linear(ex, b.middle.view(), b.all.view(), b.up.view(), {});
            });
      });
      bench::register_on_ranks(title("linear_scatter"), [=, &ranks](benchmark::State& state) {
        exec::host ex({.threads = 1});
        block<T> b(ranks, rows);
        bench::by_turns_on_ranks(
            state, seconds, "linear, then reduce_scatter",
            [&] {
              parallel::linear_scatter(ex, ranks, b.out.view(), b.middle.view(), b.down.view(), {}, overlap,
                                       b.memory);
            },
            [&] {
              ops::linear(ex, b.all.view(), b.middle.view(), b.down.view(), {});
              ranks.reduce_scatter_v(b.out.span(), b.all.span(), b.counts);
            });
      });
    }
}

} // namespace

int main(int argc, char** argv) {
  bench::run_on_ranks(argc, argv, [](comm::mpi& ranks, double seconds) {
    register_type<float>(ranks, seconds, "f32");
    register_type<bf16>(ranks, seconds, "bf16");
    return 0;
  });
}
