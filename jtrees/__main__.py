"""``python -m jtrees``: the command line."""

import sys

from jtrees.cli import main

if __name__ == "__main__":
    sys.exit(main())
