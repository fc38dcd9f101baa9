"""`python -m ornstein`: the command line."""

import sys

from ornstein.cli import main

if __name__ == "__main__":
    sys.exit(main())
