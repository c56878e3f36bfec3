// Draws the pipeline schedules and prints what they cost. Nothing is trained. Needs only a C++20 compiler:
//   g++ -std=c++20 -O1 -Iinclude examples/pipeline_schedules.cpp && ./a.out FOLDER [STAGES MICRO_BATCHES]
#include <cstdio>
#include <cstdlib>
#include <tessera/train/schedule_picture.hpp>

using namespace tessera::layout;

namespace {

struct drawing {
  char const* file;
  char const* title;
  schedule_kind kind;
  int chunks;
};

constexpr drawing drawings[] = {
    {"gpipe", "GPipe", schedule_kind::gpipe, 1},
    {"one_forward_one_backward", "1F1B", schedule_kind::one_forward_one_backward, 1},
    {"interleaved", "Interleaved 1F1B", schedule_kind::interleaved_one_forward_one_backward, 2},
    {"zero_bubble", "Zero bubble (ZB-H1)", schedule_kind::zero_bubble, 1}};

void draw(std::string const& folder, drawing const& d, int stages, int micro_batches) {
  // [doc: schedule]
  auto const plan =
      make_schedule(d.kind, {.stages = stages, .micro_batches = micro_batches, .chunks = d.chunks});
  // A chunk of two takes half the time of the whole stage.
  auto const part = 1.0 / d.chunks;
  auto const run =
      simulate(plan, schedule_durations{.forward = part, .backward_input = part, .backward_weights = part});
  std::printf("%-20s idle %5.1f %%, micro-batches kept:", d.title, 100 * run.bubble_share());
  for (int stage = 0; stage < stages; ++stage) std::printf(" %g", run.most_live(stage) * part);
  std::printf("\n");
  // [/doc]
  auto const svg = tessera::train::schedule_picture(
      {.title = d.title,
       .subtitle =
           std::to_string(stages) + " stages, " + std::to_string(micro_batches) + " micro-batches" +
           (d.chunks > 1 ? ", " + std::to_string(d.chunks) + " chunks a stage (the second one paler)" : "") +
           "; both halves of a backward take as long as a forward",
       .timeline = run});
  auto const path = folder + "/" + d.file + ".svg";
  auto* const out = std::fopen(path.c_str(), "w");
  if (out == nullptr || std::fputs(svg.c_str(), out) < 0 || std::fclose(out) != 0) {
    std::fprintf(stderr, "cannot write %s\n", path.c_str());
    std::exit(1);
  }
}

} // namespace

int main(int count, char** arguments) {
  if (count != 2 && count != 4) {
    std::fprintf(stderr, "usage: %s FOLDER [STAGES MICRO_BATCHES]\n", arguments[0]);
    return 2;
  }
  int const stages = count == 4 ? std::atoi(arguments[2]) : 4;
  int const micro_batches = count == 4 ? std::atoi(arguments[3]) : 8;
  try {
    for (auto const& d : drawings) draw(arguments[1], d, stages, micro_batches);
  } catch (tessera::error const& e) {
    std::fprintf(stderr, "%s\n", e.what());
    return 1;
  }
}
