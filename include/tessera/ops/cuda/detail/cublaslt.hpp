/// Matrix products by cuBLASLt: the library's handle, its workspace, and for each shape that came by the
/// descriptors and the algorithm chosen for it, kept in a handle of exec::cuda.
///
/// cuBLASLt counts columns first. A row-major c = a b is its c^T = b^T a^T: this file hands b over as its A
/// and a as its B, and nobody else thinks about it. Products of fp32 are made in fp32 (no TF32); partial sums
/// of any product are added in fp32.
///
/// Exists under TESSERA_WITH_CUDA.
#ifndef TESSERA_OPS_CUDA_DETAIL_CUBLASLT_HPP
#define TESSERA_OPS_CUDA_DETAIL_CUBLASLT_HPP

#if defined(TESSERA_WITH_CUDA)

#include <optional>
#include <string_view>
#include <unordered_map>
#include <utility>

#include <cublasLt.h>

#include <tessera/core/scalar.hpp>
#include <tessera/exec/cuda.hpp>
#include <tessera/exec/scratch.hpp>

namespace tessera::inline TESSERA_ABI::ops::cuda_detail {

using exec::cuda_memory;

/// Throws library_error where cuBLASLt did not do what it was called for.
inline void cublaslt_check(cublasStatus_t status, char const* call, site where) {
  if (status != CUBLAS_STATUS_SUCCESS)
    throw library_error("E-ops-107", where, call, " failed: ", cublasLtGetStatusName(status), " (",
                        cublasLtGetStatusString(status), ")");
}

template <storage_scalar T>
constexpr cudaDataType data_type() noexcept {
  if constexpr (std::same_as<T, float>)
    return CUDA_R_32F;
  else if constexpr (std::same_as<T, bf16>)
    return CUDA_R_16BF;
  else
    return CUDA_R_16F;
}

/// The power of two, up to 256, that an address is a multiple of. Algorithms differ in what they ask for.
inline index_t alignment_of(void const* address) noexcept {
  auto const bits = reinterpret_cast<std::uintptr_t>(address) | 256u;
  return static_cast<index_t>(bits & (~bits + 1));
}

/// How a matrix of a batch lies in memory: rows `leading` elements apart, or columns where `columns` says so.
struct matrix_layout {
  bool columns = false;
  index_t leading = 1, next = 0;
};

/// None where neither the rows nor the columns are dense and apart. [batch, rows, columns]
template <class T, memory_space M>
std::optional<matrix_layout> layout_of(view<T, 3, M> matrix) {
  auto const rows = matrix.extent(1), columns = matrix.extent(2);
  auto const next = matrix.extent(0) > 1 ? matrix.stride(0) : 0;
  auto const dense = [](index_t length, index_t stride) { return length <= 1 || stride == 1; };
  auto const apart = [](index_t lines, index_t stride, index_t length) {
    return lines <= 1 || stride >= (length > 1 ? length : 1);
  };
  auto const leading = [](index_t lines, index_t stride, index_t length) {
    auto const least = length > 1 ? length : 1;
    return lines > 1 ? stride : least;
  };
  if (next < 0) return {};
  if (dense(columns, matrix.stride(2)) && apart(rows, matrix.stride(1), columns))
    return matrix_layout{false, leading(rows, matrix.stride(1), columns), next};
  if (dense(rows, matrix.stride(1)) && apart(columns, matrix.stride(2), rows))
    return matrix_layout{true, leading(columns, matrix.stride(2), rows), next};
  return {};
}

/// What is done to a product before it is stored; see ops/cuda/linear.cuh.
struct product_epilogue {
  cublasLtEpilogue_t kind = CUBLASLT_EPILOGUE_DEFAULT;
  void const* bias = nullptr; ///< Added, or where column sums go.
  void const* aux = nullptr;  ///< The matrix before the GELU, written or read.
  index_t aux_leading = 0;
};

/// Owns one of cuBLASLt's descriptors.
template <class Descriptor, cublasStatus_t (*Destroy)(Descriptor)>
class descriptor {
public:
  descriptor() = default;
  descriptor(descriptor&& other) noexcept : held_(std::exchange(other.held_, nullptr)) {}
  descriptor& operator=(descriptor&& other) noexcept {
    std::swap(held_, other.held_);
    return *this;
  }
  ~descriptor() {
    // Looked at, as all are; a destructor has nobody to tell.
    if (held_ != nullptr) (void)cublasLtGetStatusName(Destroy(held_));
  }
  Descriptor get() const noexcept { return held_; }
  Descriptor* place() noexcept { return &held_; }

private:
  Descriptor held_ = nullptr;
};

class cublaslt {
public:
  explicit cublaslt(exec::cuda&) {
    cublaslt_check(cublasLtCreate(library_.place()), "cublasLtCreate", site::here());
    cublaslt_check(cublasLtMatmulPreferenceCreate(preference_.place()), "cublasLtMatmulPreferenceCreate",
                   site::here());
  }

