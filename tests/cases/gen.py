#!/usr/bin/env python3
"""Writes small nasty inputs for importers and mounts, each with the right answer beside it.

  gen.py --list [--json]
  gen.py --case NAME --out DIR     writes DIR/NAME/
  gen.py --all --out DIR           writes DIR/NAME/ for each case

Each folder holds expected.json and one or more inputs:
  oci/         an OCI image layout, reference "latest"
  rootfs.tar   the same single layer as a plain archive
  docker.tar   the same image as `docker save` writes it
  src/         a directory to import
Standard library only. Root is needed for kind "dir" (owners, devices, trusted.* attributes).
"""

import argparse
import importlib
import json
import os
import pkgutil
import shutil
import signal
import sys
import time

sys.dont_write_bytecode = True
HERE = os.path.dirname(os.path.abspath(__file__))
sys.path.insert(0, HERE)

import cases  # noqa: E402
from caselib import CASES, Ctx  # noqa: E402


def load():
    for module in sorted(m.name for m in pkgutil.iter_modules(cases.__path__)):
        importlib.import_module("cases." + module)


def generate(name, out):
    if os.path.exists(os.path.join(out, "expected.json")):
        shutil.rmtree(out)
    if os.path.exists(out):
        raise SystemExit("gen.py: %s is there and was not written by gen.py; give another --out" % out)
    context = Ctx(out, CASES[name])
    CASES[name]["function"](context)
    context.done()


def main():
    ap = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    ap.add_argument("--list", action="store_true")
    ap.add_argument("--json", action="store_true", help="with --list")
    ap.add_argument("--case")
    ap.add_argument("--all", action="store_true")
    ap.add_argument("--out")
    a = ap.parse_args()
    load()
    pick = list(CASES)
    if a.list and a.json:
        print(json.dumps([{k: v for k, v in CASES[n].items() if k != "function"} for n in pick], indent=1))
        return 0
    if a.list:
        for n in pick:
            print("%-26s %-10s %-4s %s" % (n, CASES[n]["group"], CASES[n]["kind"], CASES[n]["title"]))
        return 0
    if not a.out:
        ap.error("--out is needed")
    if a.case:
        if a.case not in CASES:
            ap.error("no such case: " + a.case)
        pick = [a.case]
    elif not a.all:
        ap.error("--case or --all is needed")
    elif os.geteuid() != 0:
        left_out = [n for n in pick if CASES[n]["kind"] == "dir"]
        print("gen.py: not root, left out: " + " ".join(left_out), file=sys.stderr)
        pick = [n for n in pick if n not in left_out]
    os.makedirs(a.out, exist_ok=True)
    for n in pick:
        start = time.monotonic()
        generate(n, os.path.join(a.out, n))
        took = time.monotonic() - start
        if took > 2:
            print("%s took %.1f s" % (n, took), file=sys.stderr)
    print("%d cases in %s" % (len(pick), a.out))
    return 0


if __name__ == "__main__":
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)
    sys.exit(main())
