"""`python -m qim`."""

from __future__ import annotations

import sys

from qim.app.cli import main

sys.exit(main())
