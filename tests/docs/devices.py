"""The blocks of the page of loops on several devices, each a whole objective."""

from tests.docs.recipes import blocks

EXAMPLES = blocks("loops-on-devices", "python")
CHANGES = blocks("loops-on-devices", "diff")
