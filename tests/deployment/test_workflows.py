"""Files of the repository that CI and security depend on: pinned actions, and the tests that SECURITY.md names."""

import re

from tests.deployment.machine import ROOT


def test_actions_are_pinned_by_commit() -> None:
    workflows = sorted((ROOT / ".github" / "workflows").glob("*.y*ml"))
    assert workflows
    for workflow in workflows:
        used = re.findall(r"uses:\s*(.+)", workflow.read_text())
        assert used
        assert [action for action in used if not re.fullmatch(r"[\w./-]+@[0-9a-f]{40}  # v[\d.]+", action)] == []
        assert re.search(r"^permissions:\n  contents: read$", workflow.read_text(), re.MULTILINE)


def test_each_defence_in_the_security_policy_has_tests() -> None:
    text = (ROOT / "SECURITY.md").read_text()
    table = text.split("## What is defended")[1].split("\n## ")[0]
    rows = [line for line in table.splitlines() if line.startswith("| ")][1:]
    assert len(rows) > 10
    for row in rows:
        named = re.findall(r"`(tests/[^`]+)`", row)
        assert named, row
        assert [path for path in named if not (ROOT / path).is_file()] == []
