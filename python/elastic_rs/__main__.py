"""``python -m elastic_rs``: the command ``elastic-rs``."""

import sys

from elastic_rs._cli import main

sys.exit(main())
