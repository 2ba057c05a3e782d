"""``python -m kvpass``."""

import sys

from .cli import main

sys.exit(main())
