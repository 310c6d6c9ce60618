"""``python -m coli`` is ``coli``."""

import sys

from coli.cli.main import main

sys.exit(main())
