"""tests/ and bench/ mirror include/tessera/: each header has its test, and no test or benchmark is an orphan."""
import re

from house import includes, is_inner, judge

# Headers that are tested where they are used.
TESTED_ELSEWHERE = {
    "include/tessera/tessera.hpp": "includes the others; tests/house/single_header.py and tests/compile",
    "include/tessera/cuda.cuh": "includes the others; tests/compile/cuda",
    "include/tessera/comm/communicator.hpp": "a concept; each model runs tests/comm/conformance.hpp",
    "include/tessera/comm/nccl.hpp": "tests/comm/cuda/nccl.cu",
    "include/tessera/exec/space.hpp": "a concept; tests/misuse/space_fail.cpp",
    "include/tessera/core/version.hpp": "tests/house/version.py",
    "include/tessera/core/abi.hpp": "tests/house/abi.py",
}
# Rooms of tests that mirror no room of the library.
OTHER_TESTS = r"tests/(house|support|consumers|misuse|compile|reference|data_files|examples|cuda_emulation)/"
OTHER_BENCH = r"bench/(support/|[^/]+$)"
# Whole programs under test rather than a header.
WITHOUT_HEADER = {
    "tests/train/cuda/step.cu",
    "tests/train/cuda/step_bf16.cu",
    "tests/train/cuda/trainer.cu",
    "tests/parallel/activation_bytes.cpp",
    "tests/parallel/invariant.cpp",
    "tests/parallel/layouts.cpp",
    "tests/parallel/layouts_mpi.cpp",
    "tests/parallel/model_group_slopes.cpp",
    "tests/parallel/cuda/model_group.cu",
    "tests/parallel/cuda/context_attention.cu",
    "tests/parallel/cuda/overlapped_linear.cu",
    "tests/parallel/cuda/pipeline.cu",
    "tests/parallel/cuda/zero.cu",
    "tests/comm/mpi_calls.cpp",
    "tests/partition/cuda/redistribute.cu",
    "tests/partition/redistribute_mpi.cpp",
    "tests/ops/cuda/elementary.cu",
}


def rule(tree):
    found = []
    headers = {p for p in tree.headers() if p.endswith((".hpp", ".cuh"))}
    sources = {p for p in tree if p.startswith(("tests/", "bench/")) and re.search(r"\.(cpp|cu)$", p)}

    for path in sorted(headers):
        # What needs CUDA is tested in a .cu, which runs under emulation and on devices.
        stem = re.sub(r"\.(hpp|cuh)$", "", path.replace("include/tessera/", "tests/"))
        test = stem + (".cu" if path.endswith(".cuh") or stem + ".cu" in sources else ".cpp")
        inner = is_inner(path) and not re.search(r"/cuda/[^/]*$", path)
        if test not in sources and not inner and path not in TESTED_ELSEWHERE:
            found.append(f"{path}: has no test {test}")
        # An operation is there for the host and for CUDA.
        if "/host/" in path and path.count("/") == 4:
            other = re.sub(r"\.hpp$", ".cuh", path.replace("/host/", "/cuda/"))
            if other not in headers:
                found.append(f"{path}: there is no {other}")
        if test in sources and path in TESTED_ELSEWHERE:
            found.append(f"{path}: is listed as tested elsewhere and has a test of its own")
    for path in TESTED_ELSEWHERE:
        if path not in headers:
            found.append(f"{path}: is listed in tests/house/mirror.py and does not exist")
    for path in sorted(sources):
        if re.match(OTHER_TESTS, path) or re.match(OTHER_BENCH, path) or path in WITHOUT_HEADER:
            continue
        if path.count("/") < 2 and path.startswith("tests/"):
            found.append(f"{path}: stands in no room")
            continue
        stem = re.sub(r"\.\w+$", "", re.sub(r"^(tests|bench)/", "include/tessera/", path))
        named = {stem + ".hpp", stem + ".cuh"} if path.endswith(".cu") else {stem + ".hpp"}
        # Each .cu shows that its header needs no other in front of it.
        first = next((name for _, name in includes(tree[path]) if name.startswith("tessera/")), None)
        if path.endswith(".cu") and named & headers and f"include/{first}" not in named:
            found.append(f"{path}: its first include is not its header")
        if not named & headers:
            found.append(f"{path}: there is no header of that name")
    return found


judge(rule, {
    "a header without a test": lambda tree: tree.having("include/tessera/core/untested.hpp", ""),
    "a kernel without a test": lambda tree: tree.having("include/tessera/ops/cuda/untested.cuh", ""),
    "an operation without its CUDA side": lambda tree: tree.having("include/tessera/ops/host/planted.hpp", ""),
    "a test that includes another header first": lambda tree: tree.having(
        "tests/exec/launch.cu", "#include <tessera/exec/host.hpp>\n#include <tessera/exec/launch.cuh>\n"),
    "an orphan among the tests": lambda tree: tree.having("tests/core/orphan.cpp", ""),
    "an orphan among the benchmarks": lambda tree: tree.having("bench/ops/orphan.cpp", ""),
})
