// cp.async: copies to shared memory that are there only after the thread has waited for them.
#include <cstring>

#include <cuda_emulation/tensor_cores.hpp>

#include "machine.hpp"

namespace cuda_emulation {
namespace {

struct copy {
  void* to;
  void const* from; // null: zeros
  std::size_t bytes;
  int group;
};

/// What one thread of the block has started and not waited for.
struct copies {
  std::uint64_t launch = ~std::uint64_t{0}, block = 0; // to tell it from what an earlier block left behind
  int groups = 0;                                      // closed
  std::vector<copy> pending;
};

copies& of_this_thread() {
  static thread_local std::vector<copies> of_threads(most_threads);
  auto const& c = *running;
  auto& mine = of_threads[static_cast<std::size_t>(c.current)];
  if (mine.launch != c.launch_number || mine.block != c.block_number) {
    mine.launch = c.launch_number;
    mine.block = c.block_number;
    mine.groups = 0;
    mine.pending.clear();
  }
  return mine;
}

} // namespace

void start_copy(void* shared, void const* global, std::size_t bytes, bool inside) {
  require_aligned(shared, bytes);
  write_access(shared, bytes);
  if (inside) {
    require_aligned(global, bytes);
    read_access(global, bytes);
  }
  // Until the thread has waited, there is nothing of use: all ones is NaN in every type.
  std::memset(shared, 0xff, bytes);
  auto& mine = of_this_thread();
  mine.pending.push_back({shared, inside ? global : nullptr, bytes, mine.groups});
}

void commit_copies() {
  ++of_this_thread().groups;
}

void wait_for_copies(int groups_left) {
  auto& mine = of_this_thread();
  std::size_t left = 0;
  for (auto const& one : mine.pending) {
    if (one.group >= mine.groups - groups_left) {
      mine.pending[left++] = one;
    } else if (one.from != nullptr) {
      std::memcpy(one.to, one.from, one.bytes);
    } else {
      std::memset(one.to, 0, one.bytes);
    }
  }
  mine.pending.resize(left);
}

} // namespace cuda_emulation
