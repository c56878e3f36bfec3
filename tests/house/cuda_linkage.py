"""Kernels belong to the library that they are compiled into: two shared libraries that launch the same kernel, built
for different GPUs, show no symbol of it, and their functions bear different names."""
import sys

from house import ROOT, build, check_run, not_run

this_build = build()
if not this_build.nvcc:
    not_run("this build is without cuda")
folder = this_build.scratch("cuda_linkage")
(folder / "library.cu").write_text("""#include <tessera/ops/cuda/scale.cuh>
using namespace tessera;
extern "C" void halve(float* x, long n) {
  exec::cuda ex;
  view<float, 1, exec::cuda_memory> values(x, {n});
  ops::scale(ex, values, values, 0.5f);
  ex.synchronize();
}
""")


def symbols(architecture, *options):
    library = folder / f"lib{architecture}.so"
    check_run([this_build.nvcc, "-std=c++20", "--expt-relaxed-constexpr", f"-I{ROOT}/include", "-DTESSERA_WITH_CUDA",
               f"-DTESSERA_CUDA_ARCH_TAG=_sm{architecture}", f"-arch=sm_{architecture}", "-shared",
               "-Xcompiler=-fPIC", *options, folder / "library.cu", "-o", library])
    lines = check_run(["nm", "-DC", "--defined-only", library]).splitlines()
    everything = check_run(["nm", "-C", "--defined-only", library])
    return [line.split(maxsplit=2)[2] for line in lines], everything


shown = {}
for architecture in 80, 90:
    names, everything = symbols(architecture)
    if "halve" not in names:
        sys.exit(f"the library does not export its function: {names}")
    stubs = [n for n in names if "kernel" in n or "__device_stub" in n]
    if stubs:
        sys.exit(f"kernels are seen from outside: {stubs}")
    if "__device_stub" not in everything and "kernel" not in everything:
        sys.exit("this test does not see a kernel at all")
    shown[architecture] = {n for n in names if "tessera::" in n}
# Exceptions and what else bears the version alone may be shared.
common = {n for n in shown[80] & shown[90] if "_sm" in n or "::exec::" in n}
if common:
    sys.exit(f"two libraries would share {sorted(common)[:5]}")
print(f"{len(shown[80])} and {len(shown[90])} symbols, none of a kernel, none in common")
