"""Training on a Ray cluster: an actor on each node starts torchrun there (docs/ray.md).

    python deploy/ray_train.py --name night --nodes 2 --nproc-per-node 8 --data coco.yaml --cfg yolov5s.yaml
    python deploy/ray_train.py --name try --nodes 2 --strategy PACK --data shapes.yaml --device cpu    # one machine

Other flags are those of train.py. The same command starts the run of --project and --name, or resumes it.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import select
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any, cast

# Under `uv run` Ray would build the environment again on every node.
os.environ["RAY_ENABLE_UV_RUN_RUNTIME_ENV"] = "0"
import ray
from ray.exceptions import RayActorError
from ray.util.placement_group import placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy as Place

from tessera.utils.checkpoints.format import load_any_checkpoint
from tessera.utils.text import strict_json

LOST = -1  # exit code of a command whose actor is gone
SHUTDOWN_S = 100  # for ranks to write their checkpoint


@ray.remote
class Node:
    """Actor that runs one command at a time on its node; the kernel sends it SIGTERM when the actor dies."""

    def __init__(self, run: str) -> None:
        self.mark = f"RAY_TRAIN_RUN={run}".encode()  # identifies its processes
        self.env = {**os.environ, "RAY_TRAIN_RUN": run}

    def address(self) -> tuple[str, int]:
        with socket.socket() as probe:
            probe.bind(("", 0))
            return ray.util.get_node_ip_address(), probe.getsockname()[1]

    def start(self, arguments: list[str], cwd: str) -> None:
        self.output, end = os.pipe()
        command = ["setpriv", "--pdeathsig", "TERM", sys.executable, *arguments]
        self.process = subprocess.Popen(
            command, cwd=cwd, env=self.env, stdin=subprocess.DEVNULL, stdout=end, stderr=end, start_new_session=True
        )
        os.close(end)

    def poll(self) -> tuple[bytes, int | None]:
        """Return new output, after at most a second, and the exit code after the end of the output."""
        code = self.process.poll()
        if not select.select([self.output], [], [], 1)[0]:
            return b"", code  # other processes may still hold the pipe
        printed = os.read(self.output, 1 << 20)
        return printed, None if printed else self.process.wait()

    def stop(self) -> None:
        self.process.terminate()

    def left_over(self, kill: bool) -> list[str]:
        """Return the processes of the run that do not end in time, not even when they are killed."""
        found = self.marked_after(SHUTDOWN_S + 20)
        if found and kill:
            subprocess.run(["kill", "-KILL", *found], check=False)
            found = self.marked_after(20)
        return found

    def marked_after(self, seconds: float) -> list[str]:
        def is_marked(process: Path) -> bool:
            with contextlib.suppress(OSError):  # it has ended, or belongs to another user
                return self.mark in (process / "environ").read_bytes().split(b"\0")
            return False

        end = time.monotonic() + seconds
        while found := [path.name for path in Path("/proc").glob("[0-9]*") if is_marked(path)]:
            if time.monotonic() > end:
                break
            time.sleep(0.2)
        return found


def run_on(nodes: list[Any], commands: list[list[str]]) -> list[int]:
    """Run one command per node, and return the exit codes."""
    ray.get([node.start.remote(command, str(Path.cwd())) for node, command in zip(nodes, commands, strict=True)])
    try:
        return follow(nodes)
    except KeyboardInterrupt:
        for node in nodes:
            node.stop.remote()
        follow(nodes)
        raise


def follow(nodes: list[Any]) -> list[int]:
    """Print the output of all commands until they have ended; when one fails, stop the others."""
    codes: dict[int, int] = {}
    while len(codes) < len(nodes):
        answers = {number: node.poll.remote() for number, node in enumerate(nodes) if number not in codes}
        for number, answer in answers.items():
            try:
                printed, code = ray.get(answer)
            except RayActorError:
                printed, code = b"", LOST
            sys.stdout.buffer.write(printed)
            sys.stdout.flush()
            if code is not None:
                codes[number] = code
            for other in answers.keys() - codes.keys() if code else ():
                nodes[other].stop.remote()
    return [codes[number] for number in range(len(nodes))]


def check(nodes: list[Any], name: str, train: list[str]) -> None:
    """Exit if another job trains the run, or if a restart would not help."""
    # Without torchrun, which returns 1 for mistakes and failures alike.
    (code,) = run_on(nodes[:1], [[*train, "--check-data"]])
    if code in (1, 2):
        print("error: the flags or the dataset are wrong, see above. Not restarted.", file=sys.stderr)
        sys.exit(code)
    if any(left := ray.get([node.left_over.remote(kill=False) for node in nodes])):
        sys.exit(f"error: another job trains {name} (its processes by node: {left}). Give another --name.")


def attempt(nodes: list[Any], args: argparse.Namespace, train: list[str]) -> list[int]:
    """Train from the newest checkpoint, and return the nodes' exit codes."""
    if any(left := ray.get([node.left_over.remote(kill=True) for node in nodes])):
        sys.exit(f"error: processes of {args.name} do not end, not even by kill -9; by node: {left}.")
    address, port = ray.get(nodes[0].address.remote())
    torchrun = ["-m", "torch.distributed.run", f"--nnodes={args.nodes}", f"--nproc-per-node={args.nproc_per_node}"]
    torchrun += [f"--master-addr={address}", f"--master-port={port}"]
    return run_on(nodes, [[*torchrun, f"--node-rank={n}", *train, "--resume", "auto"] for n in range(args.nodes)])


