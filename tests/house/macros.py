"""Headers leak no macro but TESSERA_*, and bear the macros that other people's headers leak."""
import re
import sys

from house import ROOT, Tree, build, includes, read_tree, run, without_nccl

# Short names that C headers in wide use define: <complex.h>, <termios.h>, Windows' and Arduino's headers.
POISON = ["I", "small", "B0", "B1", "PI", "DEBUG", "ERROR", "CHECK"]
this_build = build()


def names(tree):
    return [path[len("include/"):] for path in without_nccl(tree.headers())
            if path.endswith(".hpp")]


def program(tree, poison):
    """All headers after what they include of other libraries, which need not bear anything."""
    others = sorted({name for text in tree.headers().values() for _, name in includes(text)
                     if not name.startswith("tessera/")})
    lines = [f"#if __has_include(<{name}>)\n#include <{name}>\n#endif" for name in others]
    lines += [f"#undef {word}\n#define {word} (poison" for word in poison]
    return "\n".join(lines + [f"#include <{name}>" for name in names(tree)]) + "\n"


def compile_all(tree, poison, *options):
    """Compiles or preprocesses all headers of the tree, those that differ from the disk from a copy."""
    folder = this_build.scratch("macros")
    extra = []
    disk = read_tree()
    for path, text in tree.headers().items():
        if disk.get(path) != text:
            target = folder / path
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_text(text)
            extra = [f"-I{folder}/include"]
    source = folder / "all.cpp"
    source.write_text(program(tree, poison))
    done = run([this_build.compiler, *extra, *this_build.everything, *options, source])
    for path in tree.headers():
        (folder / path).unlink(missing_ok=True)
    return done


def leaks(tree):
    done = compile_all(tree, [], "-E", "-dD")
    if done.returncode != 0:
        return ["the headers cannot be preprocessed:\n" + done.stderr[:2000]]
    leaving = {}
    place = ""
    for line in done.stdout.splitlines():
        marker = re.match(r'# \d+ "([^"]*)"', line)
        if marker:
            place = marker.group(1)
        elif "/include/tessera/" in place:
            defined = re.match(r"#(define|undef) (\w+)", line)
            if defined and defined.group(1) == "define":
                leaving[defined.group(2)] = place[place.index("include/tessera/"):]
            elif defined:
                leaving.pop(defined.group(2), None)
    return [f"{place}: leaks the macro {name}" for name, place in sorted(leaving.items())
            if not name.startswith("TESSERA_")]


def spoiled(tree):
    done = compile_all(tree, POISON, "-fsyntax-only", "-w")
    if done.returncode == 0:
        return []
    errors = [line.replace(f"{ROOT}/", "") for line in done.stderr.splitlines() if ": error:" in line]
    places = sorted({line for line in errors if "include/tessera/" in line})
    return ["the headers do not bear the macros " + " ".join(POISON) + ":\n  " + "\n  ".join((places or errors)[:20])]


tree = read_tree()
core = Tree({p: t for p, t in tree.items() if not p.startswith("include/") or "/core/" in p})


def planting(text):
    return core.having("include/tessera/core/planted.hpp", text)


if not any("WIDTH" in line for line in leaks(planting("#define WIDTH 3\n"))):
    sys.exit("this test does not see a macro that leaks")
if not spoiled(planting("template <int I>\nstruct planted {};\n")):
    sys.exit("this test does not see a name that a macro spoils")
found = leaks(tree) + spoiled(tree)
print("\n".join(found))
sys.exit(1 if found else 0)
