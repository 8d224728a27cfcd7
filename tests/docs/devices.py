"""The code blocks of the page about loops on several devices; each is a complete objective."""

from tests.docs.recipes import blocks

EXAMPLES = blocks("loops-on-devices", "python")
CHANGES = blocks("loops-on-devices", "diff")
