"""A cluster of SLURM with two nodes, both on this machine, in a folder of its own."""

import contextlib
import getpass
import os
import secrets
import shutil
import signal
import socket
import subprocess
import threading
import time
from pathlib import Path

import pytest

# Debian keeps daemons where not every user looks.
PATH = f"{os.environ['PATH']}:/usr/sbin"
DAEMONS = {name: shutil.which(name, path=PATH) for name in ("munged", "slurmctld", "slurmd")}
NODES = "127.0.0.1", "127.0.0.2"

# The nodes have addresses as names, so that nothing needs to resolve them, and more processors than
# the machine may have. Devices of every machine stand for GPUs, which SLURM only counts.
CONFIGURATION = """
ClusterName=test
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={ports[0]}
SlurmUser={user}
SlurmdUser={user}
AuthInfo=socket={folder}/munge.socket
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/%n.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/%n.log
MailProg=/bin/true
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
SlurmdParameters=config_overrides
GresTypes=gpu
FirstJobId={first_job}
NodeName={nodes[0]} NodeAddr={nodes[0]} Port={ports[1]} CPUs=4 Gres=gpu:2
NodeName={nodes[1]} NodeAddr={nodes[1]} Port={ports[2]} CPUs=4 Gres=gpu:2
PartitionName=all Nodes=ALL Default=YES
"""
GPUS = "Name=gpu File=/dev/null\nName=gpu File=/dev/zero\n"


class Cluster:
    """The daemons, which live as long as the context."""

    def __init__(self, folder):
        self.folder = folder
        self.variables = {"SLURM_CONF": str(folder / "slurm.conf")}
        self._daemons = []

    def __enter__(self):
        settings = {
            "folder": self.folder,
            "host": socket.gethostname(),
            "user": getpass.getuser(),
            "ports": _free_ports(3),
            "nodes": NODES,
            # JAX takes the port of process 0 from it.
            "first_job": 1 + secrets.randbelow(4000),
        }
        (self.folder / "slurm.conf").write_text(CONFIGURATION.format(**settings))
        (self.folder / "gres.conf").write_text(GPUS)
        (self.folder / "state").mkdir()
        (self.folder / "munge.key").write_bytes(secrets.token_bytes(64))
        (self.folder / "munge.key").chmod(0o600)
        files = {"key-file": "key", "seed-file": "seed", "pid-file": "pid", "socket": "socket"}
        places = [f"--{name}={self.folder}/munge.{file}" for name, file in files.items()]
        try:
            self._start("munged", "--foreground", "--force", *places)
            self.until("munged listens", (self.folder / "munge.socket").exists)
            self._start("slurmctld", "-D")
            for node in NODES:
                self._start("slurmd", "-D", "-N", node)
            self.until("two nodes idle", lambda: self.ask("sinfo", "-h", "-o%T %D") == "idle 2")
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_):
        for daemon in self._daemons:  # They start no others from then on.
            daemon.kill()
            daemon.wait()
        self.until("all processes have ended", self._end_the_others)

    def _start(self, name, *arguments):
        with open(self.folder / f"{name}.output", "ab") as output:
            daemon = subprocess.Popen(
                [DAEMONS[name], *arguments],
                cwd=self.folder,
                env={**os.environ, **self.variables},
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
            )
        self._daemons.append(daemon)

    def _end_the_others(self):
        """Kills jobs and what the daemons have started; returns whether there was none."""
        mark = f"SLURM_CONF={self.variables['SLURM_CONF']}\0".encode()
        others = []
        for folder in Path("/proc").glob("[0-9]*"):
            with contextlib.suppress(OSError):  # It has ended by itself.
                if mark in (folder / "environ").read_bytes():
                    others.append(folder.name)
                    os.kill(int(folder.name), signal.SIGKILL)
        return not others

    def ask(self, *command, **options):
        """Runs a command of SLURM; what it prints."""
        options = {"env": {**os.environ, **self.variables}, "timeout": 60, **options}
        done = subprocess.run(command, capture_output=True, text=True, **options)
        return done.stdout.strip()

    def until(self, what, is_so, *, seconds=60, logs=()):
        """Waits until something is so, and fails with all logs if that takes too long."""
        end, never = time.monotonic() + seconds, threading.Event()
        while not is_so():
            if time.monotonic() > end:
                paths = [*self.folder.glob("*.log"), *self.folder.glob("*.output"), *logs]
                texts = [f"{path.name}:\n{path.read_text()}" for path in paths if path.exists()]
                pytest.fail("\n".join([f"{seconds} s have passed until {what}.", *texts]))
            never.wait(0.1)


def _free_ports(n):
    with contextlib.ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(n)]
        for each in sockets:
            each.bind(("127.0.0.1", 0))
        return [each.getsockname()[1] for each in sockets]
