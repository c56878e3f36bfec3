// The emulated cuBLASLt refuses, or records as faults, what the real one is not to be asked.
#include "fixture.hpp"

#include <cublasLt.h>

using namespace fixture;

namespace {

/// c[m, n] = a[m, k] b[k, n] of floats, columns adjacent, with everything that a call needs.
struct call {
  cublasLtHandle_t library{};
  cublasLtMatmulDesc_t operation{};
  cublasLtMatrixLayout_t a{}, b{}, c{};
  cublasLtMatmulPreference_t preference{};
  cublasLtMatmulHeuristicResult_t found{};
  int count = 0;

  call(std::uint64_t m, std::uint64_t n, std::uint64_t k, std::int64_t leading_c,
       cudaDataType type_b = CUDA_R_32F) {
    REQUIRE(cublasLtCreate(&library) == CUBLAS_STATUS_SUCCESS);
    REQUIRE(cublasLtMatmulDescCreate(&operation, CUBLAS_COMPUTE_32F, CUDA_R_32F) == CUBLAS_STATUS_SUCCESS);
    REQUIRE(cublasLtMatrixLayoutCreate(&a, CUDA_R_32F, m, k, static_cast<std::int64_t>(m)) ==
            CUBLAS_STATUS_SUCCESS);
    REQUIRE(cublasLtMatrixLayoutCreate(&b, type_b, k, n, static_cast<std::int64_t>(k)) ==
            CUBLAS_STATUS_SUCCESS);
    REQUIRE(cublasLtMatrixLayoutCreate(&c, CUDA_R_32F, m, n, leading_c) == CUBLAS_STATUS_SUCCESS);
    REQUIRE(cublasLtMatmulPreferenceCreate(&preference) == CUBLAS_STATUS_SUCCESS);
  }
  call(call const&) = delete;
  call& operator=(call const&) = delete;
  ~call() {
    (void)cublasLtMatmulPreferenceDestroy(preference);
    for (auto matrix : {a, b, c}) (void)cublasLtMatrixLayoutDestroy(matrix);
    (void)cublasLtMatmulDescDestroy(operation);
    (void)cublasLtDestroy(library);
  }

  template <class T>
  void set(cublasLtMatmulDescAttributes_t attribute, T value) {
    REQUIRE(cublasLtMatmulDescSetAttribute(operation, attribute, &value, sizeof value) ==
            CUBLAS_STATUS_SUCCESS);
  }
  void aligned_to(std::uint32_t bytes) {
    for (auto which :
         {CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_A_BYTES, CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_B_BYTES,
          CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_C_BYTES, CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_D_BYTES})
      REQUIRE(cublasLtMatmulPreferenceSetAttribute(preference, which, &bytes, sizeof bytes) ==
              CUBLAS_STATUS_SUCCESS);
  }
  cublasStatus_t choose() {
    return cublasLtMatmulAlgoGetHeuristic(library, operation, a, b, c, c, preference, 1, &found, &count);
  }
  cublasStatus_t run(float const* x, float const* y, float* z, float beta = 0) {
    float const one = 1;
    return cublasLtMatmul(library, operation, &one, x, a, y, b, &beta, z, c, z, c, &found.algo, nullptr, 0,
                          nullptr);
  }
};

} // namespace

TEST_CASE("a product is that of the definition, columns adjacent") {
  finds_nothing([] {
    call p(2, 2, 3, 5);
    array<float> const a(counting(6)), b(counting(6)), c(std::vector<float>(10, -1));
    REQUIRE(p.choose() == CUBLAS_STATUS_SUCCESS);
    REQUIRE(p.count == 1);
    CHECK(p.run(a.data(), b.data(), c.data()) == CUBLAS_STATUS_SUCCESS);
    // a = [0 2 4; 1 3 5], b = [0 3; 1 4; 2 5]
    CHECK(c.values() == std::vector<float>{10, 13, -1, -1, -1, 28, 40, -1, -1, -1});
    CHECK(p.run(a.data(), b.data(), c.data(), 1) == CUBLAS_STATUS_SUCCESS);
    CHECK(c.values() == std::vector<float>{20, 26, -1, -1, -1, 56, 80, -1, -1, -1});
  });
}

