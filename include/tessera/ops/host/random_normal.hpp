/// random_normal on the host: shared among the threads, one number after the other.
#ifndef TESSERA_OPS_HOST_RANDOM_NORMAL_HPP
#define TESSERA_OPS_HOST_RANDOM_NORMAL_HPP

#include <tessera/exec/host.hpp>
#include <tessera/ops/random_normal.hpp>

namespace tessera::inline TESSERA_ABI::ops {

template <>
struct random_normal_on<exec::host_backend> {
  template <exec::host_space Ex, storage_scalar T>
  static void run(Ex& ex, view<T, 1> out, random_normal_options const& options) {
    ex.parallel_for(out.size(), 1024, [&, y = out.data()](index_t begin, index_t end) {
      philox const random(options.seed, options.stream);
      for (auto i = begin; i < end; ++i)
        y[i] = T(options.deviation == 0
                     ? options.mean
                     : options.mean +
                           options.deviation * random.normal(static_cast<std::uint64_t>(options.first + i)));
    });
  }
};

} // namespace tessera::inline TESSERA_ABI::ops

#endif
