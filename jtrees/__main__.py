"""``python -m jtrees``: the command line."""

import sys

from jtrees.cli import main

sys.exit(main())
