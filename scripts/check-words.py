#!/usr/bin/env python3
"""Checks that code and documentation use the words of the field.

A reader finds a place by searching for TMA, pipeline, scheduler, split-KV, PDL, GQA or row_max.
So one thing has one name, and it is the name that papers, the PTX manual, CUTLASS and FlashAttention use.

    scripts/check-words.py               # file:line: found -> use; exits 1 if there is any
    scripts/check-words.py --count       # totals per rule
    scripts/check-words.py README.md     # these files or folders only
    scripts/check-words.py --self-test   # sentences that must and must not be caught
"""

import argparse
import os
import re
import sys

ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))

KERNELS = r"^crates/flashcore-kernels/"
GPU = r"^crates/flashcore-(kernels|bench)/|^docs/(?!cpu)|^notebook/(?!cpu)|^[A-Z]+\.md$"
CPU = r"^crates/flashcore-cpu/|^docs/cpu\.md|^notebook/cpu"

# (rule, pattern, what to write instead, files it applies to or None for all of them)
WORDS = [
    ("copy engine", r"(?i)\bcopy engines?\b", "TMA", None),
    ("tensor copy", r"(?i)\btensor cop(y|ies)\b", "TMA load, TMA store", None),
    ("transfer", r"\bTransfer(Ring|Cursor)s?\b|\btransfer_(ring|cursor)s?\b|(?i:\btransfer (ring|cursor)s?\b)",
     "TmaPipeline, PipelineState", None),
    ("stores by copy", r"(?i)\bstor(e|es|ed|ing) by (the )?cop(y|ies)\b|\bSTORES_BY_COPY\b|\bstores?_by_cop\w+",
     "TMA store", None),
    ("announce", r"(?i)\b(un)?announc(e|es|ed|ing)\b(?! to users)", "expect_tx",
     r"^crates/flashcore-(kernels|sim|ir|bench)/|^docs/|^notebook/|^[A-Z]+\.md$"),
    ("wait until full", r"\bwait_until_(full|empty)\b|\bwaits? until (it is )?(full|empty)\b",
     "consumer_wait, producer_acquire", KERNELS),
    ("let go of", r"\blet_go\w*\b|(?i:\blet(s|ting)? go of\b)", "consumer_release, release", GPU),
    ("leave a stage", r"(\bfn |\.)leave\(", "advance", KERNELS),
    ("Ring", r"\bRing\b", "CpAsyncPipeline", KERNELS),
    ("Supply", r"\bSupply\b", "KvPipeline", None),
    ("Stream of keys", r"\bStream\b", "KvPipeline", KERNELS + r"src/(attention|tile|primitives)/"),
    ("place of a stage", r"(?i)\b(one|two|three|few|such|as many|another) places? (for|in)\b|\bplaces? (for|of) the (query|output|keys|values)\b"
     r"|\bplace for a (query|tile)\b", "stage", GPU),
    ("room", r"\bROOM\b|(?i:\brooms? (of|for) (a|the) (stage|tile|query)s?\b)", "stage, smem bytes", GPU),
    ("PanelTile", r"\bPanel(Tile|Matri(x|ces)|Tiles)\b|\bpanel_(tile|matrix)\w*\b", "swizzled smem tile, wgmma operand", None),
    ("Rounded", r"\bRounded\b", "P fragment", KERNELS),
    ("raise", r"(\bfn |\.)raise\(|\bRaised\b", "update_row_max, row scale", KERNELS),
    ("weigh", r"(\bfn |\.)weigh(?!t)\w*\(|(?i:\bweigh(s|ed|ing)?\b)(?! (more|less|as much|heavily))", "exp_and_sum, softmax", None),
    ("running maximum", r"(?i)\brunning maxim(um|a)\b|\bmaxim(um|a) that (is |was )?(to )?stays?\b|\bmaxim(um|a) (of (a|the) rows? )?(rises|rose|has risen|have risen)\b",
     "row_max, stale row max (lazy rescale)", None),
    ("Rescale variants", r"\bWhen(Raised|Far)\b", "Rescale::{Always, IfChanged, Threshold} (lazy rescale)", None),
    ("hidden rescale", r"(?i)\bhidden[_ -]rescal\w+|\brescal\w+ (that )?(is |are )?(not )?hidden\b|\brescal\w+ hidden\b",
     "overlap_rescale (rescale overlapped with QK)", None),
    ("turns", r"\bInTurn\b|\bTurns?\b|\b(takes?|taking|took|pass(es)?) (its |their |the )?turns?\b|\bin_turn\b",
     "warp-scheduler barrier (ping-pong)", KERNELS + r"|^docs/hopper\.md|^docs/design\.md|^ARCHITECTURE\.md"),
    ("dependent", r"\.dependent\b|\bdependent:|\bis_dependent\b|\bDEPENDENT\b", "pdl (programmatic dependent launch)", None),
    ("kernel before/behind", r"(?i)\bkernels? (before|behind) (it|this|that|another|them|the other)\b|\bkernels? behind\b|\bthe kernel before\b",
     "preceding / following kernel (PDL)", None),
    ("Specialisation", r"(?i)specialisation", "specialization", None),
    ("neighbours", r"\b[Nn]eighbours\b|\bneighbours?\.rs\b", "search space (configs); adjacent (rows, tiles)",
     r"^crates/flashcore-(kernels|bench|cli)/|^docs/|^[A-Z]+\.md$"),
    ("tuned", r"\bConfig::tuned\b|\btuned_\w+|\btuned\.rs\b|\bfn tuned\b|\bmod tuned\b", "heuristics", None),
    ("brought", r"\bbrought\(|\.brought\b|(?i:\bplaceholders?\b)", "operands", r"^crates/"),
    ("with_at_most", r"\bwith_at_most\b", "num_sms argument when planning", None),
    ("steps kernel", r"\bStepsConfig\b|\bConfig::Steps\b|\bsteps_config\b|(?i:\bsteps of the history\b|\bchoices of the history\b|\bkernels? of the history\b)",
     "the ladder's kernel", None),
    ("CTAs that stay", r"(?i)\bCTAs? (that )?(do not )?stays?\b|\btiles? after tile\b(?! of)|\bhow many CTAs stay\b", "persistent CTAs", None),
    ("ByLength", r"\bByLength\b|\bby_length\b", "TileScheduler policy (LPT, sorted)", None),
    ("Schedule", r"\b(Schedule|Order)\b", "TileScheduler", KERNELS),
    ("Ticket", r"\b[Tt]ickets?\b", "WorkTileInfo", GPU),
    ("QueryTile", r"\bQueryTile\b", "WorkTileInfo", KERNELS),
    ("Found", r"\bFound\b", "WorkTileInfo", KERNELS),
    ("KeyRange", r"\bKey(Range|Tiles)\b|\bkey_(range|tiles)\.rs\b", "KvRange", None),
    ("whole/cut tiles", r"(?i)\bcut tiles?\b|\bwhole tiles\b(?! of rows)|\btiles? (that|which) (are|is) (cut|whole)\b|\bmasks? cuts?\b|\b(mask|window) cuts\b",
     "full / partial blocks", GPU),
    ("what a formula leaves", r"(?i)\bwhat (a|the) (mask )?(formula|closure|expression|mask) leaves\b|\btiles that (a|the) mask leaves\b"
     r"|\b(formula|closure|expression|mask)s? (that )?leaves?\b", "block mask", None),
    ("tile ranges", r"(?i)\btile[_ ]?ranges?\b", "block mask", None),
    ("small kernel", r"(?i)\bsmall kernel\b|\bsearch kernel\b", "block-mask precompute kernel", GPU + r"|^crates/flashcore/"),
    ("rows/keys anywhere", r"\b(rows|keys)[_ ]anywhere\b", "unaligned Q / KV tiles", None),
    ("parts of keys", r"(?i)\bparts of (the |its |their )?keys\b|\bkeys in parts\b|\bparts of a row\b|\b(number of|\d+) parts\b|\bin parts\b(?! \{)",
     "split-KV: num_splits", GPU + r"|^crates/flashcore/"),
    ("parts field", r"\bparts\b\s*:(?!:)|\.parts\b|\bPARTS\b", "num_splits", KERNELS),
    ("key groups", r"(?i)\bkey[_ ]groups?\b|\bKeyGroups?\b", "KV split over warpgroups (kv_split_warpgroups)", None),
    ("key warps", r"(?i)\bkey[_ ]warps?\b|\bKeyWarps?\b", "KV split over warps (kv_split_warps)", None),
    ("2keys", r"\b[24]keys\b", "KV split over 2 / 4 warps or warpgroups", r"^crates/|^docs/|^[A-Z]+\.md$"),
    ("send/receive", r"(\bfn |\.)(send|receive|gather)\(", "store_partial, merge_partial, reduce_splits", KERNELS),
    ("Packing::KeyHead", r"\bPacking::KeyHead\b", "pack_gqa", None),
    ("multiprocessor", r"(?i)\bmultiprocessors?\b|_multiprocessors?\b|\bmultiprocessors?_", "SMs, num_sms", None),
    ("key lengths", r"(?i)\bkey[_ ]lengths\b|\bper-batch key lengths?\b", "seqused_k", None),
    ("formula", r"(?i)(?<!mathematical )(?<!closed )formula(s|e)?(?![a-z])", "score_mod / mask_mod expression", None),
    ("log_sum_exp", r"\blog_sum_exp\b|\bLogSumExp\b", "lse", None),
    ("number_table", r"\b(number|integer)_tables?\b", "aux_f32, aux_i32", None),
    ("linger", r"(?i)\blinger\w*|\bfor a moment\b", "spin-wait", None),
    ("along", r"\balong\.rs\b|\bmod along\b|\balong::|\b(weights|softmax) along with\b", "fused softmax", CPU + r"|^README\.md"),
    ("weave", r"(?i)\bweav(e|es|ing)\b|\bwoven\b", "interleaved AMX pipeline", None),
    ("meet", r"(?i)(\bfn |\.)meets?\(|\b(strips?|tiles?|rows?) (that )?meets?\b|\bmeets (a|its|all|one) (strip|tile|row)s?\b|\bare met\b|\bmeetings?\b",
     "attend a block", CPU),
    ("strip", r"(?i)(?<![_.\w])(half-?)?strips?\b(?!_)", "row panel", CPU),
    ("asks along", r"(?i)\basks? along\b|\bfn (asks?_)?soon\b|\b\w*\.soon\(|\basked for (early|ahead|a line|along|twice|once)\b|\baske?d?s? (for )?(it |them |what )?(early|ahead of time)\b",
     "software prefetch", CPU),
    ("stay behind", r"(?i)\bstay(s|ed|ing)? behind\b", "compiler fence", None),
]

