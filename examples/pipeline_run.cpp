// Runs a step of a small model under each pipeline schedule, two stages on two threads, and draws when each
// of them worked. Needs only a C++20 compiler:
//   g++ -std=c++20 -O3 -march=native -pthread -Iinclude examples/pipeline_run.cpp && ./a.out FOLDER
#include <cstdio>
#include <tessera/comm/threads.hpp>
#include <tessera/exec/host.hpp>
#include <tessera/parallel/distributed_model.hpp>
#include <tessera/train/schedule_picture.hpp>

using namespace tessera;
using layout::schedule_kind;

namespace {

constexpr index_t batch = 8, length = 64;

layout::schedule_timeline run(schedule_kind kind) {
  nn::transformer_config const config{
      .vocabulary_size = 256, .sequence_length = length, .width = 128, .layers = 8, .heads = 4};
  std::vector<std::int32_t> const text(static_cast<std::size_t>(batch * (length + 1)), 't');
  layout::schedule_timeline timeline;
  comm::run_threads(2, [&](comm::threads& world) {
    exec::host ex({.threads = 1});
    // [doc: pipeline]
    parallel::distributed_model<comm::threads, exec::host, float, float> model(
        world, ex, config,
        {.pipeline = 2,
         .schedule = kind,
         .chunks = kind == schedule_kind::interleaved_one_forward_one_backward ? 2 : 1,
         .micro_batch = 1},
        {.batch = batch, .trace = true});
    model.initialise(ex, 1);
    auto const batch_of = [&](layout::range samples) {
      auto const* first = text.data() + samples.begin * length;
      return parallel::local_samples<exec::host>{.tokens = {first, {samples.size(), length}},
                                                 .targets = {first + 1, {samples.size(), length}}};
    };
    for (index_t step = 1; step <= 3; ++step) model.step(ex, batch_of, {.step = step, .learning_rate = 1e-3});
    auto const measured = model.stages().timeline(); // of the last step, on every rank
    // [/doc]
    if (world.rank() == 0) timeline = measured;
  });
  return timeline;
}

/// What the simulator makes of the plan with the durations that were measured.
double simulated_idle(layout::schedule_timeline const& measured, schedule_kind kind) {
  auto const chunks = kind == schedule_kind::interleaved_one_forward_one_backward ? 2 : 1;
  auto const plan = layout::make_schedule(kind, {.stages = 2, .micro_batches = batch, .chunks = chunks});
  auto const duration = [&](int stage, layout::action a) {
    if (layout::computes(a.kind))
      for (auto const& seen : measured.stages[static_cast<std::size_t>(stage)])
        if (seen.what == a) return seen.end - seen.begin;
    return 0.0;
  };
  return layout::simulate(plan, duration).bubble_share();
}

} // namespace

int main(int count, char** arguments) {
  if (count != 2) {
    std::fprintf(stderr, "usage: %s FOLDER\n", arguments[0]);
    return 2;
  }
  for (auto kind : {schedule_kind::gpipe, schedule_kind::one_forward_one_backward,
                    schedule_kind::interleaved_one_forward_one_backward, schedule_kind::zero_bubble}) {
    auto const measured = run(kind);
    std::printf("%-36s idle %5.1f %%, %5.1f %% if messages and waking up took no time\n", name_of(kind),
                100 * measured.bubble_share(), 100 * simulated_idle(measured, kind));
    auto const path = std::string(arguments[1]) + "/measured_" + name_of(kind) + ".svg";
    auto const svg = train::schedule_picture({.title = std::string("Measured: ") + name_of(kind),
                                              .subtitle = "2 stages on 2 threads, 8 micro-batches",
                                              .unit = "milliseconds",
                                              .scale = 1000,
                                              .timeline = measured});
    auto* const out = std::fopen(path.c_str(), "w");
    if (out == nullptr || std::fputs(svg.c_str(), out) < 0 || std::fclose(out) != 0) {
      std::fprintf(stderr, "cannot write %s\n", path.c_str());
      return 1;
    }
  }
}
