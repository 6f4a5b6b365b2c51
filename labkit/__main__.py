"""``python -m labkit``."""

import sys

from labkit.lab.command_line import main

sys.exit(main())
