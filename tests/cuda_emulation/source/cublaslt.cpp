// cuBLASLt as far as the library uses it. Sums are made in double. What the real one would answer with an
// error, or would read beyond its bounds for, is answered with an error here, or recorded as a fault.
#include <atomic>
#include <cmath>
#include <cstring>
#include <new>
#include <string>
#include <utility>
#include <vector>

#include <cublasLt.h>
#include <cuda_emulation/cublaslt.hpp>
#include <cuda_emulation/library.hpp>

struct cublasLtContext {
  int device;
};
struct cublasLtMatmulDescOpaque_t {
  cublasOperation_t transpose_a = CUBLAS_OP_N, transpose_b = CUBLAS_OP_N;
  unsigned epilogue = CUBLASLT_EPILOGUE_DEFAULT;
  void* bias = nullptr;
  void* aux = nullptr;
  std::int64_t aux_leading = 0;
};
struct cublasLtMatrixLayoutOpaque_t {
  cudaDataType type;
  std::int64_t rows, columns, leading;
  std::int32_t batch = 1;
  std::int64_t next = 0;
};
struct cublasLtMatmulPreferenceOpaque_t {
  std::uint64_t workspace_bytes = 0;
  std::uint32_t reductions = CUBLASLT_REDUCTION_SCHEME_MASK;
  std::uint32_t alignment[4] = {256, 256, 256, 256}; // of A, B, C, D
};

