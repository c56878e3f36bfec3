#include <tessera/optim/optimizer.hpp>

#include "fixture.hpp"
#include <tessera/optim/adamw.hpp>
#include <tessera/optim/sgd.hpp>

using namespace tessera;
using namespace fixture;

namespace {

using host = exec::host;

template <class T, template <class, class> class O>
constexpr bool serves =
    optim::optimizer<O<host, T>, host, T, T>&& optim::optimizer<O<host, T>, host, T, float>;

static_assert(serves<float, optim::adamw> && serves<bf16, optim::adamw> && serves<fp16, optim::adamw>);
static_assert(serves<float, optim::sgd> && serves<bf16, optim::sgd> && serves<fp16, optim::sgd>);
static_assert(!optim::optimizer<int, host, float, float>);

} // namespace

TEST_CASE_TEMPLATE("Every optimizer takes an empty shard, and its state has the shard's length", O,
                   optim::adamw<host, float>, optim::adamw<host, bf16>, optim::sgd<host, float>,
                   optim::sgd<host, bf16>) {
  host ex({.threads = 2});
  using T = std::conditional_t<O::has_master, bf16, float>;
  for (index_t n : {0, 1, 33}) {
    O o(ex, n, {}, {});
    CHECK(o.elements() == n);
    index_t bytes = 0;
    for (auto const& array : o.state()) {
      CHECK(static_cast<index_t>(array.values.size()) == n);
      bytes += static_cast<index_t>(array.values.size_bytes());
    }
    CHECK(bytes == n * O::state_bytes(typename O::options_type{}));
    std::vector<T> weights(static_cast<std::size_t>(n)), gradients(weights.size());
    o.start_from(ex, std::span<T const>(weights));
    o.step(ex, std::span(weights), std::span<T const>(gradients), {.step = 1, .learning_rate = 1});
    for (auto w : weights) CHECK(static_cast<float>(w) == 0.0f);
  }
}
