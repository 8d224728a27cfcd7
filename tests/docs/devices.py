"""The blocks of the page of loops on several devices, each a whole objective."""

from tests.docs.recipes import blocks

EXAMPLES = blocks("devices", "python")
CHANGES = blocks("devices", "diff")
