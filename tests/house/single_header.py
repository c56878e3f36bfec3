"""single_include/tessera.hpp is up to date, compiles, and behaves as the headers do in two units of one program."""
import sys

import make_single_header
from house import ROOT, build, check_run, run

# The generator on a small library: what stands in an #if does not hide what is needed outside it.
library = {
    "tessera/tessera.hpp": "#if A\n#include <tessera/a.hpp>\n#endif\n#include <tessera/b.hpp>\n#include <tessera/b.hpp>\n",
    "tessera/a.hpp": "#ifndef TESSERA_A_HPP\n#define TESSERA_A_HPP\n#include <tessera/c.hpp>\na\n#endif\n",
    "tessera/b.hpp": "#ifndef TESSERA_B_HPP\n#define TESSERA_B_HPP\n#include <tessera/c.hpp>\nb\n#endif\n",
    "tessera/c.hpp": "#ifndef TESSERA_C_HPP\n#define TESSERA_C_HPP\nc\n#endif\n",
}
for a in "01":
    text = make_single_header.single_header(library.get)
    out = check_run(["g++", "-E", "-P", f"-DA={a}", "-x", "c++", "-"], input=text)
    if out.split() != (["c", "a", "b"] if a == "1" else ["c", "b"]):
        sys.exit(f"the generator loses or doubles a header: {out!r}")

committed = ROOT / "single_include/tessera.hpp"
if not committed.exists() or committed.read_text() != make_single_header.present():
    sys.exit("single_include/tessera.hpp is out of date: run python3 tests/house/make_single_header.py")

this_build = build()
folder = this_build.scratch("single_header")
(folder / "first.cpp").write_text("""#include <tessera.hpp>
int second();
int main() {
  tessera::tensor<float, 2> x({2, 3});
  return x.size() == 6 && second() == 100 ? 0 : 1;
}
""")
(folder / "second.cpp").write_text("#include <tessera.hpp>\nint second() { return TESSERA_VERSION; }\n")
bare = [o for o in this_build.bare if not o.startswith("-I")] + [f"-I{ROOT}/single_include", "-Wall", "-Wextra",
                                                                 "-Werror"]
check_run([this_build.compiler, *bare, folder / "first.cpp", folder / "second.cpp", "-o", folder / "program"])
check_run([folder / "program"])

everything = [o for o in this_build.everything if o != f"-I{ROOT}/include"] + [f"-I{ROOT}/single_include"]
check_run([this_build.compiler, *everything, "-fsyntax-only", folder / "first.cpp"])
