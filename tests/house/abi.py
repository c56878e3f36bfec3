"""Parts of one program that were compiled with other switches, or with another version of Tessera, are linked
together and each runs its own code; an error is caught across the border of a shared library."""
import re
import sys

from house import ROOT, build, check_run, find_compiler

this_build = build()
folder = this_build.scratch("abi")

(folder / "part.cpp").write_text("""#include <tessera/core/tensor.hpp>
#include <tessera/exec/host.hpp>
#define TEXT_(x) #x
#define TEXT(x) TEXT_(x)
/// The tag that this part was compiled under and a sum by its own loop.
extern "C" char const* PART(double& sum) {
  tessera::exec::host ex({.threads = 1});
  tessera::tensor<float, 1> x({1000});
  ex.parallel_for(1000, 1, [&](tessera::index_t begin, tessera::index_t end) {
    for (auto i = begin; i < end; ++i) x(i) = 0.5f;
  });
  sum = 0;
  for (auto value : x.span()) sum += value;
  return TEXT(TESSERA_ABI);
}
""")
avx2 = "avx2" in open("/proc/cpuinfo").read()
# name: compiler, switches
parts = {
    "plain": (this_build.compiler, ["-O0"]),
    "openmp": (this_build.compiler, ["-O2", "-fopenmp"]),
    "gpus": (this_build.compiler, ["-O1", "-DTESSERA_CUDA_ARCH_TAG=_sm80_90"]),
    "onednn_policy": (this_build.compiler, ["-O2", "-DTESSERA_WITH_ONEDNN"]),
    **({"avx2": (this_build.compiler, ["-O3", "-mavx2", "-mfma"])} if avx2 else {}),
    **({"clang": ("clang++", ["-O2"])} if find_compiler("clang++") else {}),
}
objects = []
for name, (compiler, switches) in parts.items():
    objects.append(folder / f"{name}.o")
    check_run([compiler, *this_build.bare, *switches, f"-DPART=part_{name}", "-c", folder / "part.cpp",
               "-o", objects[-1]])

# The same headers as another version would name them.
other = folder / "other/tessera"
for path in (ROOT / "include/tessera").rglob("*.hpp"):
    copy = other / path.relative_to(ROOT / "include/tessera")
    copy.parent.mkdir(parents=True, exist_ok=True)
    copy.write_text(re.sub(r"\bv0_1\b", "v9_9", path.read_text()))
parts["version"] = (this_build.compiler, [])
objects.append(folder / "version.o")
check_run([this_build.compiler, "-std=c++20", f"-I{folder}/other", "-DPART=part_version", "-c", folder / "part.cpp",
           "-o", objects[-1]])

(folder / "main.cpp").write_text(
    "#include <cstdio>\n"
    + "".join(f'extern "C" char const* part_{name}(double&);\n' for name in parts)
    + "int main() {\n  double sum = 0;\n"
    + "".join(f'  std::printf("{name} %s", part_{name}(sum));\n  std::printf(" %g\\n", sum);\n' for name in parts)
    + "}\n")
check_run([this_build.compiler, "-fopenmp", folder / "main.cpp", *objects, "-o", folder / "program"])
output = dict((line.split()[0], line.split()[1:]) for line in check_run([folder / "program"]).splitlines())
for name, (tag, total) in output.items():
    print(f"{name}: {tag} {total}")
    if total != "500":
        sys.exit(f"{name} adds up to {total}")
expected_tags = {"openmp": "_omp", "gpus": "_sm80_90", "avx2": "_avx2", "version": "v9_9"}
for name, piece in expected_tags.items():
    if name in output and (piece not in output[name][0] or output[name][0] == output["plain"][0]):
        sys.exit(f"{name} has the tag {output[name][0]}")

# Exceptions across a library with hidden symbols, built with other switches.
(folder / "library.cpp").write_text("""#include <tessera/core/tensor.hpp>
extern "C" __attribute__((visibility("default"))) void fail(long n) {
  tessera::tensor<float, 1> x({n});
}
""")
(folder / "catch.cpp").write_text("""#include <cstring>
#include <dlfcn.h>
#include <tessera/core/error.hpp>
int main(int, char** arguments) {
  void* library = dlopen(arguments[1], RTLD_NOW | RTLD_LOCAL);
  if (!library) return 2;
  auto fail = reinterpret_cast<void (*)(long)>(dlsym(library, "fail"));
  try {
    fail(-1);
  } catch (tessera::size_error const& caught) {
    if (std::strcmp(caught.id(), "E-core-001") != 0) return 3;
    try {
      fail(-1);
    } catch (tessera::error const&) {
      return 0;
    }
  }
  return 4;
}
""")
check_run([this_build.compiler, *this_build.bare, folder / "catch.cpp", "-o", folder / "catch", "-ldl"])
for name, (compiler, switches) in parts.items():
    if name == "version":
        continue
    library = folder / f"lib{name}.so"
    check_run([compiler, *this_build.bare, *switches, "-fPIC", "-shared", "-fvisibility=hidden",
               folder / "library.cpp", "-o", library])
    check_run([folder / "catch", library])
    exported = [line.split()[-1] for line in check_run(["nm", "-D", "--defined-only", library]).splitlines()]
    # Only exception types (their type information and tables) may be seen from outside.
    hidden = [s for s in exported if "tessera" in s and not re.match(r"_ZT[ISV]N?|_ZNK?7tessera4v0_1", s)]
    if hidden or "fail" not in exported:
        sys.exit(f"{library.name} shows {hidden}")
