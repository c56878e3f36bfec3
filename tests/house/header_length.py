"""A header is one concept: it is short, and what is not short is in the room's detail/."""
import statistics

from house import judge

LIMIT = 400
# path: why it is longer
LONGER = {}


def lengths(tree):
    return {path: text.count("\n") for path, text in tree.headers().items()}


def rule(tree):
    found = [f"{path}: {lines} lines, at most {LIMIT} (split it, or list it in tests/house/header_length.py)"
             for path, lines in lengths(tree).items() if lines > LIMIT and path not in LONGER]
    return found + [f"{path}: listed as long and is not" for path in LONGER
                    if lengths(tree).get(path, 0) <= LIMIT]


def report(tree):
    values = sorted(lengths(tree).values())
    if values and "printed" not in report.__dict__:
        report.printed = True
        print(f"{len(values)} headers, median {statistics.median(values):.0f} lines, "
              f"90th percentile {values[len(values) * 9 // 10]}, longest {values[-1]}")
    return rule(tree)


judge(report, {
    "a header of 401 lines": lambda tree: tree.having("include/tessera/core/x.hpp", "\n" * 401),
})
