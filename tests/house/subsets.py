"""TESSERA_WITH_* decide only what exists: the headers compile with none, all and any one of them, and the types that
every build has are the same."""
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
sizes<sizeof(error), sizeof(site), sizeof(tensor<float, 2>), sizeof(view<bf16, 4>), sizeof(arena<>),
      sizeof(memory_meter), sizeof(philox), sizeof(layout::parameter_map), sizeof(nn::pass)> report;
"""
source = folder / "all.cpp"
source.write_text(program)


def outcome(chosen):
    # `report` is of an incomplete type: the one error tells the sizes.
    done = run([this_build.compiler, *others, *chosen, "-fsyntax-only", source])
    return [line.split("error:")[1].strip() for line in done.stderr.splitlines() if "error:" in line]


chosen = [[], switches] + [[s] for s in switches]
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
