#include <tessera/parallel/zero_options.hpp>

#include "fixture.hpp"

using namespace tessera;
using namespace fixture;
using parallel::zero_options;

namespace {

struct far_memory {
  static constexpr bool host_accessible = false;
  static constexpr char const* name = "far";
};
struct far_space {
  using memory = far_memory;
  using backend = exec::host_backend;
  void synchronize() {}
};

} // namespace

TEST_CASE("Stages and bounds that do not exist are refused, the defaults are not") {
  auto const id = [](zero_options const& options) {
    return id_thrown_by<config_error>([&] { options.validate(); });
  };
  CHECK(id({}) == "nothing was thrown");
  CHECK(id({.stage = 3, .bucket_bytes = 1, .in_flight = 1, .prefetch = 0}) == "nothing was thrown");
  CHECK(id({.stage = -1}) == "E-parallel-002");
  CHECK(id({.stage = 4}) == "E-parallel-002");
  CHECK(id({.bucket_bytes = 0}) == "E-parallel-002");
  CHECK(id({.in_flight = 0}) == "E-parallel-002");
  CHECK(id({.open_units = 0}) == "E-parallel-002");
  CHECK(id({.prefetch = 2}) == "E-parallel-002");
  CHECK(id({.micro_batches = 0}) == "E-parallel-002");
}

TEST_CASE("A communicator of one memory does not go with a space of another") {
  CHECK(parallel::communicates_for<comm::threads, exec::host>);
  CHECK_FALSE(parallel::communicates_for<comm::threads, far_space>);
}