def train(args: argparse.Namespace, flags: list[str]) -> dict[str, Any]:
    """Train to the end, with restarts; return the best weights, their epoch and metrics."""
    command = ["-m", "tessera", "train", *flags]
    command += ["--project", args.project, "--name", args.name, "--device", args.device]
    run, gpus = Path(args.project, args.name).absolute(), 0 if args.device == "cpu" else args.nproc_per_node
    variables = {
        "OMP_NUM_THREADS": str(max(1, args.cpus // args.nproc_per_node)),
        "TORCH_ELASTIC_SHUTDOWN_TIMEOUT": str(SHUTDOWN_S),
        "RAY_kill_child_processes_on_worker_exit": "0",  # SIGKILL would prevent the checkpoint
    }
    options = {"num_cpus": args.cpus, "num_gpus": gpus, "runtime_env": {"env_vars": variables}}
    group = placement_group([{"CPU": args.cpus, "GPU": gpus}] * args.nodes, strategy=args.strategy)

    def actors() -> list[Any]:
        print(f"Waiting for {args.nodes} nodes with {args.cpus} CPUs and {gpus} GPUs", flush=True)
        places = [Place(group, number) for number in range(args.nodes)]
        make = cast(Any, Node).options  # ray adds it to the class
        return [make(scheduling_strategy=place, **options).remote(str(run)) for place in places]

    nodes = actors()
    try:
        check(nodes, args.name, command)
    except RayActorError:
        sys.exit("error: a node was lost before the training began. The same command begins it.")
    for restarts in range(args.max_restarts + 1):
        try:
            codes = attempt(nodes, args, command)
        except RayActorError:
            codes = [LOST]
        if not any(codes):
            weights = next(path for name in ("best.pt", "last.pt") if (path := run / "weights" / name).is_file())
            best = load_any_checkpoint(weights)
            return {"weights": str(weights), "epoch": best["epoch"], "metrics": best["metrics"]}
        for node in nodes:
            ray.kill(node)
        ended = f"the nodes ended with {codes}, where {LOST} is a lost one"
        if restarts < args.max_restarts:
            print(f"Restart {restarts + 1} of {args.max_restarts}: {ended}", flush=True)
            nodes = actors()
    sys.exit(f"error: {ended}, and --max-restarts {args.max_restarts} is used up. The same command resumes the run.")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(allow_abbrev=False, usage=__doc__)
    parser.add_argument("--name", required=True, help="of the run, in --project")
    parser.add_argument("--project", default="runs/train", help="on a disk that all nodes have at the same place")
    parser.add_argument("--nodes", type=int, default=1)
    parser.add_argument("--nproc-per-node", type=int, default=1, help="ranks of a node; each takes a GPU")
    parser.add_argument("--cpus", type=int, default=1, help="of a node")
    parser.add_argument("--device", default="", help="cpu = ranks without a GPU")
    parser.add_argument("--strategy", choices=("STRICT_SPREAD", "PACK"), default="STRICT_SPREAD")
    parser.add_argument("--max-restarts", type=int, default=3)
    known, others = parser.parse_known_args()
    ray.init(log_to_driver=False)
    received: list[int] = []

    def interrupt(number: int, _: object) -> None:
        received.append(number)
        raise KeyboardInterrupt  # ray.get lets it through; of a SystemExit it would lose the code

    signal.signal(signal.SIGTERM, interrupt)
    signal.signal(signal.SIGINT, interrupt)
    try:
        print(strict_json(train(known, others)))
    except KeyboardInterrupt:
        sys.exit(128 + received[0])
