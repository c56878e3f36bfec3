"""Writes single_include/tessera.hpp: tessera.hpp with every header of the library put in its place.

usage: make_single_header.py [OUTPUT]

A header that is first reached inside an #if is there only where the condition holds, so it is put in again where
it is needed next; its include guard, which is kept, makes one of them count.
"""
import pathlib
import re
import sys

ROOT = pathlib.Path(__file__).resolve().parents[2]
INCLUDE = re.compile(r"\s*#\s*include\s*<(tessera/[^>]+)>")




def expand(name, emitted, read):
    """The lines of a header with those of the headers it includes. `emitted` holds the names that every reader
    of this place has already seen, and grows."""
    emitted.add(name)
    lines = []
    depth = 0
    inside = emitted  # what has been seen within the present #if
    for line in read(name).splitlines():
        match = INCLUDE.match(line)
        if re.match(r"\s*#\s*(if|ifdef|ifndef)\b", line) and not re.match(r"#ifndef TESSERA_\w+_HPP$", line):
            if depth == 0:
                inside = set(emitted)
            depth += 1
        elif re.match(r"\s*#\s*(else|elif)\b", line) and depth == 1:
            inside = set(emitted)
        elif re.match(r"\s*#\s*endif\b", line) and depth > 0:
            depth -= 1
            if depth == 0:
                inside = emitted
        if not match:
            lines.append(line)
        elif match.group(1) not in inside:
            lines += expand(match.group(1), inside, read)
    return lines


def single_header(read):
    # Includes of other libraries and of the standard stay where they are: their own guards serve them.
    lines = expand("tessera/tessera.hpp", set(), read)
    text = "\n".join(lines) + "\n"
    return ("// Tessera in one file, made by tests/house/make_single_header.py from include/tessera/. Do not edit.\n"
            "// " + (ROOT / "LICENSE").read_text().strip().replace("\n", "\n// ").replace("// \n", "//\n")
            + "\n\n" + re.sub(r"\n{3,}", "\n\n", text))


def present():
    return single_header(lambda name: (ROOT / "include" / name).read_text())


if __name__ == "__main__":
    target = pathlib.Path(sys.argv[1]) if len(sys.argv) > 1 else ROOT / "single_include/tessera.hpp"
    target.write_text(present())
