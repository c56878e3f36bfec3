"""Rules on the text of the headers: no hidden state, checked narrowing, one form of guard and namespace."""
import re

from house import is_inner, judge, without_comments

SIMPLE = {
    # Names of enumerations' values are let through; a count must not bear one of them.
    r"static_cast<int>\s*\((?!(\w+\.)?(form|kind|level|operation|status|type|what|first)\))": "counts are narrowed by narrow<int>()",
    r"\bthread_local\b": "mutable state of a thread",
    r"(?m)^using\s+namespace\b": "a using directive in a header",
    r"std::source_location|std::views::|std::ranges::views": "clang 14 does not have it",
    r"\b(TODO|FIXME|XXX|HACK)\b": "unfinished",
    r"ffast-math|#\s*pragma\s+GCC\s+optimize": "arithmetic is not reordered behind the reader's back",
    r"\bbool\s+\w+(\s*=\s*\w+)?\s*,\s*bool\b": "two booleans side by side: use an options struct",
    r"\b(printf|puts|exit|std::cout|std::cerr)\s*\(|std::cout|std::cerr": "a library neither prints nor exits",
    r"\bassert\s*\(": "checks throw, in every build",
}
# Where a rule does not hold, and why.
ALLOWED = {
    # (path, rule's reason): why
}


def statements_with_static(code):
    """(line, declaration) of each declaration that starts with static or with inline at namespace scope."""
    for match in re.finditer(r"(?m)^[ \t]*((?:static|inline|static inline|inline static)\s[^;{}]*)([;{])", code):
        declaration, end = match.group(1), match.group(2)
        if declaration.startswith("inline namespace"):
            continue
        yield code.count("\n", 0, match.start(1)) + 1, declaration + end


def is_variable(declaration):
    """A parenthesis before any `=` makes it a function (or an operator)."""
    head = declaration.split("=")[0]
    return "(" not in head and "operator" not in declaration


def outer_namespaces(code):
    """Names of the namespaces that are not inside another one."""
    depth = 0
    for match in re.finditer(r"\bnamespace\s+([\w:\s]+?)\s*\{|[{}]", code):
        if match.group(1) and depth == 0:
            yield " ".join(match.group(1).split())
        depth += -1 if match.group(0) == "}" else 1


def rule(tree):
    found = []
    for path, text in tree.headers().items():
        code = without_comments(text)
        for line, declaration in statements_with_static(code):
            if is_variable(declaration) and not re.search(r"\bconst(expr|init)?\b", declaration):
                found.append(f"{path}:{line}: mutable static state: {' '.join(declaration.split())}")
        for pattern, why in SIMPLE.items():
            if "options struct" in why and is_inner(path):
                continue
            # A kernel cannot throw: what it counts within a block is small, and the host checks the rest.
            if "narrow<int>" in why and path.endswith(".cuh"):
                continue
            searched = text if why == "unfinished" else code
            for match in re.finditer(pattern, searched):
                if (path, why) not in ALLOWED:
                    line = searched.count("\n", 0, match.start()) + 1
                    found.append(f"{path}:{line}: {match.group(0).strip()}: {why}")
        guard = re.sub(r"\W", "_", path[len("include/"):]).upper()
        opening = re.search(r"(?m)^#ifndef (\w+)\n#define (\w+)\s*$", text)
        if not opening or {opening.group(1), opening.group(2)} != {guard} or not text.rstrip().endswith("#endif"):
            found.append(f"{path}: the include guard is not {guard}")
        for name in outer_namespaces(code):
            if not re.fullmatch(r"tessera::inline TESSERA_(STABLE_)?ABI(::\w+)*|std", name):
                found.append(f"{path}: opens namespace {name}, not tessera::inline TESSERA_ABI")
        if not text.startswith("///") and path.count("/") > 2 and not path.endswith("/version.hpp"):
            found.append(f"{path}: does not open with what it is for (///)")
    return found


def planted(body):
    text = ("/// For the test.\n#ifndef TESSERA_CORE_PLANTED_HPP\n#define TESSERA_CORE_PLANTED_HPP\n"
            f"namespace tessera::inline TESSERA_ABI {{\n{body}\n}}\n#endif\n")
    return lambda tree: tree.having("include/tessera/core/planted.hpp", text)


judge(rule, {
    "a static counter in a function": planted("inline int f() {\n  static int calls = 0;\n  return ++calls;\n}"),
    "a static object with braces": planted("inline void f() {\n  static std::vector<int> cache{};\n}"),
    "a variable of the namespace": planted("inline int level = 0;"),
    "a static member": planted("struct s {\n  inline static int level = 0;\n};"),
    "a thread-local variable": planted("thread_local int depth;"),
    "an unchecked cast": planted("inline int f(long n) { return static_cast<int>(n); }"),
    "two booleans": planted("void f(bool causal, bool masked = false);"),
    "a using directive": planted("using namespace std;"),
    "output": planted('inline void f() { std::cout << 1; }'),
    "something unfinished": planted("// TO" + "DO: finish"),
    "a guard of another name": lambda tree: tree.having(
        "include/tessera/core/planted.hpp", "/// x\n#ifndef PLANTED_HPP\n#define PLANTED_HPP\n#endif\n"),
    "a namespace without the tag": lambda tree: tree.having(
        "include/tessera/core/planted.hpp",
        "/// x\n#ifndef TESSERA_CORE_PLANTED_HPP\n#define TESSERA_CORE_PLANTED_HPP\nnamespace tessera {\n}\n#endif\n"),
})
