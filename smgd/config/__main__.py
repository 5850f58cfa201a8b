"""`python -m smgd.config docs|example`: print what is generated from the settings."""

from __future__ import annotations

import sys

from smgd.config.reference import docs, example

sys.stdout.write({"docs": docs, "example": example}[sys.argv[1]]())
