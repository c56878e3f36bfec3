"""A room includes only the rooms below it, and another library's header is included in one place."""
import re

from house import includes, judge

CORE = {"core"}
BELOW_NN = {"ops", "layout", "exec", "core"}
BELOW_PARALLEL = BELOW_NN | {"comm", "partition", "nn", "optim", "moe", "lora"}
ROOMS = {
    "core": set(),
    "layout": CORE,
    "exec": CORE,
    "ops": {"exec", "core"},
    "comm": CORE,
    "partition": {"comm"} | BELOW_NN,
    "io": {"layout", "core"},
    "data": {"io", "layout", "core"},
    "optim": BELOW_NN,
    "nn": BELOW_NN,
    "moe": {"nn", "partition", "comm"} | BELOW_NN,
    "lora": {"nn", "partition", "comm"} | BELOW_NN,
    "parallel": BELOW_PARALLEL,
    "train": BELOW_PARALLEL | {"parallel", "io", "data"},
}
# Rooms that a few files may include although their room may not: NCCL works in streams.
EXTRA = {r"comm/((detail|cuda)/)?nccl\w*\.(hpp|cuh)": {"exec"}}

# Models of one concept never include each other.
MODELS = [
    {"comm/self.hpp", "comm/threads.hpp", "comm/mpi.hpp", "comm/nccl.hpp"},
    {"exec/host.hpp", "exec/cuda.hpp"},
]

# Each library's headers, and the only place they are included in.
ELSEWHERE = {
    r"mpi\.h": r"comm/mpi\.hpp",
    r"dnnl.*|oneapi/.*": r"ops/host/detail/.*",
    r"nlohmann/.*": r"io/json\.hpp",
    r"xxhash\.h": r"io/checksum\.hpp",
    r"sentencepiece.*": r"data/sentencepiece\.hpp",
    r"CLI/.*": r"train/command_line\.hpp",
    r"omp\.h": r"exec/host\.hpp",
    r"nccl\.h": r"comm/(detail/)?nccl\w*\.hpp",
    r"cuda_runtime.*": r"exec/detail/cuda_api\.hpp|exec/device\.cuh",
    r"cuda_(bf16|fp16)\.h|mma\.h": r"exec/device\.cuh",
    r"nvtx3/.*": r"exec/cuda\.hpp",
    r"cublas.*": r"ops/cuda/detail/.*",
    r"cub/.*": r".*\.cuh",
    r"(cuda|cooperative_groups|thrust|nv|cute|cutlass).*": r"$.",
    r"doctest.*|benchmark/.*|boost/.*|fmt/.*": r"$.",
    # The operating system's: files, mappings, terminals, processes.
    r"(sys/.*|unistd|fcntl|dirent|termios|signal|poll|pthread|sched)\.h|sys/.*": r"(io|train|data)/.*|core/memory\.hpp|comm/detail/.*",
}
# The standard headers that cost the most stay out of what other people's programs include.
HEAVY = {"memory", "functional", "ranges", "iostream", "chrono", "random", "regex", "filesystem", "sstream"}
LIGHT_PLACES = r"core/.*|layout/.*|comm/mpi\.hpp|comm/communicator\.hpp"


def rule(tree):
    found = []
    for path, text in tree.headers().items():
        name = path[len("include/tessera/"):]
        room = name.split("/")[0] if "/" in name else None
        if room and room not in ROOMS:
            found.append(f"{path}: '{room}' is no room of the house (tests/house/rooms.py has the list)")
            continue
        for line, included in includes(text):
            at = f"{path}:{line}: "
            if '"' in text.splitlines()[line - 1]:
                found.append(at + "headers are included as <...>")
            if included.startswith("tessera/"):
                target = included[len("tessera/"):]
                other = target.split("/")[0]
                if "include/" + included not in tree:
                    found.append(at + f"<{included}> does not exist")
                elif room is None:
                    if name.endswith(".hpp") and target.endswith(".cuh") and "__CUDACC__" not in text:
                        found.append(at + "a .hpp needs only a C++20 compiler, and a .cuh needs nvcc")
                elif other != room and other not in ROOMS[room].union(*(rooms for files, rooms in EXTRA.items()
                                                                        if re.fullmatch(files, name))):
                    found.append(at + f"{room}/ must not include {other}/")
                elif other != room and re.search(r"/(detail|host|cuda)/", target):
                    found.append(at + f"<{included}> is for {other}/ only")
                elif name.endswith(".hpp") and target.endswith(".cuh"):
                    found.append(at + "a .hpp needs only a C++20 compiler, and a .cuh needs nvcc")
                elif any({name, target} <= models and name != target for models in MODELS):
                    found.append(at + "two models of one concept know each other")
            else:
                for library, place in ELSEWHERE.items():
                    if re.fullmatch(library, included):
                        if not re.fullmatch(place, name):
                            found.append(at + f"<{included}> is included in {place} only")
                        break
                if included in HEAVY and re.fullmatch(LIGHT_PLACES, name):
                    found.append(at + f"<{included}> is too heavy for this place")
    return found


def planted(path, include):
    return lambda tree: tree.having(path, f"#include {include}\n")


judge(rule, {
    "a room that includes one above": planted("include/tessera/core/x.hpp", "<tessera/core/view.hpp>\n#include <tessera/exec/host.hpp>"),
    "a room beside": planted("include/tessera/optim/x.hpp", "<tessera/nn/unit.hpp>"),
    "another room's detail": lambda tree: tree.having("include/tessera/ops/detail/y.hpp", "").having(
        "include/tessera/nn/x.hpp", "#include <tessera/ops/detail/y.hpp>\n"),
    "a room that does not exist": planted("include/tessera/utils/x.hpp", "<vector>"),
    "a header that does not exist": planted("include/tessera/nn/x.hpp", "<tessera/core/nothing.hpp>"),
    "a second include of mpi.h": planted("include/tessera/comm/x.hpp", "<mpi.h>"),
    "oneDNN in a front door": planted("include/tessera/ops/x.hpp", "<dnnl.hpp>"),
    "cuBLASLt in a front door": planted("include/tessera/ops/x.hpp", "<cublasLt.h>"),
    "the CUDA runtime in a kernel": planted("include/tessera/ops/cuda/x.cuh", "<cuda_runtime.h>"),
    "CUB in a host header": planted("include/tessera/ops/x.hpp", "<cub/block/block_reduce.cuh>"),
    "cooperative groups": planted("include/tessera/ops/cuda/x.cuh", "<cooperative_groups.h>"),
    "a kernel in a host header": lambda tree: tree.having("include/tessera/ops/y.cuh", "").having(
        "include/tessera/ops/x.hpp", "#include <tessera/ops/y.cuh>\n"),
    "json outside of io": planted("include/tessera/train/x.hpp", "<nlohmann/json.hpp>"),
    "a heavy standard header in core": planted("include/tessera/core/x.hpp", "<memory>"),
    "models that include each other": lambda tree: tree.having("include/tessera/comm/self.hpp", "").having(
        "include/tessera/comm/threads.hpp", "#include <tessera/comm/self.hpp>\n"),
    "quotes": planted("include/tessera/core/x.hpp", '"tessera/core/view.hpp"'),
})
