"""`python -m stars_fast`: the command line."""

import sys

from stars_fast.cli import main

if __name__ == "__main__":
    sys.exit(main())