  /// c (+)= a b with the epilogue, on the space's stream. `a` and `b` have one type, c has it too or is fp32.
  /// False, and nothing done, where a layout is not one that cuBLASLt takes or where it has no algorithm.
  /// What it can do beside the product depends on its version and the device, and is not written down in
  /// full: an epilogue that it refuses is noted and left to separate kernels.
  template <storage_scalar C, storage_scalar T>
    requires(std::same_as<C, T> || std::same_as<C, float>)
  bool multiply(exec::cuda& ex, view<C, 3, cuda_memory> c, view<T const, 3, cuda_memory> a,
                view<T const, 3, cuda_memory> b, bool accumulate, product_epilogue const& epilogue,
                site where) {
    auto const of_a = layout_of(a), of_b = layout_of(b);
    auto const of_c = layout_of(c);
    if (!of_a || !of_b || !of_c || of_c->columns || a.extent(2) == 0) return false;
    if (c.extent(0) > 1 && of_c->next < c.extent(1) * of_c->leading) return false;
    // Everything as cuBLASLt sees it: its A is b^T, its B is a^T, its D is c^T.
    shape const key{.type = data_type<T>(),
                    .type_d = data_type<C>(),
                    .batch = c.extent(0),
                    .m = c.extent(2),
                    .n = c.extent(1),
                    .k = a.extent(2),
                    .transposed_a = of_b->columns,
                    .transposed_b = of_a->columns,
                    .leading_a = of_b->leading,
                    .leading_b = of_a->leading,
                    .leading_d = of_c->leading,
                    .next_a = of_b->next,
                    .next_b = of_a->next,
                    .next_d = of_c->next,
                    .alignment_a = alignment_of(b.data()),
                    .alignment_b = alignment_of(a.data()),
                    .alignment_d = alignment_of(c.data()),
                    .epilogue = epilogue.kind,
                    .alignment_bias = alignment_of(epilogue.bias),
                    .alignment_aux = alignment_of(epilogue.aux),
                    .leading_aux = epilogue.aux_leading};
    auto& how = plan_of(ex, key, epilogue, where);
    if (!how.possible) return false;
    point_at(how.operation.get(), epilogue, where);
    float const one = 1, beta = accumulate ? 1.0f : 0.0f;
    auto* workspace = how.workspace_bytes == 0
                          ? nullptr
                          : ex.template handle<exec::scratch<cublaslt, cuda_memory>>().template take<char>(
                                how.workspace_bytes, where);
    auto const status =
        cublasLtMatmul(library_.get(), how.operation.get(), &one, b.data(), how.a.get(), a.data(),
                       how.b.get(), &beta, c.data(), how.d.get(), c.data(), how.d.get(), &how.algorithm,
                       workspace, static_cast<std::size_t>(how.workspace_bytes), ex.stream());
    if (is_refusal(status, epilogue.kind)) {
      give_up(ex, how);
      return false;
    }
    cublaslt_check(status, "cublasLtMatmul", where);
    return true;
  }

  /// Shapes that are known.
  std::size_t plans() const noexcept { return plans_.size(); }

private:
  /// All that the choice of an algorithm depends on; every member has 64 bits, so that there is no padding.
  struct shape {
    index_t type, type_d, batch, m, n, k, transposed_a, transposed_b, leading_a, leading_b, leading_d, next_a,
        next_b, next_d, alignment_a, alignment_b, alignment_d, epilogue, alignment_bias, alignment_aux,
        leading_aux;