namespace {

using operation = cublasLtMatmulDescOpaque_t;
using layout = cublasLtMatrixLayoutOpaque_t;
using preference = cublasLtMatmulPreferenceOpaque_t;
using cuda_emulation::fault_kind;

std::atomic<std::int64_t> objects{0}, products{0}, with_epilogue{0}, matrices{0};
std::atomic<bool> no_epilogues{false};

cublasStatus_t failed(char const* call, cublasStatus_t status) {
  cuda_emulation::returned_error(call, static_cast<int>(status));
  return status;
}
/// The status to return at once; success: go on.
cublasStatus_t begin(char const* call) {
  return cuda_emulation::begin_call(call) == cudaSuccess ? CUBLAS_STATUS_SUCCESS
                                                         : failed(call, CUBLAS_STATUS_EXECUTION_FAILED);
}

template <class Object, class... From>
cublasStatus_t make(char const* call, Object** place, From... from) {
  if (auto const status = begin(call); status != CUBLAS_STATUS_SUCCESS) return status;
  if (place == nullptr) return failed(call, CUBLAS_STATUS_INVALID_VALUE);
  *place = new Object{from...};
  ++objects;
  return CUBLAS_STATUS_SUCCESS;
}
template <class Object>
cublasStatus_t destroy(char const* call, Object* object) {
  if (auto const status = begin(call); status != CUBLAS_STATUS_SUCCESS) return status;
  if (object == nullptr) return failed(call, CUBLAS_STATUS_INVALID_VALUE);
  delete object;
  --objects;
  return CUBLAS_STATUS_SUCCESS;
}
/// Sets a member whose size the caller must know.
template <class Member>
bool set(Member& member, void const* value, std::size_t bytes) {
  if (value == nullptr || bytes != sizeof member) return false;
  std::memcpy(&member, value, bytes);
  return true;
}

constexpr std::size_t size_of(cudaDataType type) {
  return type == CUDA_R_32F ? 4 : 2;
}
/// The power of two, up to 256, that the address is a multiple of.
std::uint32_t alignment_of(void const* address) {
  auto const bits = static_cast<std::uint32_t>(reinterpret_cast<std::uintptr_t>(address)) | 256u;
  return bits & (~bits + 1u);
}

// ---- elements --------------------------------------------------------------------------------------------

double value_of_half(std::uint16_t bits) {
  auto const exponent = bits >> 10 & 31, mantissa = bits & 1023;
  auto const sign = bits & 0x8000 ? -1.0 : 1.0;
  if (exponent == 31) return mantissa ? NAN : sign * INFINITY;
  return exponent == 0 ? sign * std::ldexp(mantissa, -24) : sign * std::ldexp(1024 + mantissa, exponent - 25);
}
std::uint16_t half_of(double x) {
  auto const sign = static_cast<std::uint16_t>(std::signbit(x) ? 0x8000 : 0);
  auto const size = std::fabs(x);
  if (std::isnan(x)) return static_cast<std::uint16_t>(sign | 0x7e00);
  if (size >= 65520) return static_cast<std::uint16_t>(sign | 0x7c00);
  // In units of the last place, of normal numbers 2^(exponent - 10), of the others 2^-24.
  auto const exponent = size < 0x1p-14 ? -14 : std::ilogb(size);
  auto const units = static_cast<int>(std::nearbyint(std::ldexp(size, 10 - exponent)));
  return static_cast<std::uint16_t>(sign | (units + (exponent + 14) * 1024));
}
std::uint16_t bfloat_of(double x) {
  auto const single = static_cast<float>(x);
  std::uint32_t bits;
  std::memcpy(&bits, &single, 4);
  if (std::isnan(single)) return static_cast<std::uint16_t>(bits >> 16 | 0x40);
  return static_cast<std::uint16_t>((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
}
double load(void const* array, std::int64_t i, cudaDataType type) {
  if (type == CUDA_R_32F) return static_cast<double>(static_cast<float const*>(array)[i]);
  auto const bits = static_cast<std::uint16_t const*>(array)[i];
  if (type == CUDA_R_16F) return value_of_half(bits);
  auto const word = static_cast<std::uint32_t>(bits) << 16;
  float value;
  std::memcpy(&value, &word, 4);
  return static_cast<double>(value);
}
void store(void* array, std::int64_t i, cudaDataType type, double value) {
  if (type == CUDA_R_32F)
    static_cast<float*>(array)[i] = static_cast<float>(value);
  else
    static_cast<std::uint16_t*>(array)[i] = type == CUDA_R_16F ? half_of(value) : bfloat_of(value);
}

double gelu_inner(double x) {
  return std::sqrt(2 / 3.14159265358979323846) * (x + 0.044715 * x * x * x);
}
double gelu(double x) {
  return 0.5 * x * (1 + std::tanh(gelu_inner(x)));
}
double gelu_slope(double x) {
  auto const t = std::tanh(gelu_inner(x));
  auto const inner_slope = std::sqrt(2 / 3.14159265358979323846) * (1 + 3 * 0.044715 * x * x);
  return 0.5 * (1 + t) + (std::fabs(x) > 20 ? 0.0 : 0.5 * x * (1 - t * t) * inner_slope);
}

// ---- a product -------------------------------------------------------------------------------------------

/// Whether descriptors make sense together; else what the real library answers.
cublasStatus_t check(operation const& how, layout const& a, layout const& b, layout const& c,
                     layout const& d) {
  auto const transposed_a = how.transpose_a == CUBLAS_OP_T, transposed_b = how.transpose_b == CUBLAS_OP_T;
  auto const m = transposed_a ? a.columns : a.rows, k = transposed_a ? a.rows : a.columns;
  auto const n = transposed_b ? b.rows : b.columns, k_of_b = transposed_b ? b.columns : b.rows;
  if (k != k_of_b || d.rows != m || d.columns != n || c.rows != m || c.columns != n)
    return CUBLAS_STATUS_INVALID_VALUE;
  if (m < 1 || n < 1 || k < 1) return CUBLAS_STATUS_INVALID_VALUE;
  for (auto const* matrix : {&a, &b, &c, &d})
    if (matrix->leading < matrix->rows || matrix->batch != d.batch || matrix->batch < 1 || matrix->next < 0 ||
        matrix->rows > INT32_MAX || matrix->columns > INT32_MAX)
      return CUBLAS_STATUS_INVALID_VALUE;
  if (d.batch > 1 && (d.next < d.leading * (d.columns - 1) + d.rows || c.next != d.next))
    return CUBLAS_STATUS_INVALID_VALUE;
  if (a.type != b.type || c.type != d.type || (d.type != a.type && d.type != CUDA_R_32F))
    return CUBLAS_STATUS_NOT_SUPPORTED;

  switch (how.epilogue) {
  case CUBLASLT_EPILOGUE_DEFAULT:
    return CUBLAS_STATUS_SUCCESS;
  case CUBLASLT_EPILOGUE_BIAS:
  case CUBLASLT_EPILOGUE_GELU:
  case CUBLASLT_EPILOGUE_GELU_BIAS:
  case CUBLASLT_EPILOGUE_GELU_AUX:
  case CUBLASLT_EPILOGUE_GELU_AUX_BIAS:
  case CUBLASLT_EPILOGUE_DGELU:
  case CUBLASLT_EPILOGUE_DGELU_BGRAD:
  case CUBLASLT_EPILOGUE_BGRADA:
  case CUBLASLT_EPILOGUE_BGRADB:
    break;
  default:
    return CUBLAS_STATUS_NOT_SUPPORTED;
  }
  if (no_epilogues || d.batch != 1) return CUBLAS_STATUS_NOT_SUPPORTED;
  if (how.epilogue & (CUBLASLT_EPILOGUE_BIAS | 16 | CUBLASLT_EPILOGUE_BGRADA | CUBLASLT_EPILOGUE_BGRADB)) {
    if (how.bias == nullptr) return CUBLAS_STATUS_INVALID_VALUE;
    if (alignment_of(how.bias) < 16) return CUBLAS_STATUS_NOT_SUPPORTED;
  }
  if (how.epilogue & 128) {
    if (how.aux == nullptr || how.aux_leading % 8 != 0 || how.aux_leading < d.rows)
      return CUBLAS_STATUS_INVALID_VALUE;
    if (alignment_of(how.aux) < 16) return CUBLAS_STATUS_NOT_SUPPORTED;
  }
  return CUBLAS_STATUS_SUCCESS;
}

/// What an algorithm was chosen for: it is not to be used for anything else.
struct chosen {
  std::uint64_t shape;
  std::uint32_t alignment[4], alignment_bias, alignment_aux;
  std::uint64_t workspace_bytes;
};
static_assert(sizeof(chosen) <= sizeof(cublasLtMatmulAlgo_t));

std::uint64_t hash_of(operation const& how, layout const& a, layout const& b, layout const& d) {
  std::uint64_t hash = 0x9e3779b97f4a7c15u;
  auto const mix = [&](std::int64_t value) {
    hash = (hash ^ static_cast<std::uint64_t>(value)) * 0xff51afd7ed558ccdu;
    hash ^= hash >> 29;
  };
  mix(how.transpose_a), mix(how.transpose_b), mix(how.epilogue), mix(how.aux_leading);
  for (auto const* matrix : {&a, &b, &d})
    mix(matrix->type), mix(matrix->rows), mix(matrix->columns), mix(matrix->leading), mix(matrix->batch),
        mix(matrix->next);
  return hash;
}

/// Whether columns of a matrix can be read, or written.
bool reach(bool write, void const* data, layout const& matrix, char const* what) {
  auto const size = static_cast<std::int64_t>(size_of(matrix.type));
  for (std::int64_t batch = 0; batch < matrix.batch; ++batch)
    for (std::int64_t column = 0; column < matrix.columns; ++column) {
      auto* at = const_cast<char*>(static_cast<char const*>(data)) +
                 (batch * matrix.next + column * matrix.leading) * size;
      auto const bytes = static_cast<std::size_t>(matrix.rows * size);
      if (write ? !cuda_emulation::write_memory(at, bytes, what)
                : !cuda_emulation::read_memory(at, bytes, what))
        return false;
    }
  return true;
}

struct product {
  operation how;
  layout a_layout, b_layout, d_layout;
  double alpha, beta;
  void const* a;
  void const* b;
  void* d;
  void* workspace;
  std::size_t workspace_bytes;

  void run() const {
    auto const m = d_layout.rows, n = d_layout.columns;
    auto const sums_bias = (how.epilogue & (16 | CUBLASLT_EPILOGUE_BGRADA | CUBLASLT_EPILOGUE_BGRADB)) != 0;
    layout const vector{d_layout.type, how.epilogue & CUBLASLT_EPILOGUE_BGRADB ? n : m, 1, m > n ? m : n};
    layout const aux{d_layout.type, m, n, how.aux_leading};
    auto const writes_aux = (how.epilogue & CUBLASLT_EPILOGUE_GELU_AUX) == CUBLASLT_EPILOGUE_GELU_AUX;
    auto const reads_aux = (how.epilogue & CUBLASLT_EPILOGUE_DGELU) == CUBLASLT_EPILOGUE_DGELU;
    if (!reach(false, a, a_layout, "cublasLtMatmul: A") || !reach(false, b, b_layout, "cublasLtMatmul: B"))
      return;
    if (beta != 0 && !reach(false, d, d_layout, "cublasLtMatmul: C")) return;
    if ((how.epilogue & CUBLASLT_EPILOGUE_BIAS) && !reach(false, how.bias, vector, "cublasLtMatmul: bias"))
      return;
    if (reads_aux && !reach(false, how.aux, aux, "cublasLtMatmul: aux")) return;
    if (!reach(true, d, d_layout, "cublasLtMatmul: D")) return;
    if (sums_bias && !reach(true, how.bias, vector, "cublasLtMatmul: bias gradient")) return;
    if (writes_aux && !reach(true, how.aux, aux, "cublasLtMatmul: aux")) return;
    if (workspace_bytes > 0) {
      if (!cuda_emulation::write_memory(workspace, workspace_bytes, "cublasLtMatmul: workspace")) return;
      std::memset(workspace, 0xee, workspace_bytes);
    }
    for (std::int64_t batch = 0; batch < d_layout.batch; ++batch) multiply(batch, reads_aux, writes_aux);
  }

private:
  /// op(matrix) as [rows][columns], row by row.
  static std::vector<double> unpacked(void const* data, layout const& of, std::int64_t batch,
                                      bool transposed) {
    std::vector<double> out(static_cast<std::size_t>(of.rows * of.columns));
    for (std::int64_t column = 0; column < of.columns; ++column)
      for (std::int64_t row = 0; row < of.rows; ++row)
        out[static_cast<std::size_t>(transposed ? column * of.rows + row : row * of.columns + column)] =
            load(data, batch * of.next + column * of.leading + row, of.type);
    return out;
  }

  void multiply(std::int64_t batch, bool reads_aux, bool writes_aux) const {
    auto const m = d_layout.rows, n = d_layout.columns;
    auto const transposed_a = how.transpose_a == CUBLAS_OP_T, transposed_b = how.transpose_b == CUBLAS_OP_T;
    auto const k = transposed_a ? a_layout.rows : a_layout.columns;
    auto const left = unpacked(a, a_layout, batch, transposed_a);   // [m][k]
    auto const right = unpacked(b, b_layout, batch, !transposed_b); // [n][k]
    for (std::int64_t j = 0; j < n; ++j)
      for (std::int64_t i = 0; i < m; ++i) {
        auto const* x = left.data() + i * k;
        auto const* y = right.data() + j * k;
        double lane[8] = {};
        std::int64_t l = 0;
        for (; l + 8 <= k; l += 8)
          for (int s = 0; s < 8; ++s) lane[s] += x[l + s] * y[l + s];
        for (int s = 0; l < k; ++l, ++s) lane[s] += x[l] * y[l];
        auto sum = alpha * (((lane[0] + lane[4]) + (lane[2] + lane[6])) +
                            ((lane[1] + lane[5]) + (lane[3] + lane[7])));
        auto const at = batch * d_layout.next + j * d_layout.leading + i;
        if (beta != 0) sum += beta * load(d, at, d_layout.type);
        if (how.epilogue & CUBLASLT_EPILOGUE_BIAS) sum += load(how.bias, i, d_layout.type);
        auto const at_aux = j * how.aux_leading + i;
        if (writes_aux) store(how.aux, at_aux, d_layout.type, sum);
        if (how.epilogue & CUBLASLT_EPILOGUE_GELU) sum = gelu(sum);
        if (reads_aux) sum *= gelu_slope(load(how.aux, at_aux, d_layout.type));
        store(d, at, d_layout.type, sum);
      }
    auto const add_up = [&](std::int64_t count, auto term) {
      for (std::int64_t i = 0; i < count; ++i) store(how.bias, i, d_layout.type, term(i));
    };
    auto const sum_of = [&](std::vector<double> const& lines, std::int64_t line) {
      double sum = 0;
      for (std::int64_t l = 0; l < k; ++l) sum += lines[static_cast<std::size_t>(line * k + l)];
      return sum;
    };
    if (how.epilogue & CUBLASLT_EPILOGUE_BGRADA) add_up(m, [&](std::int64_t i) { return sum_of(left, i); });
    if (how.epilogue & CUBLASLT_EPILOGUE_BGRADB) add_up(n, [&](std::int64_t j) { return sum_of(right, j); });
    if (how.epilogue == CUBLASLT_EPILOGUE_DGELU_BGRAD)
      add_up(m, [&](std::int64_t i) {
        double sum = 0;
        for (std::int64_t j = 0; j < n; ++j) sum += load(d, j * d_layout.leading + i, d_layout.type);
        return sum;
      });
  }
};

} // namespace

namespace cuda_emulation {
void refuse_epilogues(bool refuse) noexcept {
  no_epilogues = refuse;
}
std::int64_t products_started() noexcept {
  return products;
}
std::int64_t epilogues_started() noexcept {
  return with_epilogue;
}
std::int64_t matrices_multiplied() noexcept {
  return matrices;
}
std::int64_t cublaslt_objects() noexcept {
  return objects;
}
} // namespace cuda_emulation

cublasStatus_t cublasLtCreate(cublasLtHandle_t* handle) {
  return make("cublasLtCreate", handle, cuda_emulation::device_of(nullptr));
}
cublasStatus_t cublasLtDestroy(cublasLtHandle_t handle) {
  return destroy("cublasLtDestroy", handle);
}

char const* cublasLtGetStatusName(cublasStatus_t status) {
  cuda_emulation::checked_error(static_cast<int>(status));
  switch (status) {
  case CUBLAS_STATUS_SUCCESS:
    return "CUBLAS_STATUS_SUCCESS";
  case CUBLAS_STATUS_NOT_INITIALIZED:
    return "CUBLAS_STATUS_NOT_INITIALIZED";
  case CUBLAS_STATUS_ALLOC_FAILED:
    return "CUBLAS_STATUS_ALLOC_FAILED";
  case CUBLAS_STATUS_INVALID_VALUE:
    return "CUBLAS_STATUS_INVALID_VALUE";
  case CUBLAS_STATUS_ARCH_MISMATCH:
    return "CUBLAS_STATUS_ARCH_MISMATCH";
  case CUBLAS_STATUS_MAPPING_ERROR:
    return "CUBLAS_STATUS_MAPPING_ERROR";
  case CUBLAS_STATUS_EXECUTION_FAILED:
    return "CUBLAS_STATUS_EXECUTION_FAILED";
  case CUBLAS_STATUS_INTERNAL_ERROR:
    return "CUBLAS_STATUS_INTERNAL_ERROR";
  case CUBLAS_STATUS_NOT_SUPPORTED:
    return "CUBLAS_STATUS_NOT_SUPPORTED";
  }
  return "an unknown status";
}
char const* cublasLtGetStatusString(cublasStatus_t status) {
  cuda_emulation::checked_error(static_cast<int>(status));
  return "emulated";
}

cublasStatus_t cublasLtMatmulDescCreate(cublasLtMatmulDesc_t* made, cublasComputeType_t compute,
                                        cudaDataType scale) {
  if (compute != CUBLAS_COMPUTE_32F || scale != CUDA_R_32F)
    return failed("cublasLtMatmulDescCreate", CUBLAS_STATUS_NOT_SUPPORTED);
  return make("cublasLtMatmulDescCreate", made);
}
cublasStatus_t cublasLtMatmulDescDestroy(cublasLtMatmulDesc_t how) {
  return destroy("cublasLtMatmulDescDestroy", how);
}
cublasStatus_t cublasLtMatmulDescSetAttribute(cublasLtMatmulDesc_t how,
                                              cublasLtMatmulDescAttributes_t attribute, void const* value,
                                              std::size_t bytes) {
  auto const* const call = "cublasLtMatmulDescSetAttribute";
  if (auto const status = begin(call); status != CUBLAS_STATUS_SUCCESS) return status;
  auto const done = [&] {
    switch (attribute) {
    case CUBLASLT_MATMUL_DESC_TRANSA:
      return set(how->transpose_a, value, bytes);
    case CUBLASLT_MATMUL_DESC_TRANSB:
      return set(how->transpose_b, value, bytes);
    case CUBLASLT_MATMUL_DESC_EPILOGUE:
      return set(how->epilogue, value, bytes);
    case CUBLASLT_MATMUL_DESC_BIAS_POINTER:
      return set(how->bias, value, bytes);
    case CUBLASLT_MATMUL_DESC_EPILOGUE_AUX_POINTER:
      return set(how->aux, value, bytes);
    case CUBLASLT_MATMUL_DESC_EPILOGUE_AUX_LD:
      return set(how->aux_leading, value, bytes);
    }
    return false;
  }();
  return done ? CUBLAS_STATUS_SUCCESS : failed(call, CUBLAS_STATUS_INVALID_VALUE);
}

cublasStatus_t cublasLtMatrixLayoutCreate(cublasLtMatrixLayout_t* made, cudaDataType type, std::uint64_t rows,
                                          std::uint64_t columns, std::int64_t leading) {
  return make("cublasLtMatrixLayoutCreate", made, type, static_cast<std::int64_t>(rows),
              static_cast<std::int64_t>(columns), leading);
}
cublasStatus_t cublasLtMatrixLayoutDestroy(cublasLtMatrixLayout_t of) {
  return destroy("cublasLtMatrixLayoutDestroy", of);
}
cublasStatus_t cublasLtMatrixLayoutSetAttribute(cublasLtMatrixLayout_t of,
                                                cublasLtMatrixLayoutAttribute_t attribute, void const* value,
                                                std::size_t bytes) {
  auto const* const call = "cublasLtMatrixLayoutSetAttribute";
  if (auto const status = begin(call); status != CUBLAS_STATUS_SUCCESS) return status;
  auto const done = attribute == CUBLASLT_MATRIX_LAYOUT_BATCH_COUNT            ? set(of->batch, value, bytes)
                    : attribute == CUBLASLT_MATRIX_LAYOUT_STRIDED_BATCH_OFFSET ? set(of->next, value, bytes)
                                                                               : false;
  return done ? CUBLAS_STATUS_SUCCESS : failed(call, CUBLAS_STATUS_INVALID_VALUE);
}

cublasStatus_t cublasLtMatmulPreferenceCreate(cublasLtMatmulPreference_t* made) {
  return make("cublasLtMatmulPreferenceCreate", made);
}
cublasStatus_t cublasLtMatmulPreferenceDestroy(cublasLtMatmulPreference_t wish) {
  return destroy("cublasLtMatmulPreferenceDestroy", wish);
}
cublasStatus_t cublasLtMatmulPreferenceSetAttribute(cublasLtMatmulPreference_t wish,
                                                    cublasLtMatmulPreferenceAttributes_t attribute,
                                                    void const* value, std::size_t bytes) {
  auto const* const call = "cublasLtMatmulPreferenceSetAttribute";
  if (auto const status = begin(call); status != CUBLAS_STATUS_SUCCESS) return status;
  auto const done = [&] {
    switch (attribute) {
    case CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES:
      return set(wish->workspace_bytes, value, bytes);
    case CUBLASLT_MATMUL_PREF_REDUCTION_SCHEME_MASK:
      return set(wish->reductions, value, bytes);
    case CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_A_BYTES:
      return set(wish->alignment[0], value, bytes);
    case CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_B_BYTES:
      return set(wish->alignment[1], value, bytes);
    case CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_C_BYTES:
      return set(wish->alignment[2], value, bytes);
    case CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_D_BYTES:
      return set(wish->alignment[3], value, bytes);
    }
    return false;
  }();
  return done ? CUBLAS_STATUS_SUCCESS : failed(call, CUBLAS_STATUS_INVALID_VALUE);
}

cublasStatus_t cublasLtMatmulAlgoGetHeuristic(cublasLtHandle_t handle, cublasLtMatmulDesc_t how,
                                              cublasLtMatrixLayout_t a, cublasLtMatrixLayout_t b,
                                              cublasLtMatrixLayout_t c, cublasLtMatrixLayout_t d,
                                              cublasLtMatmulPreference_t wish, int wanted,
                                              cublasLtMatmulHeuristicResult_t results[], int* found) {
  auto const* const call = "cublasLtMatmulAlgoGetHeuristic";
  if (auto const status = begin(call); status != CUBLAS_STATUS_SUCCESS) return status;
  if (handle == nullptr || wish == nullptr || wanted < 1 || results == nullptr || found == nullptr)
    return failed(call, CUBLAS_STATUS_INVALID_VALUE);
  *found = 0;
  auto const status = check(*how, *a, *b, *c, *d);
  if (status == CUBLAS_STATUS_NOT_SUPPORTED) return status; // an answer that need not be an error
  if (status != CUBLAS_STATUS_SUCCESS) return failed(call, status);
  // Long sums are split, if there is a workspace for their parts and they are added in fp32.
  auto const k = how->transpose_a == CUBLAS_OP_T ? a->rows : a->columns;
  auto const split = k > 24 && wish->workspace_bytes >= 512 &&
                     (wish->reductions & CUBLASLT_REDUCTION_SCHEME_COMPUTE_TYPE) != 0;
  chosen choice{hash_of(*how, *a, *b, *d), {}, 0, 0, split ? 512u : 0u};
  for (int i = 0; i < 4; ++i) choice.alignment[i] = wish->alignment[i];
  choice.alignment_bias = alignment_of(how->bias);
  choice.alignment_aux = alignment_of(how->aux);
  results[0] = {};
  std::memcpy(&results[0].algo, &choice, sizeof choice);
  results[0].workspaceSize = choice.workspace_bytes;
  results[0].state = CUBLAS_STATUS_SUCCESS;
  *found = 1;
  return CUBLAS_STATUS_SUCCESS;
}

cublasStatus_t cublasLtMatmul(cublasLtHandle_t handle, cublasLtMatmulDesc_t how, void const* alpha,
                              void const* a, cublasLtMatrixLayout_t a_layout, void const* b,
                              cublasLtMatrixLayout_t b_layout, void const* beta, void const* c,
                              cublasLtMatrixLayout_t c_layout, void* d, cublasLtMatrixLayout_t d_layout,
                              cublasLtMatmulAlgo_t const* algorithm, void* workspace,
                              std::size_t workspace_bytes, cudaStream_t stream) {
  auto const* const call = "cublasLtMatmul";
  if (auto const status = begin(call); status != CUBLAS_STATUS_SUCCESS) return status;
  if (handle == nullptr || a == nullptr || b == nullptr || d == nullptr || algorithm == nullptr || c != d)
    return failed(call, CUBLAS_STATUS_INVALID_VALUE);
  if (auto const status = check(*how, *a_layout, *b_layout, *c_layout, *d_layout);
      status != CUBLAS_STATUS_SUCCESS)
    return failed(call, status);
  chosen choice;
  std::memcpy(&choice, algorithm, sizeof choice);
  if (choice.shape != hash_of(*how, *a_layout, *b_layout, *d_layout))
    return failed(call, CUBLAS_STATUS_INVALID_VALUE);
  if (handle->device != cuda_emulation::device_of(stream)) return failed(call, CUBLAS_STATUS_ARCH_MISMATCH);
  void const* const pointers[] = {a, b, c, d};
  for (int i = 0; i < 4; ++i)
    if (alignment_of(pointers[i]) < choice.alignment[i]) {
      cuda_emulation::record_fault(
          fault_kind::misaligned, handle->device,
          "cublasLtMatmul: a matrix is aligned to " + std::to_string(alignment_of(pointers[i])) +
              " bytes, its algorithm was chosen for " + std::to_string(choice.alignment[i]));
      return failed(call, CUBLAS_STATUS_INVALID_VALUE);
    }
  if (alignment_of(how->bias) < choice.alignment_bias || alignment_of(how->aux) < choice.alignment_aux)
    return failed(call, CUBLAS_STATUS_INVALID_VALUE);
  if (choice.workspace_bytes > 0 &&
      (workspace == nullptr || workspace_bytes < choice.workspace_bytes || alignment_of(workspace) < 16))
    return failed(call, CUBLAS_STATUS_INVALID_VALUE);

  ++products;
  if (how->epilogue != CUBLASLT_EPILOGUE_DEFAULT) ++with_epilogue;
  matrices += d_layout->batch;
  product const work{*how,
                     *a_layout,
                     *b_layout,
                     *d_layout,
                     static_cast<double>(*static_cast<float const*>(alpha)),
                     static_cast<double>(*static_cast<float const*>(beta)),
                     a,
                     b,
                     d,
                     workspace,
                     static_cast<std::size_t>(choice.workspace_bytes)};
  auto const started = cuda_emulation::enqueue(stream, call, [work] {
    work.run();
    return true;
  });
  return started == cudaSuccess ? CUBLAS_STATUS_SUCCESS : failed(call, CUBLAS_STATUS_EXECUTION_FAILED);
}
