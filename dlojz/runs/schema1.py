"""The upgrade of events from schema 1, which older recordings use and which parsed labels."""

import re

from dlojz.runs.records import EVIDENCE

DECODER = re.compile(r"(decoder|road|nvJPEG): (.+)")  # of experiments/decoders.py
SIZE = re.compile(r"(channels|batch|classes) (\d+)")  # of experiments/multiples.py
REDUCTION = re.compile(r"(fp16|bf16), (allowed|refused)")  # of experiments/formats.py
BYTES = re.compile(r"\d+")  # of experiments/all_reduce.py


def upgraded(event: dict) -> dict:
    """Return an event of schema 1 as schema 2 would have written it."""
    if event["event"] == "measure":
        return event | _measure(event["what"])
    if event["event"] != "evidence":
        return event
    when = "whole" if event["when"] == "run" else event["when"]
    if when in EVIDENCE:
        return event | {"when": when}
    fields = {name: value for name, value in event.items() if name not in ("event", "when")}
    return {"event": "case", **_case(when, fields), **fields}


def _measure(label):
    """Return the fields of a measure that schema 1 wrote as one label."""
    if match := SIZE.fullmatch(label):
        return {"what": match[1], "x": int(match[2])}
    if BYTES.fullmatch(label):
        return {"what": "all_reduce", "x": int(label)}
    what, found, x = label.partition(" / ")
    match = REDUCTION.fullmatch(what)
    variant = {"what": match[1], "variant": match[2]} if match else {"what": what}
    return variant | ({"x": _number(x)} if found else {})


def _number(text):
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            pass
    return text


def _case(label, fields):
    """Return the fields of a case that schema 1 wrote as one label."""
    if match := DECODER.fullmatch(label):
        kind, name = match.groups()
        if kind != "nvJPEG":
            return {"case": name, "kind": kind}
        many = "one by one" if name == "1" else f"{name} in a batch"
        return {"case": f"nvJPEG, {many}", "kind": kind, "batch": int(name)}
    if "operations" in fields:  # of experiments/storage.py
        return {"case": label, "kind": label.partition(",")[0]}
    return {"case": label}
