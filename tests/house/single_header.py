"""tessera.hpp includes every public header; single_include/tessera.hpp is up to date and links in two units."""
import sys

import make_single_header
from house import ROOT, build, check_run

# The generator on small libraries: what stands in an #if does not hide what is needed outside it.
guard = "#ifndef TESSERA_{0}_HPP\n#define TESSERA_{0}_HPP\n{1}\n#endif\n"
libraries = [
    {
        "tessera/tessera.hpp": "#if A\n#include <tessera/a.hpp>\n#endif\n#include <tessera/b.hpp>\n",
        "tessera/a.hpp": guard.format("A", "#include <tessera/c.hpp>\na"),
        "tessera/b.hpp": guard.format("B", "#include <tessera/c.hpp>\nb"),
        "tessera/c.hpp": guard.format("C", "c"),
    },
    {
        "tessera/tessera.hpp": "#include <tessera/a.hpp>\n#include <tessera/b.hpp>\n",
        "tessera/a.hpp": guard.format("A", "#if defined(A) && A\n#include <tessera/c.hpp>\na\n#endif"),
        "tessera/b.hpp": guard.format("B", "#include <tessera/c.hpp>\nb"),
        "tessera/c.hpp": guard.format("C", "c"),
    },
]
for library in libraries:
    text = make_single_header.single_header(library.get)
    for a, expected in ("1", ["c", "a", "b"]), ("0", ["c", "b"]):
        out = check_run(["g++", "-E", "-P", f"-DA={a}", "-x", "c++", "-"], input=text)
        if out.split() != expected:
            sys.exit(f"the generator loses or doubles a header: {out!r}")

stale = [path for path, text in make_single_header.present().items()
         if not (ROOT / path).exists() or (ROOT / path).read_text() != text]
if stale:
    sys.exit(f"out of date: {', '.join(stale)}; run python3 tests/house/make_single_header.py")

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
