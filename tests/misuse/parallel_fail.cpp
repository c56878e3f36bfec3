// A communicator whose messages stand in other memory than the space works in, and blocks of other memory
// than the space's, are refused by the concept's name.
#include <tessera/comm/self.hpp>
#include <tessera/exec/host.hpp>
#include <tessera/parallel/data_parallel.hpp>

using namespace tessera;

struct far_memory {
  static constexpr bool host_accessible = false;
  static constexpr char const* name = "far";
};
struct far_space {
  using memory = far_memory;
  using backend = exec::host_backend;
  void synchronize() {}
};

template <class Ex>
using replicas = parallel::data_parallel<comm::self, Ex, float, float>;

int main() {
  comm::self alone;
  exec::host ex({.threads = 1});
  replicas<exec::host> right(alone, ex, {}, {});
#if MISUSE == 1
  using wrong = replicas<far_space>; // expect-error: communicates_for
  sizeof(wrong);
#elif MISUSE == 2
  parallel::flat_model<float, float, far_memory> elsewhere;
  replicas<exec::host> wrong(alone, ex, elsewhere,
                             {}); // expect-error: flat_model<float, float, far_memory>|no matching
#endif
}