    bool operator==(shape const&) const = default;
  };
  struct hash_of_shape {
    std::size_t operator()(shape const& key) const noexcept {
      return std::hash<std::string_view>()({reinterpret_cast<char const*>(&key), sizeof key});
    }
  };

  struct plan {
    bool possible = false;
    descriptor<cublasLtMatmulDesc_t, cublasLtMatmulDescDestroy> operation;
    descriptor<cublasLtMatrixLayout_t, cublasLtMatrixLayoutDestroy> a, b, d;
    cublasLtMatmulAlgo_t algorithm{};
    index_t workspace_bytes = 0;
  };

  /// More shapes than a program of fixed sizes ever has; beyond it all are forgotten.
  static constexpr std::size_t most_plans = 4096;

  plan& plan_of(exec::cuda& ex, shape const& key, product_epilogue const& epilogue, site where) {
    if (auto const known = plans_.find(key); known != plans_.end()) return known->second;
    if (plans_.size() >= most_plans) plans_.clear();
    return plans_.emplace(key, make(ex, key, epilogue, where)).first->second;
  }

  plan make(exec::cuda& ex, shape const& key, product_epilogue const& epilogue, site where) const {
    plan made;
    auto const operation_is = [&](cublasLtMatmulDescAttributes_t attribute, auto value) {
      cublaslt_check(cublasLtMatmulDescSetAttribute(made.operation.get(), attribute, &value, sizeof value),
                     "cublasLtMatmulDescSetAttribute", where);
    };
    cublaslt_check(cublasLtMatmulDescCreate(made.operation.place(), CUBLAS_COMPUTE_32F, CUDA_R_32F),
                   "cublasLtMatmulDescCreate", where);
    operation_is(CUBLASLT_MATMUL_DESC_TRANSA, key.transposed_a ? CUBLAS_OP_T : CUBLAS_OP_N);
    operation_is(CUBLASLT_MATMUL_DESC_TRANSB, key.transposed_b ? CUBLAS_OP_T : CUBLAS_OP_N);
    operation_is(CUBLASLT_MATMUL_DESC_EPILOGUE, epilogue.kind);
    if (epilogue.aux != nullptr)
      operation_is(CUBLASLT_MATMUL_DESC_EPILOGUE_AUX_LD, std::int64_t{epilogue.aux_leading});
    point_at(made.operation.get(), epilogue, where);

    auto const layout = [&](auto& of, index_t type, index_t rows, index_t columns, index_t leading,
                            index_t next) {
      cublaslt_check(cublasLtMatrixLayoutCreate(of.place(), static_cast<cudaDataType>(type),
                                                narrow<std::uint64_t>(rows, where),
                                                narrow<std::uint64_t>(columns, where), leading),
                     "cublasLtMatrixLayoutCreate", where);
      if (key.batch == 1) return;
      auto const count = narrow<std::int32_t>(key.batch, where);
      auto const offset = std::int64_t{next};
      auto const is = [&](cublasLtMatrixLayoutAttribute_t attribute, auto const& value) {
        cublaslt_check(cublasLtMatrixLayoutSetAttribute(of.get(), attribute, &value, sizeof value),
                       "cublasLtMatrixLayoutSetAttribute", where);
      };
      is(CUBLASLT_MATRIX_LAYOUT_BATCH_COUNT, count);
      is(CUBLASLT_MATRIX_LAYOUT_STRIDED_BATCH_OFFSET, offset);
    };
    // A is [m, k] and B [k, n] before they are transposed, with columns adjacent.
    layout(made.a, key.type, key.transposed_a ? key.k : key.m, key.transposed_a ? key.m : key.k,
           key.leading_a, key.next_a);
    layout(made.b, key.type, key.transposed_b ? key.n : key.k, key.transposed_b ? key.k : key.n,
           key.leading_b, key.next_b);
    layout(made.d, key.type_d, key.m, key.n, key.leading_d, key.next_d);
    choose(ex, made, key, where);
    return made;
  }

