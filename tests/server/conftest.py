"""The browser of the viewer's tests serves the live page's as well."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.append(str(Path(__file__).resolve().parent.parent / "viewer"))
