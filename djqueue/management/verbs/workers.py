"""`manage.py djqueue workers`."""

from djqueue.client import get_storage
from djqueue.core.workers import COMMANDS, DUMP, QUIET, RESUME, STOP
from djqueue.operations.workercontrol import control, described, listing

from .base import Options, Output, Verbs

CONTROL_HELP = {
    QUIET: "Make a worker stop claiming jobs.",
    RESUME: "Make a quiet worker claim jobs again.",
    STOP: "Stop a worker after its running jobs, as SIGTERM does.",
    DUMP: "Print the stacks of a worker's threads and tasks.",
}

WORKERS = """List the workers, each with its state, its process and its running jobs; or control one worker.

A worker is a worker process of `runworkers` (--processes starts several), or a Worker in another program.
Below it are the processes in which it runs isolated and subprocess jobs. Its entry begins with the ID that
the options take. With the database storage, the process of one of the workers is the leader, which sweeps for
all of them.

--quiet makes a worker stop claiming and finish its running jobs. --resume makes it claim again. --stop stops
it as SIGTERM does; a service manager may start a new one. --dump prints the stack of each of its threads
and tasks.

A worker usually receives a command at once, and at the latest with its next heartbeat (HEARTBEAT).
"""


def add(verbs: Verbs) -> None:
    """Declare the verb."""
    parser = verbs.add("workers", workers, WORKERS)
    commands = parser.add_mutually_exclusive_group()
    for command, meaning in CONTROL_HELP.items():
        commands.add_argument(f"--{command}", metavar="ID", help=meaning)


def workers(options: Options, output: Output) -> None:
    """List the workers, or control one."""
    storage = get_storage()
    for command in COMMANDS:
        if options[command]:
            answer = control(storage, command, options[command])
            output.document({"worker": options[command], "command": command, "answer": answer})
            output.line(answer)
            return
    infos = storage.workers.all()
    output.document([described(info) for info in infos])
    for line in listing(infos):
        output.line(line)