# Sentence rules: they hold for text that readers meet, not for the notebook.
DOC_OPENING = re.compile(r"^(What|Whether|That of|That which|How)\b")
BEHIND = re.compile(r"\bbehind\b", re.IGNORECASE)
# "behind" is for places in space; these are.
BEHIND_ALLOWED = [
    r"behind (a|the) (symbolic )?link\b",
    r"behind the (camera|wall|screen)\b",
]

# Lines that may keep a word: (path, text in the line).
ALLOWED = [
    # Records of GPUs know conformance cases and their outputs by these names.
    ("crates/flashcore-bench/src/testkit/conformance/cases/control.rs", 'Writer::new("Shuffle behind choices")'),
    ("crates/flashcore-bench/src/testkit/conformance/cases/control.rs", 'writer.output("behind"'),
    ("crates/flashcore-bench/src/lab/report/peers.rs", '"formula"'),
]

EXTENSIONS = (".rs", ".md", ".py", ".h", ".c", ".sh")
SKIPPED_FOLDERS = {"target", ".git", ".venv", "results", "experiments", "snapshots", "node_modules"}
SKIPPED_FILES = {"CHANGELOG.md", "scripts/check-words.py"}
# Names of configs, such as hopper-64x64-4stage-2keys-2ctas-dependent, are data: records and caches have them.
CONFIG_NAME = re.compile(r"\b(?:scalar|naive|steps|ladder|ampere|hopper|sm80|sm90)-\d[\w.]*(?:-[\w.]+)*")