TEST_CASE("operands that nobody wrote, and results outside their memory, are found") {
  array<float> const a(counting(6)), b(counting(6)), unwritten(6), c(4);
  finds(
      [&] {
        call p(2, 2, 3, 2);
        REQUIRE(p.choose() == CUBLAS_STATUS_SUCCESS);
        CHECK(p.run(a.data(), unwritten.data(), c.data()) == CUBLAS_STATUS_SUCCESS);
      },
      "unwritten", "cublasLtMatmul: B");
  finds(
      [&] {
        call p(2, 2, 3, 2);
        REQUIRE(p.choose() == CUBLAS_STATUS_SUCCESS);
        CHECK(p.run(a.data(), b.data(), c.data(), 1) == CUBLAS_STATUS_SUCCESS); // adds to what is not there
      },
      "unwritten", "cublasLtMatmul: C");
  finds(
      [&] {
        call p(2, 2, 3, 40); // the second column lies beyond
        REQUIRE(p.choose() == CUBLAS_STATUS_SUCCESS);
        CHECK(p.run(a.data(), b.data(), c.data()) == CUBLAS_STATUS_SUCCESS);
      },
      "bounds", "cublasLtMatmul: D");
}

TEST_CASE("an algorithm is not for matrices less aligned than it was chosen for, nor for another shape") {
  array<float> const a(counting(16)), b(counting(16)), c(16);
  finds(
      [&] {
        call p(2, 2, 3, 2); // 256 bytes, if nothing else is said
        REQUIRE(p.choose() == CUBLAS_STATUS_SUCCESS);
        CHECK(p.run(a.data() + 1, b.data(), c.data()) == CUBLAS_STATUS_INVALID_VALUE);
      },
      "misaligned", "chosen for 256");
  finds_nothing([&] {
    call p(2, 2, 3, 2);
    p.aligned_to(4);
    REQUIRE(p.choose() == CUBLAS_STATUS_SUCCESS);
    CHECK(p.run(a.data() + 1, b.data() + 3, c.data() + 5) == CUBLAS_STATUS_SUCCESS);
    p.set(CUBLASLT_MATMUL_DESC_TRANSA, CUBLAS_OP_N);
    call other(2, 1, 3, 2);
    other.found = p.found;
    CHECK(other.run(a.data(), b.data(), c.data()) == CUBLAS_STATUS_INVALID_VALUE);
  });
}

TEST_CASE("types, leading dimensions and epilogues that cuBLASLt does not take are refused") {
  finds_nothing([] {
    call short_columns(4, 2, 3, 3);
    CHECK(short_columns.choose() == CUBLAS_STATUS_INVALID_VALUE);
    call mixed(2, 2, 3, 2, CUDA_R_16BF);
    CHECK(mixed.choose() == CUBLAS_STATUS_NOT_SUPPORTED);
    CHECK(mixed.count == 0);

    array<float> const vector(counting(64));
    call with_bias(2, 2, 3, 2);
    with_bias.set(CUBLASLT_MATMUL_DESC_EPILOGUE, CUBLASLT_EPILOGUE_BIAS);
    CHECK(with_bias.choose() == CUBLAS_STATUS_INVALID_VALUE); // no vector
    with_bias.set(CUBLASLT_MATMUL_DESC_BIAS_POINTER, static_cast<void const*>(vector.data() + 1));
    CHECK(with_bias.choose() == CUBLAS_STATUS_NOT_SUPPORTED); // not aligned to 16 bytes
    with_bias.set(CUBLASLT_MATMUL_DESC_BIAS_POINTER, static_cast<void const*>(vector.data() + 4));
    CHECK(with_bias.choose() == CUBLAS_STATUS_SUCCESS);

    call with_aux(2, 2, 3, 2);
    with_aux.set(CUBLASLT_MATMUL_DESC_EPILOGUE, CUBLASLT_EPILOGUE_GELU_AUX);
    with_aux.set(CUBLASLT_MATMUL_DESC_EPILOGUE_AUX_POINTER, static_cast<void const*>(vector.data()));
    for (std::int64_t leading : {0, 2, 12}) {
      with_aux.set(CUBLASLT_MATMUL_DESC_EPILOGUE_AUX_LD, leading);
      CHECK(with_aux.choose() == CUBLAS_STATUS_INVALID_VALUE); // not a multiple of 8
    }
    with_aux.set(CUBLASLT_MATMUL_DESC_EPILOGUE_AUX_LD, std::int64_t{8});
    CHECK(with_aux.choose() == CUBLAS_STATUS_SUCCESS);
    std::int32_t const four_bytes = 8; // of an attribute of eight
    CHECK(cublasLtMatmulDescSetAttribute(with_aux.operation, CUBLASLT_MATMUL_DESC_EPILOGUE_AUX_LD,
                                         &four_bytes, sizeof four_bytes) == CUBLAS_STATUS_INVALID_VALUE);
  });
}
