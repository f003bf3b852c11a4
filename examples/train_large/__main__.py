"""The program; ``python -m examples.train_large --help`` describes it."""

import sys

from examples.train_large.command import main

sys.exit(main())
