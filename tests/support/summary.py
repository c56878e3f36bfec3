"""Adds up the results of all parts of ./tests/run.sh and prints them, the verdict last.

usage: summary.py FOLDER [--require=NAME]... PART...

A test counts once for each part that ran it. One that could not run in any part is skipped; --require=NAME makes
that a failure for the tests that need NAME.
"""
import pathlib
import sys
import xml.etree.ElementTree as xml


def main(arguments):
    folder = pathlib.Path(arguments[0])
    required = {a.split("=", 1)[1] for a in arguments[1:] if a.startswith("--require=")}
    parts = [a for a in arguments[1:] if not a.startswith("--")]

    passed, failed, skipped, times = [], [], {}, []
    for part in parts:
        missing = folder / f"{part}.not_run"
        if missing.exists():
            skipped[f"part {part}"] = missing.read_text().strip()
            continue
        build = folder / f"{part}.build"
        built = build.exists() and build.read_text().strip() == "0"
        (passed if built else failed).append(f"{part}: configure and build")
        results = folder / f"{part}.xml"
        if not results.exists():
            failed.append(f"{part}: no test was run")
            continue
        for case in xml.parse(results).getroot().iter("testcase"):
            name = case.get("name")
            skip = case.find("skipped")
            times.append((float(case.get("time", 0)), f"{part}: {name}"))
            if case.get("status") == "run":
                passed.append(f"{part}: {name}")
            elif skip is not None and skip.get("message", "").startswith("SKIP_"):
                output = (case.findtext("system-out") or "").strip().splitlines()
                skipped.setdefault(name, output[-1] if output else "")
            else:
                failed.append(f"{part}: {name}")

    ran = {entry.split(": ", 1)[1] for entry in passed + failed}
    not_run = {name: why for name, why in skipped.items() if name not in ran}
    for name, why in sorted(not_run.items()):
        if any(need in why for need in required):
            failed.append(f"{name} (required, and not run)")
    not_run = {name: why for name, why in not_run.items() if not any(need in why for need in required)}

    print("\nslowest tests:")
    for seconds, name in sorted(times, reverse=True)[:10]:
        print(f"  {seconds:7.1f} s  {name}")
    if not_run:
        print("skipped:")
        for name, why in sorted(not_run.items()):
            print(f"  {name}: {why}")
    if failed:
        print("failed:")
        for name in failed:
            print(f"  {name}")
    print(f"{len(passed)} passed, {len(failed)} failed, {len(not_run)} skipped")
    return 1 if failed or not passed else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
