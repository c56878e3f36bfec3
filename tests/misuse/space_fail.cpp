// What is no execution space is refused at the caller's line, by the concept's name.
#include <tessera/exec/host.hpp>

using namespace tessera;

template <exec::space Ex>
void run(Ex& ex) {
  ex.synchronize();
}

int main() {
  exec::host ex({.threads = 1});
  run(ex);
#if MISUSE == 1
  int stream = 0;
  run(stream); // expect-error: exec::space|space<int>
#elif MISUSE == 2
  ex.parallel_for(10, 1, [](index_t) {}); // expect-error: invocable
#elif MISUSE == 3
  auto copy = ex; // expect-error: deleted
#endif
}
