"""The CI workflows: an action runs the code of one commit, because tags can be moved."""

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
