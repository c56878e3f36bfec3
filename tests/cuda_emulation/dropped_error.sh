#!/bin/bash
# dropped_error.sh COMPILER INCLUDE_FOLDER: CUDA's return codes cannot be dropped where the emulation is compiled
# with -Werror, as all tests are.
compile() {
  printf '#include <cuda_runtime.h>\nvoid f(float* p) { %s }\n' "$2" |
    "$1" -std=c++20 -Werror -I"$folder" -x c++ -fsyntax-only - 2>&1
}
folder=$2
compile "$1" 'if (cudaFree(p) != cudaSuccess) throw 1;' || { echo "the right code does not compile"; exit 1; }
for call in 'cudaFree(p);' 'cudaMemset(p, 0, 4);' 'cudaMalloc(&p, 4);' 'cudaDeviceSynchronize();' \
            'cudaLaunchConfig_t c{}; cudaLaunchKernelEx(&c, f, p);'; do
  message=$(compile "$1" "$call") && { echo "this compiles: $call"; exit 1; }
  grep -q 'nodiscard' <<< "$message" || { echo "$message"; exit 1; }
done
