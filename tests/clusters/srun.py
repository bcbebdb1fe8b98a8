"""What srun does, on one machine: starts a command SLURM_NTASKS times, forwards SIGTERM, exits with the highest code.

A command that is torchrun is started once for each of SLURM_NNODES nodes.
"""

import os
import signal
import subprocess
import sys

command = sys.argv[1:]
while command[0].startswith("--"):
    del command[0]
count = int(os.environ["SLURM_NNODES" if command[0] == "torchrun" else "SLURM_NTASKS"])
tasks = []
signal.signal(signal.SIGTERM, lambda *_: [task.terminate() for task in tasks])
for k in range(count):
    place = {"SLURM_PROCID": str(k), "SLURM_LOCALID": str(k), "SLURM_NODEID": str(k)}
    tasks.append(subprocess.Popen(command, env=os.environ | place))
codes = [task.wait() for task in tasks]
sys.exit(max(128 - code if code < 0 else code for code in codes))
