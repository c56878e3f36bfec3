"""C++ in the documentation is cut from files that are compiled: each ```cpp block of docs/ and README.md stands
word for word, line after line, in a header, example, test or benchmark. A line `...` or `// ...` in a block leaves
something out. Marks `// [doc: NAME]` ... `// [/doc]` come in pairs."""
import re

from house import judge


def squeezed(text):
    return [" ".join(line.split()) for line in text.splitlines() if line.strip()]


def contains(lines, piece):
    return any(lines[i:i + len(piece)] == piece for i in range(len(lines) - len(piece) + 1))


def rule(tree):
    found = []
    sources = {}
    for path, text in tree.under("include", "examples", "tests", "bench").items():
        if re.search(r"\.(hpp|cpp|cuh|cu)$", path):
            # The examples in doc comments count as well: they stand behind `///` and four spaces.
            sources[path] = squeezed(text)
            marks = re.findall(r"(?m)^\s*// \[(/?doc)\b", text)
            if marks != ["doc", "/doc"] * (len(marks) // 2):
                found.append(f"{path}: unpaired marks // [doc: ...] and // [/doc]")
    for path, text in tree.items():
        if not path.endswith(".md") or not (path == "README.md" or path.startswith("docs/")):
            continue
        for match in re.finditer(r"(?ms)^[ \t]*```(?:cpp|c\+\+)\n(.*?)^[ \t]*```", text):
            line = text.count("\n", 0, match.start()) + 1
            pieces = [[]]
            for row in squeezed(match.group(1)):
                if row in ("...", "// ..."):
                    pieces.append([])
                else:
                    pieces[-1].append(row)
            if not any(all(contains(lines, piece) for piece in pieces if piece) for lines in sources.values()):
                found.append(f"{path}:{line}: this block stands in no compiled file")
    return found


judge(rule, {
    "a block that is compiled nowhere": lambda tree: tree.having("docs/x.md", "```cpp\nint planted();\n```\n"),
    "a mark that is not closed": lambda tree: tree.having("tests/core/x.cpp", "// [doc: x]\nint f();\n"),
})
