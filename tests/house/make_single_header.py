"""Writes the headers that are made from the others: include/tessera/tessera.hpp, which includes every public header,
include/tessera/cuda.cuh, which includes all that a CUDA program needs besides, and single_include/tessera.hpp, in
which each of them stands in its place.

usage: make_single_header.py
"""
import pathlib
import re

ROOT = pathlib.Path(__file__).resolve().parents[2]
ROOMS = ["core", "layout", "exec", "ops", "comm", "partition", "io", "data", "optim", "nn", "moe", "lora", "parallel",
         "train"]
# Headers that whoever includes them by name wants in any case, and the umbrella only where the library is there.
NEEDS = {"tessera/comm/mpi.hpp": "TESSERA_WITH_MPI", "tessera/comm/nccl.hpp": "TESSERA_WITH_NCCL"}
INCLUDE = re.compile(r"\s*#\s*include\s*<(tessera/[^>]+)>")
# A header all of which stands under a condition, such as those that need MPI.
WHOLLY_CONDITIONAL = re.compile(r"#define TESSERA_\w+_(?:HPP|CUH)\n(?:\s*\n|#include [^\n]*\n)*#if defined\(")


def umbrella(headers):
    """tessera.hpp for the given names, such as `tessera/core/view.hpp`."""
    text = """/// All of Tessera's host side. Each header is as usable alone, and a program that needs a few of them
/// compiles faster with those. Headers that need another library are empty unless TESSERA_WITH_MPI,
/// TESSERA_WITH_JSON and their like say that it is there.
///
/// Made by tests/house/make_single_header.py.
#ifndef TESSERA_TESSERA_HPP
#define TESSERA_TESSERA_HPP
"""
    for room in ROOMS:
        # Those under a condition last: what they share with the others then stands once, outside it.
        names = sorted((h for h in headers if h.startswith(f"tessera/{room}/")
                        and not re.search(r"/(detail|host|cuda)/", h)), key=lambda h: (h in NEEDS, h))
        if names:
            text += "\n" + "".join(f"#include <{name}>\n" if name not in NEEDS else
                                   f"#if defined({NEEDS[name]})\n#include <{name}>\n#endif\n" for name in names)
    return text + """
#if defined(TESSERA_WITH_CUDA) && defined(__CUDACC__)
#include <tessera/cuda.cuh>
#endif

#endif
"""


def cuda_umbrella(headers, read):
    """cuda.cuh: kernels and whatever needs the CUDA toolkit. Single operations come by ops/cuda/NAME.cuh too."""
    text = """/// All of Tessera's CUDA side, for .cu files. A single operation comes by its own header, such as
/// <tessera/ops/cuda/gelu.cuh>, and compiles faster.
///
/// Made by tests/house/make_single_header.py.
#ifndef TESSERA_CUDA_CUH
#define TESSERA_CUDA_CUH
"""
    needs_toolkit = re.compile(r"#define TESSERA_\w+_HPP\n\s*#if defined\(TESSERA_WITH_CUDA\)")
    for room in ROOMS:
        names = sorted(h for h in headers if h.startswith(f"tessera/{room}/") and "/detail/" not in h
                       and (h.endswith(".cuh") or needs_toolkit.search(read(h))))
        if names:
            text += "\n" + "".join(f"#include <{name}>\n" if "/nccl" not in name else
                                   f"#if defined(TESSERA_WITH_NCCL)\n#include <{name}>\n#endif\n" for name in names)
    return text + "\n#endif\n"


def expand(name, emitted, read, under, certain=True):
    """The lines of a header with those of the headers it includes in their places. `emitted` holds the names that
    every reader of this place has seen, and grows. What is first met under a condition counts as seen only there
    and where the very condition stands again (`under`: condition -> names): elsewhere it is put in again where it is
    needed next, and its include guard, which is kept, makes one count."""
    emitted.add(name)
    text = read(name)
    lines = []
    if certain and name != "tessera/tessera.hpp" and WHOLLY_CONDITIONAL.search(text):
        for included in (m.group(1) for m in map(INCLUDE.match, text.splitlines()) if m):
            if included not in emitted:
                lines += expand(included, emitted, read, under)
    depth = 0
    seen = emitted
    condition = None
    for line in text.splitlines():
        match = INCLUDE.match(line)
        if re.match(r"\s*#\s*if", line) and not re.match(r"#ifndef TESSERA_\w+_(HPP|CUH)$", line):
            depth += 1
            if depth == 1:
                condition = " ".join(line.split())
                seen = emitted | under.get(condition, set())
        elif re.match(r"\s*#\s*el", line) and depth == 1:
            condition = None
            seen = set(emitted)
        elif re.match(r"\s*#\s*endif\b", line) and depth > 0:
            depth -= 1
            seen = emitted if depth == 0 else seen
        if not match:
            lines.append(line)
        elif match.group(1) not in seen:
            before = set(seen)
            lines += expand(match.group(1), seen, read, under, certain and depth == 0)
            if certain and depth == 1 and condition:
                under.setdefault(condition, set()).update(seen - before)
    return lines


def single_header(read):
    text = "\n".join(expand("tessera/tessera.hpp", set(), read, {})) + "\n"
    licence = (ROOT / "LICENSE").read_text().strip()
    return ("// Tessera in one file, made by tests/house/make_single_header.py from include/tessera/. Do not edit.\n//\n"
            + "".join(f"// {line}".rstrip() + "\n" for line in licence.splitlines())
            + "\n" + re.sub(r"\n{3,}", "\n\n", text))


def present():
    """The files as they should be: path -> text."""
    include = ROOT / "include"
    names = sorted(str(p.relative_to(include)) for p in (include / "tessera").rglob("*.[hc][pu][ph]"))
    made = {"tessera/tessera.hpp": umbrella([n for n in names if n.endswith(".hpp")])}

    def read(name):
        return made[name] if name in made else (include / name).read_text()

    made["tessera/cuda.cuh"] = cuda_umbrella(names, read)
    return {**{f"include/{name}": text for name, text in made.items()},
            "single_include/tessera.hpp": single_header(read)}


if __name__ == "__main__":
    for path, text in present().items():
        (ROOT / path).parent.mkdir(exist_ok=True)
        (ROOT / path).write_text(text)
