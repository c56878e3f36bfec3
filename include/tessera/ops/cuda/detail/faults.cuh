/// Bad values that only kernels see: tokens and targets outside their range. A kernel raises the fault and
/// goes on without harm; the space's next `synchronize` throws what the host operation would have thrown.
///
///     auto& found = ex.template handle<cuda_detail::faults>();
///     launch(..., found.expect(fault::target, classes, where), ...);     // a fault_flag, passed by value
///     if (bad) flag.raise(row, target);                                  // in the kernel
#ifndef TESSERA_OPS_CUDA_DETAIL_FAULTS_CUH
#define TESSERA_OPS_CUDA_DETAIL_FAULTS_CUH

#include <tessera/exec/copy_cuda.hpp>
#include <tessera/exec/launch.cuh>
#include <tessera/ops/cross_entropy.hpp>

namespace tessera::inline TESSERA_ABI::ops::cuda_detail {

using exec::cuda_memory;

enum class fault { target, token, token_backward };

/// Where a kernel leaves the fault of the lowest row: the row counted down from 2^31 - 1, above the value.
/// Zero: none.
struct fault_flag {
  unsigned long long* word;

  __device__ void raise(index_t row, std::int32_t value) const {
    constexpr index_t last = 0x7ffffffe; // rows beyond are reported as this one
    auto const from_end = static_cast<unsigned long long>(last + 1 - (row < last ? row : last));
    atomicMax(word, from_end << 32 | static_cast<std::uint32_t>(value));
  }
};

/// A handle of exec::cuda.
class faults final : public exec::late_check {
public:
  explicit faults(exec::cuda& ex) : ex_(&ex), words_({kinds}, ex.scratch_account()) { ex.watch(*this); }

  /// The flag for a kernel that is about to start, whose values must lie in [0, limit). Where they stand in a
  /// matrix, `row` counts its elements row by row.
  fault_flag expect(fault kind, index_t limit, site where, index_t columns = 1) {
    expected_[static_cast<int>(kind)] = {limit, columns > 0 ? columns : 1, where};
    return {words_.data() + static_cast<int>(kind)};
  }

  void look(site) override {
    unsigned long long raised[kinds];
    exec::cuda_check(
        cudaMemcpyAsync(raised, words_.data(), sizeof raised, cudaMemcpyDeviceToHost, ex_->stream()),
        "cudaMemcpyAsync");
    exec::cuda_check(cudaStreamSynchronize(ex_->stream()), "cudaStreamSynchronize");
    for (int kind = 0; kind < kinds; ++kind)
      if (raised[kind] != 0) {
        exec::zero(*ex_, words_.span());
        report(static_cast<fault>(kind), index_t{0x7fffffff} - static_cast<index_t>(raised[kind] >> 32),
               static_cast<std::int32_t>(raised[kind] & 0xffffffffu), expected_[kind]);
      }
  }

private:
  static constexpr int kinds = 3;
  struct expectation {
    index_t limit = 0, columns = 1;
    site where;
  };

  [[noreturn]] static void report(fault kind, index_t row, std::int32_t value, expectation const& expected) {
    if (kind == fault::target)
      throw size_error("E-ops-004", expected.where, "cross_entropy: the target of row ", row, " is ", value,
                       ", must lie in [0, ", expected.limit, ") or be ignore_index (", ignore_index, ")");
    throw size_error("E-ops-011", expected.where, kind == fault::token ? "embedding" : "embedding_backward",
                     ": the token at (", row / expected.columns, ", ", row % expected.columns, ") is ", value,
                     ", must lie in [0, ", expected.limit, ")");
  }

  exec::cuda* ex_;
  tensor<unsigned long long, 1, cuda_memory> words_;
  expectation expected_[kinds];
};

} // namespace tessera::inline TESSERA_ABI::ops::cuda_detail

#endif
