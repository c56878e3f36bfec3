"""Every error id has one meaning and one row in docs/troubleshooting/, and every row an error."""
import collections
import re

from house import judge, without_comments

ID = r"E-[a-z_]+-\d{3}"


def rule(tree):
    found = []
    thrown = collections.defaultdict(list)  # id -> (path, line, type or None)
    for path, text in tree.headers().items():
        text = without_comments(text, keep_strings=True)
        for match in re.finditer(rf'"({ID})"', text):
            before = re.search(r"(\w+)\s*[({]\s*$", text[:match.start()])
            kind = before.group(1) if before and before.group(1).endswith(("error", "memory", "failed", "mismatch",
                                                                           "stalled")) else None
            thrown[match.group(1)].append((path, text.count("\n", 0, match.start()) + 1, kind))
        for match in re.finditer(r"throw\s+(?:tessera::)?(size_error|config_error|out_of_memory|io_error|peer_failed|"
                                 r"collective_mismatch|stalled|library_error|numeric_error|error)\s*\(\s*([^\s,]+)",
                                 text):
            if not re.fullmatch(rf'"{ID}"|\w*id\w*', match.group(2)):
                line = text.count("\n", 0, match.start()) + 1
                found.append(f"{path}:{line}: an error without an id: {match.group(0)}")

    rows = collections.defaultdict(list)
    for path, text in tree.under("docs/troubleshooting").items():
        for number, line in enumerate(text.splitlines(), 1):
            match = re.match(rf"\|\s*`?({ID})`?\s*\|(.*)\|\s*$", line)
            if match:
                rows[match.group(1)].append(f"{path}:{number}")
                cells = [c.strip() for c in match.group(2).split("|")]
                if len(cells) < 2 or not all(cells[:2]):
                    found.append(f"{path}:{number}: {match.group(1)} needs what it means and what to do")
                room = match.group(1).split("-")[1]
                if path != f"docs/troubleshooting/{room}.md":
                    found.append(f"{path}:{number}: {match.group(1)} belongs to docs/troubleshooting/{room}.md")

    for identity, places in sorted(thrown.items()):
        room = identity.split("-")[1]
        for path, line, _ in places:
            if path.split("/")[2] != room:
                found.append(f"{path}:{line}: {identity} is not of this room")
        kinds = {kind for _, _, kind in places if kind}
        if len(kinds) > 1:
            found.append(f"{identity} is thrown as {' and as '.join(sorted(kinds))}: "
                         + ", ".join(f"{p}:{n}" for p, n, _ in places))
        if identity not in rows:
            found.append(f"{places[0][0]}:{places[0][1]}: {identity} has no row in docs/troubleshooting/{room}.md")
    for identity, places in sorted(rows.items()):
        if len(places) > 1:
            found.append(f"{identity} has several rows: {', '.join(places)}")
        if identity not in thrown:
            found.append(f"{places[0]}: {identity} is thrown nowhere")
    return found


def header(body):
    return lambda tree: tree.having("include/tessera/core/planted.hpp", body)


judge(rule, {
    "an id without a row": (header('throw size_error("E-core-998", where);'), "has no row"),
    "an id of another room": (header('throw size_error("E-nn-998", where);'), "not of this room"),
    "an error without an id": (header('throw size_error("message", where);'), "without an id"),
    "an id with two meanings": (header('throw size_error("E-core-998", w);\nthrow io_error("E-core-998", w);'),
                                "is thrown as"),
    "a row without an error": (lambda tree: tree.having(
        "docs/troubleshooting/nn.md", "| E-nn-998 | something | do something |\n"), "thrown nowhere"),
    "a row in the wrong file": (lambda tree: tree.having(
        "docs/troubleshooting/io.md", "| E-nn-998 | something | do something |\n"), "belongs to"),
    "an empty cell": (lambda tree: tree.having(
        "docs/troubleshooting/nn.md", "| E-nn-998 | something | |\n"), "what to do"),
})
