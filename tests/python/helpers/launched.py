"""A module that ``elastic_rs.launch`` runs: says how it was started."""

import os
import sys

if __name__ == "__main__":
    spec = globals().get("__spec__")
    # In one piece, since the agent writes into the same file.
    print(" ".join(map(str, ["HERE", getattr(spec, "name", None), *sys.argv[1:], os.environ["RANK"]])), flush=True)
