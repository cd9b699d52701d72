"""Checks as JUnit XML, which CI systems show as tests."""

from __future__ import annotations

import re
from collections.abc import Sequence
from xml.etree import ElementTree

from zsim.study.check.rows import CheckRow, counts

_NOT_IN_XML = re.compile("[^\t\n\r\x20-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]")


def junit_xml(rows: Sequence[CheckRow]) -> str:
    """One test case per check. A miss is a failure. Inconclusive, known and not simulated checks are skipped
    with their reason.
    """
    outcomes = counts(rows)
    totals = {
        "tests": str(len(rows)),
        "failures": str(outcomes["fail"]),
        "errors": "0",
        "skipped": str(outcomes["inconclusive"] + outcomes["known"] + outcomes["skipped"]),
    }
    root = ElementTree.Element("testsuites", totals)
    suite = ElementTree.SubElement(root, "testsuite", {"name": "zsim check", **totals})
    for row in rows:
        names = {"classname": _clean(row.case), "name": _clean(row.name), "time": "0"}
        case = ElementTree.SubElement(suite, "testcase", names)
        if row.outcome == "fail":
            message = _clean(row.sentence or "past its tolerance")
            ElementTree.SubElement(case, "failure", {"message": message}).text = _clean(row.line)
        elif row.outcome != "pass":
            message = _clean(f"{row.outcome}: {row.sentence}")
            ElementTree.SubElement(case, "skipped", {"message": message})
    ElementTree.indent(root)
    return '<?xml version="1.0" encoding="UTF-8"?>\n' + ElementTree.tostring(root, encoding="unicode") + "\n"


def _clean(text: str) -> str:
    return _NOT_IN_XML.sub("?", text)