# Names of the driver API keep the driver's words.
DRIVER_NAME = re.compile(r"\bCU_DEVICE_ATTRIBUTE_\w+")

COMPILED = [(rule, re.compile(pattern), use, re.compile(where) if where else None) for rule, pattern, use, where in WORDS]
BEHIND_ALLOWED_COMPILED = [re.compile(pattern) for pattern in BEHIND_ALLOWED]


def files(paths):
    """The files to check, as paths from the root."""
    for start in paths:
        start = os.path.join(ROOT, start)
        if os.path.isfile(start):
            yield os.path.relpath(start, ROOT).replace(os.sep, "/")
            continue
        for folder, names, found in os.walk(start):
            names[:] = sorted(name for name in names if name not in SKIPPED_FOLDERS)
            for name in sorted(found):
                path = os.path.relpath(os.path.join(folder, name), ROOT).replace(os.sep, "/")
                if path in SKIPPED_FILES or os.path.islink(os.path.join(ROOT, path)):
                    continue
                if name.endswith(EXTENSIONS) or path.startswith((".ci/", "scripts/")):
                    yield path


def doc_comment(line):
    """The marker and the text of a doc comment, or None."""
    match = re.match(r"\s*(///|//!)(?!/)\s?(.*)", line)
    return (match.group(1), match.group(2)) if match else None


