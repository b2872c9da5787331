"""A provisioned federation as real processes on this machine: mutual TLS on loopback, free ports, everything ended by process id."""

import contextlib
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import psutil
import yaml

from e2e.simulation import ROOT, edit, environment
from medflare.flare.flare_patches import quiet_ports

PATIENCE = 300.0  # seconds until a wait is given up; nothing but a failing test takes that long, also on a busy machine

SCRIPTS = ROOT / "poc_workspace"
SERVER = "localhost"
PEOPLE = {
    "admin": "admin@coordination.org",
    "lead": "lead@coordination.org",
    "member": "member@hospital-two.org",
    "it": "it@hospital-one.org",
}
HOUR = 3600.0  # seconds
_LAST_WORD = {"NVFLARE_CLIENT_OUTCOME_WAIT_TIMEOUT": "5"}  # see poc_workspace/start.sh


class ProvisionedFederation:
    """What poc_workspace/project.yml describes, with the sites and the port of a test.

    Attributes:
        folder: everything of the federation lies below it.
        kits: the folder of startup kits.
        clocks: party -> seconds by which the clock of its processes is ahead; those of all others are right.
    """

    def __init__(
        self, folder: Path, sites: Sequence[str], clocks: Mapping[str, float] | None = None
    ):
        self.folder = folder
        self.sites = tuple(sites)
        self.clocks = clocks or {}
        (self.port,) = quiet_ports(1)  # until the server listens, nobody else is handed this port
        self.kits = folder / "federation" / "medflare" / "prod_00"
        self._processes: dict[str, subprocess.Popen[bytes]] = {}
        self._begun: list[subprocess.Popen[str]] = []
        self._commands: subprocess.Popen[str] | None = None
        # This one, for every child.
        interpreter = os.pathsep.join(
            [str(Path(sys.executable).parent), os.environ.get("PATH", "")]
        )
        self.environment = environment(PATH=interpreter, HOME=str(folder), **_LAST_WORD)

    def kit(self, name: str) -> Path:
        """The startup kit of a site, the server or a person ("lead")."""
        return self.kits / PEOPLE.get(name, name)

    # -- set-up ------------------------------------------------------------------------------------------------------------

    def project(self, name: str) -> Path:
        """A project file of poc_workspace with the sites and the port of this federation."""
        project = yaml.safe_load((SCRIPTS / name).read_text())
        project["participants"] = [
            one
            for one in project["participants"]
            if one["type"] != "client" or one["name"] in self.sites
        ]
        for one in project["participants"]:
            if one["type"] == "server":
                one["fed_learn_port"] = self.port
        path = self.folder / "project.yml"
        path.write_text(yaml.safe_dump(project))
        return path

    def provision(self) -> None:
        path = self.project("project.yml")
        # Half a day ago: certificates are valid for a party whose clock is behind, too.
        with self.clock(-12 * HOUR):
            self.command(
                "medflare",
                "provision",
                path,
                "--workspace",
                self.folder / "federation",
                "--leave-root-key",
            )

    def send_small_counts(self) -> None:
        """Without `minimum_patients` of the kits: the plain loop, with which results are compared, has none."""
        for site in self.sites:
            edit(
                self.kit(site) / "local" / "medflare.json",
                lambda local: local.update(minimum_patients=0),
            )

    @contextlib.contextmanager
    def clock(self, ahead: float) -> Iterator[None]:
        """For a while all processes that are started have a clock that is ahead by so many seconds."""
        usual = self.environment
        self.environment = skewed(usual, ahead)
        try:
            yield
        finally:
            self.environment = usual

    def start(self, *names: str) -> None:
        """Start server or sites, each from its own kit in processes of its own, and wait until all of them are up."""
        signs = {name: self.launch(name) for name in names}
        for name, (log, start, sign) in signs.items():
            wait_until(partial(said, sign, log, start), f"{name} is not up, see {log}")

    def launch(self, name: str) -> tuple[Path, int, str]:
        """Start a party; returns its log, the length of that before, and what it says there once it is up."""
        kit = self.kit(name)
        log = kit / "log.txt"
        before = len(text_of(log))
        command = [str(kit / "startup" / "sub_start.sh"), "--once"]
        with (kit / "start.log").open("ab") as output:
            environment = (
                skewed(self.environment, self.clocks[name])
                if name in self.clocks
                else self.environment
            )
            self._processes[name] = subprocess.Popen(
                command,
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                cwd=kit,
            )
        return log, before, "Server started" if name == SERVER else "Successfully registered client"

    # -- work --------------------------------------------------------------------------------------------------------------

    def script(
        self, name: str, *arguments: Any, check: bool = True
    ) -> subprocess.CompletedProcess[str]:
        """Run a script of poc_workspace; its standard output and error are kept."""
        return self.command(SCRIPTS / name, *arguments, check=check)

    def command(self, *command: Any, check: bool = True) -> subprocess.CompletedProcess[str]:
        words = [str(word) for word in command]
        done = subprocess.run(
            words,
            env=self.environment,
            cwd=self.folder,
            capture_output=True,
            text=True,
            timeout=2 * PATIENCE,
        )
        assert not check or done.returncode == 0, (
            f"{words} ended with {done.returncode}:\n{done.stdout}\n{done.stderr}"
        )
        return done

    def begin(self, *command: Any) -> subprocess.Popen[str]:
        """Start a command of a person that goes on; its standard output and error come as one."""
        words = [str(word) for word in command]
        output: dict[str, Any] = {
            "stdout": subprocess.PIPE,
            "stderr": subprocess.STDOUT,
            "text": True,
        }
        self._begun.append(subprocess.Popen(words, env=self.environment, cwd=self.folder, **output))
        return self._begun[-1]

    def medflare(self, *command: Any, check: bool = True) -> subprocess.CompletedProcess[str]:
        """A command of medflare in a process that runs all of them; its standard output and error are kept."""
        words = [str(word) for word in command]
        if self._commands is None:
            script = Path(__file__).parent / "components" / "commands.py"
            self._commands = subprocess.Popen(
                [sys.executable, script],
                env=self.environment,
                cwd=self.folder,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
            )
        assert self._commands.stdin is not None and self._commands.stdout is not None
        self._commands.stdin.write(json.dumps(words) + "\n")
        self._commands.stdin.flush()
        answer = self._commands.stdout.readline()
        done = subprocess.CompletedProcess(words, *json.loads(answer))
        assert not check or done.returncode == 0, (
            f"{words} ended with {done.returncode}:\n{done.stdout}\n{done.stderr}"
        )
        return done

    def submit(self, job: Path) -> str:
        """Submit a job folder, as the lead does; returns the job's id."""
        return self.medflare("job", "submit", job, "--kit", self.kit("lead")).stdout.strip()

    def watch(self, job: str, check: bool = True) -> subprocess.CompletedProcess[str]:
        """Follow a job to its end, as the lead does."""
        words = ("job", "watch", job, "--kit", self.kit("lead"), "--timeout", PATIENCE)
        return self.medflare(*words, check=check)

    def fetch(self, job: str, folder: Path, check: bool = True) -> subprocess.CompletedProcess[str]:
        """Download the results of a job, as the lead does."""
        words = ("job", "fetch", job, "--kit", self.kit("lead"), "--out", folder)
        return self.medflare(*words, check=check)

    def status(self, job: str) -> str:
        """What FLARE's server has written down as the state of a job."""
        meta = self.kit(SERVER) / "storage" / "jobs" / job / "meta"
        return str(json.loads(meta.read_text())["status"])

    # -- faults and clean-up -----------------------------------------------------------------------------------------------

    def processes(self, name: str) -> list[psutil.Process]:
        """The party's own process and, below it, the processes of its jobs."""
        try:
            parent = psutil.Process(self._processes[name].pid)
            return [parent, *parent.children(recursive=True)]
        except (KeyError, psutil.NoSuchProcess):
            return []

    def kill(self, name: str) -> None:
        """kill -9 for a party and its jobs, as in a power cut."""
        for process in self.processes(name):
            process.kill()
        if name in self._processes:
            self._processes.pop(name).wait(10)

    def stop(self) -> None:
        for name in tuple(self._processes):
            self.kill(name)
        for process in (*self._begun, *filter(None, [self._commands])):
            process.kill()
            process.wait(10)

    @staticmethod
    def end_all_below(folder: Path) -> None:
        """Kill what commands started and left to itself: the processes that have the folder in their command line."""
        for process in psutil.process_iter(["cmdline"]):
            if process.pid != os.getpid() and any(
                str(folder) in word for word in process.info["cmdline"] or ()
            ):
                process.kill()


def skewed(environment: Mapping[str, str], ahead: float) -> dict[str, str]:
    """The environment of processes whose clock is ahead by so many seconds."""
    return {**environment, "CLOCK_SKEW": str(ahead)}


def wait_until(true: Callable[[], bool], otherwise: str, every: float = 0.25) -> None:
    """Look `every` so many seconds; fail with `otherwise` when `PATIENCE` is over."""
    deadline = time.monotonic() + PATIENCE
    while not true():
        assert time.monotonic() < deadline, otherwise
        time.sleep(every)


def said(words: str, log: Path, start: int = 0) -> bool:
    """Whether a log has the words, behind so many letters."""
    return words in text_of(log)[start:]


def text_of(path: Path) -> str:
    """A log's text; empty where there is none yet."""
    return path.read_text(errors="replace") if path.exists() else ""
