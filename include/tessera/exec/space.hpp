/// What an execution space is: where an operation runs and which memory it reaches. Operations are templates
/// over it and take it as their first argument.
#ifndef TESSERA_EXEC_SPACE_HPP
#define TESSERA_EXEC_SPACE_HPP

#include <tessera/core/view.hpp>

namespace tessera::inline TESSERA_ABI::exec {

/// `memory` is the kind of memory its views stand in; `backend` names the set of implementations
/// (`ops/host/`, `ops/cuda/`) that its operations use.
template <class Ex>
concept space = memory_space<typename Ex::memory> && requires(Ex& ex) {
  typename Ex::backend;
  ex.synchronize();
};

struct host_backend {};

/// An execution space whose operations run on the host's threads.
template <class Ex>
concept host_space = space<Ex> && std::same_as<typename Ex::backend, host_backend>;

} // namespace tessera::inline TESSERA_ABI::exec

#endif