def check(path, text):
    """Yields (line number, rule, found, use) for each finding in a file."""
    has_sentence_rules = not path.startswith("notebook/")
    before = None
    for number, line in enumerate(text.splitlines(), 1):
        here = doc_comment(line) if path.endswith(".rs") else None
        is_first = here is not None and (before is None or before[0] != here[0])
        before = here
        if any(path == allowed and part in line for allowed, part in ALLOWED):
            continue
        plain = DRIVER_NAME.sub("", CONFIG_NAME.sub("", line))
        for rule, pattern, use, where in COMPILED:
            if where is None or where.search(path):
                for match in pattern.finditer(plain):
                    yield number, rule, match.group(0).strip(), use
        if not has_sentence_rules:
            continue
        if is_first and DOC_OPENING.match(here[1]):
            opening = DOC_OPENING.match(here[1]).group(0)
            yield number, f"doc comment: {opening} ...", here[1][:40], "a noun phrase or an imperative (True if, Number of, Returns)"
        for match in BEHIND.finditer(plain):
            if not any(allowed.match(plain, match.start()) for allowed in BEHIND_ALLOWED_COMPILED):
                yield number, "behind", plain[max(0, match.start() - 20):match.end()].strip(), "after, past the end, following, beneath"


# (path, text, rules that must be found)
CASES = [
    ("docs/a.md", "The copy engine writes it.", ["copy engine"]),
    ("docs/a.md", "TMA writes it, and the consumer waits.", []),
    ("crates/flashcore-kernels/src/a.rs", "let ring = TransferRing::new(k);", ["transfer"]),
    ("crates/flashcore-cuda/src/a.rs", "// Bytes of a transfer from the host to the device.", []),
    ("crates/flashcore-kernels/src/a.rs", "use crate::tile::{PanelMatrix, PanelTile};", ["PanelTile", "PanelTile"]),
    ("crates/flashcore-cpu/src/a.rs", "// A row panel of 32 query rows.", []),
    ("crates/flashcore-kernels/src/a.rs", "pub(crate) struct KeyTiles {", ["KeyRange"]),
    ("crates/flashcore-kernels/src/a.rs", "softmax.raise(k); softmax.weigh(k);", ["raise", "weigh"]),
    ("crates/flashcore-problem/src/a.rs", "// Beginning and end weigh more than with 64.", []),
    ("crates/flashcore-cpu/src/a.rs", "fn weigh_narrow(self) {}", ["weigh"]),
    ("crates/flashcore-cpu/src/a.rs", "fn weights(&self) -> *mut u32 { self.weights() }", []),
    ("crates/flashcore-kernels/src/a.rs", "Rescale::WhenFar => 8.0,", ["Rescale variants"]),
    ("crates/flashcore-kernels/src/a.rs", "/// Programmatic dependent launch (PDL).", []),
    ("crates/flashcore-kernels/src/a.rs", "if config.dependent {", ["dependent"]),
    ("crates/flashcore-kernels/src/a.rs", "pub dependent: bool,", ["dependent"]),
    ("docs/a.md", "The kernel behind it reads them.", ["kernel before/behind", "behind"]),
    ("docs/a.md", "The following kernel on the stream reads them.", []),
    ("docs/a.md", "CTAs that stay take tile after tile.", ["CTAs that stay", "CTAs that stay"]),
    ("docs/a.md", "Persistent CTAs loop over tiles from the scheduler.", []),
    ("docs/a.md", "A tile that a mask cuts.", ["whole/cut tiles"]),
    ("docs/a.md", "What a formula leaves is found out by a small kernel.", ["what a formula leaves", "small kernel", "formula"]),
    ("docs/a.md", "This is a mathematical formula.", []),
    ("crates/flashcore-problem/src/a.rs", "mod formula;", ["formula"]),
    ("docs/a.md", "`hopper-64x64-4stage-2keys-2ctas-dependent` was the fastest.", []),
    ("docs/a.md", "The config 2keys was the fastest.", ["2keys"]),
    ("docs/a.md", "The keys are processed in parts.", ["parts of keys"]),
    ("docs/a.md", "All parts of the library.", []),
    ("crates/flashcore-bench/src/shape.rs", "let parts: Vec<&str> = sizes.split('x').collect();", []),
    ("crates/flashcore-kernels/src/a.rs", "parts: 2,", ["parts field"]),
    ("crates/flashcore-cuda/src/a.rs", "device.multiprocessors()", ["multiprocessor"]),
    ("crates/flashcore-cuda/src/a.rs", "device.num_sms()", []),
    ("crates/flashcore-cuda/src/a.rs", "Attribute::CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT", []),
    ("crates/flashcore/src/a.rs", "problem.key_lengths = true;", ["key lengths"]),
    ("crates/flashcore/src/a.rs", "problem.key_length = 512;", []),
    ("crates/flashcore-cpu/src/a.rs", "fn linger() {}", ["linger"]),
    ("crates/flashcore-cpu/src/a.rs", "// Stores must not stay behind.", ["stay behind", "behind"]),
    ("crates/flashcore-cpu/src/a.rs", "let name = path.strip_prefix(folder);", []),
    ("crates/flashcore-cpu/src/a.rs", "// A strip meets all tiles.", ["meet", "strip"]),
    ("crates/flashcore-cli/tests/a.rs", "//! The command as a user meets it.", []),
    ("crates/flashcore-ir/src/a.rs", "/// What it is.", ["doc comment: What ..."]),
    ("crates/flashcore-ir/src/a.rs", "/// Whether it is.", ["doc comment: Whether ..."]),
    ("crates/flashcore-ir/src/a.rs", "/// How many there are.", ["doc comment: How ..."]),
    ("crates/flashcore-ir/src/a.rs", "/// A register.\n/// What it holds, a kernel decides.", []),
    ("crates/flashcore-ir/src/a.rs", "// What follows is the table.", []),
    ("crates/flashcore-ir/src/a.rs", "/// True if the KV range is empty.", []),
    ("crates/flashcore-ir/src/a.rs", "// Bytes behind the end.", ["behind"]),
    ("crates/flashcore-cuda/src/a.rs", "// Sound bytes behind a link.", []),
    ("notebook/a.md", "One behind the other.", []),
    ("notebook/a.md", "The copy engine stores it.", ["copy engine"]),
    ("docs/hopper.md", "Warpgroups take turns at products.", ["turns"]),
    ("docs/workbench.md", "`compare` takes turns between A and B.", []),
    ("docs/a.md", "Rescale overlapped with QK.", []),
    ("docs/a.md", "Rescaling that is not hidden costs time.", ["hidden rescale"]),
    ("crates/flashcore-kernels/src/a.rs", "use crate::Specialisation;", ["Specialisation"]),
    ("crates/flashcore-bench/src/a.rs", "let config = Config::tuned(problem, arch);", ["tuned"]),
    ("docs/workbench.md", "`flashcore tune` stores the tuned config.", []),
    ("crates/flashcore-bench/src/a.rs", "// The same for a whole tile.", []),
    ("docs/a.md", "Tensor copies fill both stages.", ["tensor copy"]),
    ("docs/a.md", "Outputs are stored by copies.", ["stores by copy"]),
    ("docs/a.md", "An unannounced copy.", ["announce"]),
    ("crates/flashcore-kernels/src/a.rs", "ring.wait_until_full(k);", ["wait until full"]),
    ("docs/a.md", "The stage is let go of.", ["let go of"]),
    ("docs/a.md", "Let the driver go on.", []),
    ("docs/a.md", "The warp lets go of the stage.", ["let go of"]),
    ("crates/flashcore-kernels/src/a.rs", "cursor.leave(k);", ["leave a stage"]),
    ("crates/flashcore-kernels/src/a.rs", "struct Ring;", ["Ring"]),
    ("crates/flashcore-kernels/src/a.rs", "struct Supply;", ["Supply"]),
    ("crates/flashcore-kernels/src/attention/a.rs", "struct Stream;", ["Stream of keys"]),
    ("crates/flashcore-cuda/src/a.rs", "struct Stream;", []),
    ("docs/a.md", "There are two places for the query.", ["place of a stage"]),
    ("docs/a.md", "This is the only place where it is decided.", []),
    ("crates/flashcore-kernels/src/a.rs", "bytes <= ROOM", ["room"]),
    ("crates/flashcore-kernels/src/a.rs", "struct Rounded;", ["Rounded"]),
    ("docs/a.md", "A running maximum and sum per row.", ["running maximum"]),
    ("docs/a.md", "The maximum of both numbers.", []),
    ("docs/a.md", "The neighbours of a config.", ["neighbours"]),
    ("docs/a.md", "Neighbouring CTAs read the same keys.", []),
    ("crates/flashcore/src/a.rs", "let addresses = brought(buffers);", ["brought"]),
    ("docs/a.md", "A third stage brought nothing.", []),
    ("crates/flashcore-kernels/src/a.rs", "plan.with_at_most(132)", ["with_at_most"]),
    ("crates/flashcore-kernels/src/a.rs", "StepsConfig { .. }", ["steps kernel"]),
    ("crates/flashcore-kernels/src/a.rs", "mod by_length;", ["ByLength"]),
    ("crates/flashcore-kernels/src/a.rs", "struct Schedule;", ["Schedule"]),
    ("crates/flashcore-kernels/src/a.rs", "struct Ticket;", ["Ticket"]),
    ("crates/flashcore-kernels/src/a.rs", "struct QueryTile;", ["QueryTile"]),
    ("crates/flashcore-kernels/src/a.rs", "struct Found;", ["Found"]),
    ("crates/flashcore-kernels/src/a.rs", "mod tile_ranges;", ["tile ranges"]),
    ("crates/flashcore-kernels/src/a.rs", "let keys_anywhere = true;", ["rows/keys anywhere"]),
    ("crates/flashcore-kernels/src/a.rs", "key_groups: 2,", ["key groups"]),
    ("crates/flashcore-kernels/src/a.rs", "key_warps: 2,", ["key warps"]),
    ("crates/flashcore-kernels/src/a.rs", "fn send(k: &mut Builder) {}", ["send/receive"]),
    ("crates/flashcore-kernels/src/a.rs", "Packing::KeyHead => 1,", ["Packing::KeyHead"]),
    ("crates/flashcore/src/a.rs", "outputs.log_sum_exp", ["log_sum_exp"]),
    ("docs/a.md", "The log-sum-exp (LSE) of each row.", []),
    ("crates/flashcore/src/a.rs", "problem.number_table = 3;", ["number_table"]),
    ("crates/flashcore-cpu/src/a.rs", "mod along;", ["along"]),
    ("crates/flashcore-cpu/src/a.rs", "mod weave;", ["weave"]),
    ("crates/flashcore-cpu/src/a.rs", "// Values are asked for ahead of time.", ["asks along"]),
    ("crates/flashcore-ir/src/a.rs", "/// That of the warp.", ["doc comment: That of ..."]),
    ("crates/flashcore-ir/src/a.rs", "/// That which follows.", ["doc comment: That which ..."]),
]


