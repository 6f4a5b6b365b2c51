"""Makes ``spawned`` importable here and in the processes that it spawns."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "measure"))
