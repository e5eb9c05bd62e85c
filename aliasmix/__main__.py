"""`python -m aliasmix`: the same as the command `aliasmix`."""

import sys

from aliasmix.cli import main

if __name__ == "__main__":
    sys.exit(main())
