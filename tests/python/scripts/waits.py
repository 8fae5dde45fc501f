"""A worker without torch that changes in place: it tells its worlds, and waits for the end of each.

It says ``WORLD rank=... world=... step=0 pid=...`` and parks with a commit, as a worker that has been synchronised.
"""

import os

from elastic_rs._elastic_rs import WorkerChannel

channel = WorkerChannel.connect(os.environ["ELASTIC_RS_AGENT"], 30.0)
world = channel.world()
while True:
    channel.synchronised()
    place = world.variables
    line = f"WORLD rank={place['RANK']} world={place['WORLD_SIZE']} step=0 pid={os.getpid()}"
    os.write(1, f"{line} generation={world.generation} restarts={place['TORCHELASTIC_RESTART_COUNT']}\n".encode())
    while not channel.failed_within(3600.0):
        pass
    world = channel.park(5)
