"""Prints a record of serving.py as Markdown tables, one for each suite, with its summary.

    python3 bench/peers/serving_table.py results/h200/serving.json
    python3 bench/peers/serving_table.py results/h200/serving.json --suite decode paged
"""

import argparse
import json
import sys
from pathlib import Path

SCHEMA = 1


def cell(value, digits=2):
    return "" if value is None else f"{value:.{digits}f}"


def peer(row):
    """The best peer and its time."""
    name = row.get("best_peer")
    return f"{name} {row['microseconds'][name]:.2f}" if name else ""


# Columns by heading; those that are empty in all rows of a suite are left out.
COLUMNS = {
    "case": lambda row: row["name"],
    "mask": lambda row: row["mask"] if row["mask"] in ("full", "causal") else "",
    "L2": lambda row: row["l2"],
    "flashcore us": lambda row: cell(row["microseconds"].get("flashcore")),
    "x floor": lambda row: cell(ratio(row["microseconds"].get("flashcore"), row["floor"])),
    "TB/s": lambda row: cell(row.get("terabytes_per_second")),
    "over contiguous": lambda row: cell(row.get("over_rect"), 3),
    "best peer us": peer,
    "peer / flashcore": lambda row: cell(row.get("ratio"), 3),
    "FA3 / flashcore": lambda row: cell(row.get("ratio_fa3"), 3),
    "torch us": lambda row: cell(row["microseconds"].get("torch")),
    "append adds us": lambda row: cell(row.get("added_microseconds")),
    "two launches add us": lambda row: cell(row.get("two_launches_add_microseconds")),
    "best free split us": lambda row: cell(row["microseconds"].get("free")),
    "invariance costs %": lambda row: cell(row.get("cost_percent"), 1),
}


def ratio(numerator, denominator):
    return numerator / denominator if numerator and denominator else None


def table(rows):
    """The Markdown lines of the rows of one suite."""
    cells = [[column(row) for column in COLUMNS.values()] for row in rows]
    kept = [index for index in range(len(COLUMNS)) if any(line[index] for line in cells)]
    headings = list(COLUMNS)
    lines = [[headings[index] for index in kept], ["---"] * len(kept)]
    lines += [[line[index] for index in kept] for line in cells]
    return ["| " + " | ".join(line) + " |" for line in lines]


def summary(entry):
    """A sentence about the rows of one suite in one state of L2."""
    parts = []
    for key, name in (("ratio", "best peer"), ("ratio_fa3", "FA3")):
        if key in entry:
            text = "{} / flashcore {mean:.3f} on geometric mean of {count}, lowest {lowest:.3f} ({of})"
            parts.append(text.format(name, **entry[key]))
    if "cost_percent" in entry:
        parts.append("invariance costs {mean:.1f} % on average, at most {most:.1f} %".format(**entry["cost_percent"]))
    if "most_over_beside" in entry:
        parts.append(f"at most {entry['most_over_beside']:.3f} of contiguous")
    if "most_over_floor" in entry:
        parts.append(f"at most {entry['most_over_floor']:.2f} x floor")
    return f"* {entry['l2']}: " + "; ".join(parts) + "."


def report(record, suites=None):
    """All lines of a record."""
    machine = record["machine"]
    versions = ", ".join(f"{name} {version}" for name, version in machine.get("versions", {}).items())
    lines = [f"{machine['device']}, driver {machine.get('driver', 'unknown')}; {versions}; seed {record.get('seed')}."]
    if "absent" in machine:
        lines.append(machine["absent"] + ".")
    for suite in dict.fromkeys(row["suite"] for row in record["rows"]):
        if suites and suite not in suites:
            continue
        lines += ["", f"## {suite}", "", *table([row for row in record["rows"] if row["suite"] == suite]), ""]
        # "same" is a mixture of the other states.
        entries = [entry for entry in record["summary"] if entry["suite"] == suite and entry["l2"] != "same"]
        lines += [summary(entry) for entry in entries]
    checks = [check for check in record["checks"] if not suites or check["check"] in suites]
    if checks:
        lines += ["", "## Checks", ""]
        lines += [f"* {'passed' if check['passed'] else 'FAILED'}: {check['text'].strip()}" for check in checks]
    for key, reason in record["crashed"].items():
        lines.append(f"* CRASHED: {key}: {reason}")
    return lines


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("record", help="a record of serving.py")
    parser.add_argument("--suite", nargs="+", help="these suites only")
    arguments = parser.parse_args()
    record = json.loads(Path(arguments.record).read_text(encoding="utf-8"))
    if record.get("schema") != SCHEMA:
        sys.exit(f"{arguments.record}: its schema is {record.get('schema')}; this program reads {SCHEMA}")
    print("\n".join(report(record, arguments.suite)))


if __name__ == "__main__":
    main()
