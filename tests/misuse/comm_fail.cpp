// Messages are spans of scalars that travel, of one type at both ends; a request that nobody keeps is a
// mistake; ranks are a communicator or nothing.
#include <string>
#include <vector>

#include <tessera/comm/self.hpp>

using namespace tessera;

template <comm::communicator Comm>
float total(Comm& ranks, float mine) {
  return ranks.all_reduce(mine);
}

struct particle {
  float position[3];
  int kind;
};

int main() {
  comm::self ranks;
  std::vector<float> x(8), y(8);
  ranks.all_reduce(std::span(x));
  ranks.all_reduce(std::span(y), std::span<float const>(x), {.operation = comm::reduction::max});
  ranks.start_broadcast(std::span(x), 0).wait();
  total(ranks, 1.0f);
#if MISUSE == 1
  particle cloud[4] = {};
  ranks.broadcast(std::span<particle>(cloud), 0); // expect-error: message_scalar
#elif MISUSE == 2
  bool flags[4] = {};
  ranks.all_reduce(std::span<bool>(flags)); // expect-error: reducible_scalar
#elif MISUSE == 3
  std::vector<double> wide(8);
  ranks.all_reduce(std::span(y), std::span<double const>(wide)); // expect-error: no matching.*all_reduce
#elif MISUSE == 4
  ranks.all_reduce(std::span<float const>(x)); // expect-error: reducible_scalar
#elif MISUSE == 5
  ranks.start_all_reduce(std::span(x)); // expect-error: nodiscard
#elif MISUSE == 6
  std::string nobody;
  total(nobody, 1.0f); // expect-error: communicator
#elif MISUSE == 7
  auto twice = ranks; // expect-error: deleted
#elif MISUSE == 8
  ranks.all_reduce(std::span(x), {.order = comm::summation::fastest}); // expect-error: fastest
#elif MISUSE == 9
  std::byte raw[4] = {};
  ranks.all_reduce(std::span<std::byte>(raw)); // expect-error: reducible_scalar
#endif
}
