"""TESSERA_WITH_* decide only what exists: the headers compile with any of them alone and any of them missing, and
the types that every build has are the same."""
import concurrent.futures
import os
import sys

from house import build, not_run, run

this_build = build()
switches = [f for f in this_build.everything if f.startswith("-DTESSERA_WITH_")]
others = [f for f in this_build.everything if f not in switches]
if not switches:
    not_run("this build has no optional part")
folder = this_build.scratch("subsets")

program = """#include <tessera/tessera.hpp>
using namespace tessera;
// Sizes of what crosses between parts of a program.
template <std::size_t... Size> struct sizes;
template <class... T> using sizes_of = sizes<sizeof(T)...>;
sizes_of<error, site, tensor<float, 2>, view<bf16, 4>, arena, memory_meter, philox, layout::parameter_map, nn::pass> report;
"""
source = folder / "all.cpp"
source.write_text(program)


def outcome(chosen):
    # `report` is of an incomplete type: the one error tells the sizes.
    done = run([this_build.compiler, *others, *chosen, "-fsyntax-only", source])
    return [line.split("error:")[1].strip() for line in done.stderr.splitlines() if "error:" in line]


chosen = [[], switches] + [[s] for s in switches] + [[t for t in switches if t != s] for s in switches]
with concurrent.futures.ThreadPoolExecutor(os.cpu_count()) as pool:
    outcomes = list(pool.map(outcome, chosen))
failed = False
for subset, found in zip(chosen, outcomes):
    if len(found) != 1 or "sizes<" not in found[0] or found != outcomes[0]:
        print(f"{' '.join(subset) or 'nothing'}: {found[:5]}")
        failed = True
print(f"{len(chosen)} subsets; {outcomes[0]}")
if outcome(["-DTESSERA_WITH_PLANTED", "-Dindex_t=short"]) == outcomes[0]:
    sys.exit("this test does not see a type that changes")
sys.exit(failed)