def self_test():
    """Runs the cases, of which each rule needs one; returns the number of mistakes."""
    wrong = 0
    for path, text, expected in CASES:
        found = sorted(rule for _, rule, _, _ in check(path, text))
        if found != sorted(expected):
            wrong += 1
            print(f"{path}: {text!r}: found {found}, expected {sorted(expected)}", file=sys.stderr)
    covered = {rule for _, _, rules in CASES for rule in rules}
    for rule in [rule for rule, _, _, _ in WORDS if rule not in covered]:
        wrong += 1
        print(f"{rule}: no case must be caught by it", file=sys.stderr)
    print(f"{len(CASES)} cases and {len(WORDS)} rules, {wrong} wrong")
    return wrong


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("paths", nargs="*", default=["."], help="files or folders, from the root of the repository")
    parser.add_argument("--count", action="store_true", help="totals per rule")
    parser.add_argument("--self-test", action="store_true", help="check the rules themselves")
    arguments = parser.parse_args()
    if arguments.self_test:
        return 1 if self_test() else 0
    totals = {}
    for path in files(arguments.paths):
        with open(os.path.join(ROOT, path), encoding="utf-8") as file:
            text = file.read()
        for number, rule, found, use in check(path, text):
            totals[rule] = totals.get(rule, 0) + 1
            if not arguments.count:
                print(f"{path}:{number}: {found} -> {use}")
    if arguments.count:
        for rule, total in sorted(totals.items(), key=lambda item: -item[1]):
            print(f"{total:6} {rule}")
    print(f"{sum(totals.values())} findings", file=sys.stderr)
    return 1 if totals else 0


if __name__ == "__main__":
    try:
        sys.exit(main())
    except BrokenPipeError:
        sys.exit(1)