  /// The best algorithm by cuBLASLt's own estimate, within the workspace and the alignments.
  void choose(exec::cuda& ex, plan& made, shape const& key, site where) const {
    auto const prefer = [&](cublasLtMatmulPreferenceAttributes_t attribute, auto value) {
      cublaslt_check(cublasLtMatmulPreferenceSetAttribute(preference_.get(), attribute, &value, sizeof value),
                     "cublasLtMatmulPreferenceSetAttribute", where);
    };
    prefer(CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES, narrow<std::uint64_t>(ex.workspace_bytes(), where));
    // Partial sums of a split k are added in fp32, not in the type of the result.
    prefer(CUBLASLT_MATMUL_PREF_REDUCTION_SCHEME_MASK, std::uint32_t{CUBLASLT_REDUCTION_SCHEME_COMPUTE_TYPE});
    prefer(CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_A_BYTES, narrow<std::uint32_t>(key.alignment_a, where));
    prefer(CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_B_BYTES, narrow<std::uint32_t>(key.alignment_b, where));
    prefer(CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_C_BYTES, narrow<std::uint32_t>(key.alignment_d, where));
    prefer(CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_D_BYTES, narrow<std::uint32_t>(key.alignment_d, where));

    cublasLtMatmulHeuristicResult_t found{};
    int count = 0;
    auto const status =
        cublasLtMatmulAlgoGetHeuristic(library_.get(), made.operation.get(), made.a.get(), made.b.get(),
                                       made.d.get(), made.d.get(), preference_.get(), 1, &found, &count);
    auto const kind = static_cast<cublasLtEpilogue_t>(key.epilogue);
    if (status != CUBLAS_STATUS_NOT_SUPPORTED && !is_refusal(status, kind))
      cublaslt_check(status, "cublasLtMatmulAlgoGetHeuristic", where);
    if (status != CUBLAS_STATUS_SUCCESS || count < 1 || found.state != CUBLAS_STATUS_SUCCESS) {
      if (kind != CUBLASLT_EPILOGUE_DEFAULT) give_up(ex, made);
      return;
    }
    made.possible = true;
    made.algorithm = found.algo;
    made.workspace_bytes = narrow<index_t>(found.workspaceSize, where);
  }

  /// The product alone is possible, whatever the answer to the epilogue.
  static bool is_refusal(cublasStatus_t status, cublasLtEpilogue_t kind) noexcept {
    return kind != CUBLASLT_EPILOGUE_DEFAULT &&
           (status == CUBLAS_STATUS_NOT_SUPPORTED || status == CUBLAS_STATUS_INVALID_VALUE);
  }
  static void give_up(exec::cuda& ex, plan& made) {
    made.possible = false;
    ex.note(
        "some products: cuBLASLt does not apply bias, GELU or their gradients to them; separate kernels do");
  }

  static void point_at(cublasLtMatmulDesc_t operation, product_epilogue const& epilogue, site where) {
    auto const is = [&](cublasLtMatmulDescAttributes_t attribute, void const* value) {
      if (value != nullptr)
        cublaslt_check(cublasLtMatmulDescSetAttribute(operation, attribute, &value, sizeof value),
                       "cublasLtMatmulDescSetAttribute", where);
    };
    is(CUBLASLT_MATMUL_DESC_BIAS_POINTER, epilogue.bias);
    is(CUBLASLT_MATMUL_DESC_EPILOGUE_AUX_POINTER, epilogue.aux);
  }

  descriptor<cublasLtHandle_t, cublasLtDestroy> library_;
  descriptor<cublasLtMatmulPreference_t, cublasLtMatmulPreferenceDestroy> preference_;
  std::unordered_map<shape, plan, hash_of_shape> plans_;
};

/// A matrix as a batch of one.
template <class T, memory_space M>
view<T, 3, M> batch_of_one(view<T, 2, M> matrix) {
  return {matrix.data(), {1, matrix.extent(0), matrix.extent(1)}, {0, matrix.stride(0), matrix.stride(1)}};
}

} // namespace tessera::inline TESSERA_ABI::ops::cuda_detail

#endif

#endif
