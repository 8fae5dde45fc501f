"""``python -m elastic_rs.run``: the command ``elastic-run``."""

import sys

from elastic_rs.run import main

sys.exit(main())
