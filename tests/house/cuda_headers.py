"""Each kernel header compiles alone: under the emulation of CUDA (tests/cuda_emulation), by the host compiler. nvcc
sees all of them in tests/compile/cuda."""
import concurrent.futures
import os
import sys

from house import ROOT, build, read_tree, run

this_build = build()
options = ["-std=c++20", f"-I{ROOT}/tests/cuda_emulation/include", f"-I{ROOT}/include", "-DTESSERA_WITH_CUDA",
           "-DTESSERA_WITH_NCCL", "-Wall", "-Wextra", "-Werror", "-Wno-unknown-pragmas", "-fsyntax-only", "-x", "c++",
           "-"]


def fault(text):
    done = run([this_build.compiler, *options], input=text)
    return done.stderr[:3000] if done.returncode else ""


if fault("#include <cuda_runtime.h>\nvoid f(cudaStream_t);\n") or not fault("void f(cudaStream_t);\n"):
    sys.exit("this test does not see a header that needs another")
headers = [p[len("include/"):] for p in read_tree().headers() if p.endswith(".cuh")]
with concurrent.futures.ThreadPoolExecutor(os.cpu_count()) as pool:
    faults = [f"{h}:\n{f}" for h, f in zip(headers, pool.map(fault, (f"#include <{h}>\n" for h in headers))) if f]
print(f"{len(headers)} headers")
print("\n".join(faults))
sys.exit(1 if faults else 0)
