/// The namespace that every Tessera name stands in, and the few macros that the headers share.
///
/// `namespace tessera::inline TESSERA_ABI` carries the version and a tag for every compiler switch that
/// changes a function body (instruction set, OpenMP, CUDA architecture list). Two libraries of one process
/// that were built with different switches therefore hold different symbols and cannot mix. Exception types
/// stand in `TESSERA_STABLE_ABI`, which carries the version alone: they are caught across such a border.
#ifndef TESSERA_CORE_ABI_HPP
#define TESSERA_CORE_ABI_HPP

#include <tessera/core/version.hpp>

#define TESSERA_DETAIL_JOIN_(a, b, c, d) a##b##c##d
#define TESSERA_DETAIL_JOIN(a, b, c, d) TESSERA_DETAIL_JOIN_(a, b, c, d)

#define TESSERA_STABLE_ABI v0_1

#if defined(__AVX512F__)
#define TESSERA_DETAIL_ISA_TAG _avx512
#elif defined(__AVX2__)
#define TESSERA_DETAIL_ISA_TAG _avx2
#else
#define TESSERA_DETAIL_ISA_TAG
#endif

#if defined(_OPENMP)
#define TESSERA_DETAIL_OPENMP_TAG _omp
#else
#define TESSERA_DETAIL_OPENMP_TAG
#endif

/// Set by the build to a token such as `_sm90` where CUDA code is compiled; empty otherwise.
#ifndef TESSERA_CUDA_ARCH_TAG
#define TESSERA_CUDA_ARCH_TAG
#endif

#define TESSERA_ABI                                                                                          \
  TESSERA_DETAIL_JOIN(TESSERA_STABLE_ABI, TESSERA_DETAIL_ISA_TAG, TESSERA_DETAIL_OPENMP_TAG,                 \
                      TESSERA_CUDA_ARCH_TAG)

/// Marks what both host and device code may call.
#if defined(__CUDACC__)
#define TESSERA_HOST_DEVICE __host__ __device__
#else
#define TESSERA_HOST_DEVICE
#endif

/// `TESSERA_SIMD(reduction(+ : sum))` before a loop: vectorise it; the clause states which reorderings are
/// allowed. Nothing without OpenMP.
#if defined(_OPENMP)
#define TESSERA_DETAIL_PRAGMA(text) _Pragma(#text)
#define TESSERA_SIMD(...) TESSERA_DETAIL_PRAGMA(omp simd __VA_ARGS__)
#else
#define TESSERA_SIMD(...)
#endif

/// Types that must be recognised across shared libraries built with -fvisibility=hidden.
#if defined(__GNUC__)
#define TESSERA_VISIBLE __attribute__((visibility("default")))
#else
#define TESSERA_VISIBLE
#endif

#endif
