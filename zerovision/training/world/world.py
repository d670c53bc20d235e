"""Joins and leaves the process group, and divides its ranks into a mesh.

This is the only module that chooses between NCCL and gloo.

Ranks along the last dimension of a mesh have consecutive numbers, so they are neighbors on the same machine.
"""

from __future__ import annotations

import contextlib
import dataclasses
import datetime
import errno
import os
import socket
import sys
import warnings
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

import torch
import torch.distributed as dist

from zerovision.training.base.control_groups import usable_cores
from zerovision.training.base.errors import UserError, one_line
from zerovision.training.base.heartbeat import RUN_ID_VARIABLE
from zerovision.training.base.units import cpu_ranks, plural
from zerovision.training.world.launchers import PORT_OF_NONE, launched_world
from zerovision.training.world.machine import check_chosen_interfaces, interface_towards, is_loopback, usable_gpus

BACKLOG = 4096
LOOPBACK = "lo"
COLLECTIVE_TIMEOUT = datetime.timedelta(minutes=30)


def open_store(
    address: str, port: int, timeout: datetime.timedelta, run_id: str, *, is_host: bool, is_alone: bool
) -> dist.Store:
    """Open the ranks' store on rank 0, and connect to it on all other ranks.

    Args:
        address: address of the store, on the host of rank 0.
        port: port of the store.
        timeout: how long to wait for other ranks, both now and in every request to the store.
        run_id: identifier of this start, used as the prefix of all keys, so that processes of another run or start that
            use the same port do not interfere.
        is_host: whether this is rank 0, which opens the store. The store listens only on this address, whereas
            PyTorch's store would listen on all addresses of the host.
        is_alone: whether all ranks run on one host.

    Raises:
        UserError: if the address is unknown.
        OSError: if the port is in use, although a launcher has found it free: with another port, a start may succeed.
    """
    descriptor = _listen(address, port, is_alone=is_alone) if is_host else None
    store = dist.TCPStore(address, port, None, is_host, timeout, wait_for_workers=False, master_listen_fd=descriptor)
    return dist.PrefixStore(run_id, store)


def _listen(address: str, port: int, *, is_alone: bool) -> int:
    """Return a socket that listens only on this address, or on all addresses if other hosts cannot reach this one."""
    try:
        family, kind, protocol, _, endpoint = socket.getaddrinfo(address, port, type=socket.SOCK_STREAM)[0]
    except socket.gaierror as error:
        raise UserError(f"the address that the ranks meet on, {address}: {error.strerror}.") from None
    if is_loopback(str(endpoint[0])) and not is_alone:  # Debian resolves a host's own name to 127.0.1.1
        endpoint = ("", port)
    for one in (endpoint, ("", port)):
        listener = socket.socket(family, kind, protocol)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            listener.bind(one)
            listener.listen(BACKLOG)
            return listener.detach()
        except OSError as error:
            listener.close()
            if error.errno == errno.EADDRINUSE:
                raise OSError(f"port {port} is in use, and was free when the launcher checked it.") from None
            if error.errno != errno.EADDRNOTAVAIL or one[0] == "":
                raise
            print(f"note: {address} is not an address of this machine: rank 0 listens on all of them", file=sys.stderr)
    raise AssertionError


@dataclass(frozen=True)
class World:
    """The position of this process among all ranks, or among the ranks of one mesh group.

    Attributes:
        rank: rank of this process, from 0.
        local_rank: index of this process among the ranks on its machine.
        local_size: number of ranks on this machine.
        size: number of ranks on all machines.
        device: device of this rank.
        signal_group: gloo group for small values and stop requests; None for a single rank.
        save_group: gloo group for the thread that writes checkpoints; None for a single rank and in mesh groups.
        group: process group for tensor collectives; None for the default group of all ranks.
        mesh: this rank's groups if the ranks form a mesh (see `form_mesh`): `data`, `replica`, and
            one group per dimension, named after its setting.
    """

    rank: int
    local_rank: int
    local_size: int
    size: int
    device: torch.device
    signal_group: dist.ProcessGroup | None = None
    save_group: dist.ProcessGroup | None = None
    group: dist.ProcessGroup | None = None
    mesh: Mapping[str, World] = field(default_factory=dict, hash=False)

    @property
    def is_main(self) -> bool:
        """Whether this is rank 0, the only rank that logs, and that writes files other than its checkpoint shards."""
        return self.rank == 0

    @property
    def data(self) -> World:
        """The ranks that read different images and have the same part of the model; all ranks if there is no mesh."""
        return self.mesh.get("data", self)

    @property
    def replica(self) -> World:
        """The ranks that share one copy of the model, and therefore read the same images."""
        return self.dimension("replica")

    def dimension(self, name: str) -> World:
        """Return this rank's group along a mesh dimension other than `data`."""
        return self.mesh.get(name) or self.alone()

    def __deepcopy__(self, _copied: dict[int, Any]) -> World:
        """Return this object itself, because the same ranks compute a copied layer."""
        return self

    def alone(self) -> World:
        """Return a world that contains only this rank."""
        return World(0, 0, 1, 1, self.device)

    def units(self) -> tuple[str, str]:
        """Return phrases for one unit that reads its own images and for all units, such as 'GPU' and '4 GPUs'."""
        unit = "GPU" if self.device.type == "cuda" else "CPU rank"
        ranks = self.size // self.data.size
        one, short = (unit, unit) if ranks == 1 else (f"group of {ranks} {unit}s", "group")
        return one, plural(self.data.size, short)

    def describe(self) -> str:
        """Return a short description of the ranks' hardware, network interface (on several machines) and mesh."""
        is_gpu = self.device.type == "cuda"
        interface = os.environ.get("NCCL_SOCKET_IFNAME" if is_gpu else "GLOO_SOCKET_IFNAME", "").removeprefix("=")
        network = f" on {interface}" if interface and self.size > self.local_size else ""
        divided = {name.partition("_")[0]: group.size for name, group in self.mesh.items() if name != "replica"}
        mesh = f", {' x '.join(f'{name} {size}' for name, size in divided.items())}" if divided else ""
        if is_gpu:
            return f"{self.size} x {torch.cuda.get_device_name(self.device)}{network}{mesh}"
        return f"{cpu_ranks(self.size)}{network}, {plural(torch.get_num_threads(), 'thread')} each{mesh}"


def start_world(*, deterministic: bool = False) -> World:
    """Join the process group, over NCCL on GPUs and gloo on CPUs; every rank must call this.

    Args:
        deterministic: whether to use PyTorch's deterministic algorithms; an operation without one emits a warning.

    Raises:
        UserError: if this machine has fewer GPUs than ranks, or GPUs that torch cannot use, or the master port is in
            use; see also `check_chosen_interfaces`.
        OSError: if this rank cannot connect to the others.
    """
    rank, local_rank, local_size, size = launched_world()
    _configure_libraries(deterministic=deterministic)
    device = _choose_device(local_rank, local_size)
    is_alone = size == local_size
    if size > 1:
        check_chosen_interfaces(os.environ, has_gpus=device.type == "cuda")
    _choose_interface(is_alone=is_alone)
    backend, bound_to = ("nccl", device) if device.type == "cuda" else ("gloo", None)
    try:
        rendezvous = _rendezvous(rank, size, is_alone=is_alone)
        # Given a device, NCCL connects immediately, so connection failures surface here, and barriers use this GPU.
        dist.init_process_group(backend, timeout=COLLECTIVE_TIMEOUT, device_id=bound_to, **rendezvous)
    except dist.DistNetworkError as error:
        if "EADDRINUSE" not in str(error):
            raise OSError(f"this rank could not join the others: {one_line(error)}") from None
        port = os.environ.get("MASTER_PORT")
        raise UserError(f"port {port} is in use: choose a free one with --master_port or MASTER_PORT.") from None
    except dist.DistBackendError as error:
        if "Duplicate GPU" not in str(error):
            raise
        raise UserError(
            "several ranks share one GPU: assign each its own (srun --gpus-per-task=1), or all GPUs to every rank."
        ) from None
    # Sent over gloo between CPUs, small values and stop requests never wait for a GPU's queue. The thread that writes
    # checkpoints has its own group, because it runs concurrently.
    signal_group, save_group = (
        cast(dist.ProcessGroup, dist.new_group(backend="gloo")) if size > 1 else None for _ in range(2)
    )
    return World(rank, local_rank, local_size, size, device, signal_group, save_group)


def stop_world() -> None:
    """Leave the process group; every rank must call this."""
    if dist.is_initialized():
        dist.destroy_process_group()


def _rendezvous(rank: int, size: int, *, is_alone: bool) -> dict[str, Any]:
    """Return the arguments of `init_process_group` for joining the group; {} for PyTorch's own rendezvous.

    Our launchers assign an ID to every start. It is removed from the environment here, so that a rank's child processes
    do not inherit it. See `open_store` for errors.
    """
    run_id = os.environ.pop(RUN_ID_VARIABLE, "")
    if size == 1:
        return {"store": dist.HashStore(), "rank": 0, "world_size": 1}  # opens no port
    if not run_id:
        return {}
    address, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    store = open_store(address, port, COLLECTIVE_TIMEOUT, run_id, is_host=rank == 0, is_alone=is_alone)
    return {"store": store, "rank": rank, "world_size": size}


def _choose_interface(*, is_alone: bool) -> None:
    """Set the interface of gloo and NCCL to the interface that leads to the master, unless it is already set.

    By default, gloo uses the address of the host's own name: 127.0.1.1 on Debian, or one that others may not reach.
    """
    if is_alone:
        if any(name == LOOPBACK for _, name in socket.if_nameindex()):
            os.environ.setdefault("GLOO_SOCKET_IFNAME", LOOPBACK)  # NCCL does not use loopback
        return
    interface = interface_towards(os.environ.get("MASTER_ADDR", ""))
    if interface:
        os.environ.setdefault("GLOO_SOCKET_IFNAME", interface)
        os.environ.setdefault("NCCL_SOCKET_IFNAME", f"={interface}")  # exactly this interface, not a prefix


def _configure_libraries(*, deterministic: bool) -> None:
    """Set PyTorch's flags and the environment variables of its libraries; call this before the first use of CUDA."""
    if "RANK" not in os.environ:
        # Without these variables, some libraries look for MPI; nothing listens on this port.
        os.environ.update(RANK="0", LOCAL_RANK="0", WORLD_SIZE="1", MASTER_ADDR="127.0.0.1", MASTER_PORT=PORT_OF_NONE)
    # Otherwise, the last bit of MKL's matrix products may depend on the address of a matrix.
    os.environ.setdefault("MKL_CBWR", "AUTO")
    with contextlib.suppress(RuntimeError):  # raised if there is no home folder
        os.environ.setdefault("TORCHINDUCTOR_CACHE_DIR", str(Path("~/.cache/zerovision/compiled").expanduser()))
    # Otherwise, the profiler's library logs every start, and logs an error if there is no GPU.
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")
    use_exact_fp32()
    # Let cuDNN choose kernels by its heuristics. Timing all kernels adds up to half a minute to the start of a run, and
    # gained nothing; see docs/dev/performance.md.
    torch.backends.cudnn.benchmark = False
    if deterministic:  # as in https://docs.pytorch.org/docs/stable/notes/randomness.html
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
        torch.use_deterministic_algorithms(True, warn_only=True)
        # Filling new memory would only help to debug reads of uninitialized tensors, and costs time.
        torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]


def _choose_device(local_rank: int, local_size: int) -> torch.device:
    """Return this rank's GPU; without GPUs, return the CPU, and limit this rank's threads to its share of the cores."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the error below explains the problem in one line
        has_gpu = torch.cuda.is_available()
    if not has_gpu:
        _refuse_unusable_gpus()
        # Otherwise, 2 ranks with 2 threads each took 15 times as long on 2 cores.
        if "OMP_NUM_THREADS" not in os.environ:
            torch.set_num_threads(max(1, usable_cores() // local_size))
        return torch.device("cpu")
    present = torch.cuda.device_count()
    # As under `srun --gpus-per-task=1`.
    sees_its_own_alone = present == 1 and bool(os.environ.get("CUDA_VISIBLE_DEVICES"))
    if local_size > present and not sees_its_own_alone:
        raise UserError(f"{local_size} GPUs requested, but only {present} present: request fewer.")
    device = torch.device("cuda", 0 if sees_its_own_alone else local_rank)
    torch.cuda.set_device(device)
    return device


def _refuse_unusable_gpus() -> None:
    """Raise a UserError with torch's reason if this machine has visible GPUs that torch cannot use."""
    gpus = usable_gpus()
    if not gpus:  # also if CUDA_VISIBLE_DEVICES is empty, which selects the CPU
        return
    try:
        torch.cuda.init()
    except (AssertionError, RuntimeError) as error:
        reason = one_line(error).rstrip(".")
        raise UserError(
            f"torch {torch.__version__} cannot use the {plural(len(gpus), 'GPU')} of this machine: {reason}. Fix that "
            "(scripts/doctor.py helps), or compute on the CPU: put CUDA_VISIBLE_DEVICES= before the command."
        ) from None


def use_exact_fp32() -> None:
    """Disable TF32, so that GPUs compute fp32 operations in full precision; this has no effect on a CPU.

    TF32 keeps 10 of the 23 mantissa bits (https://docs.pytorch.org/docs/stable/notes/cuda.html), and cuDNN uses it by
    default. Under autocast, nearly every operation that TF32 speeds up runs in 16 bits anyway. This function sets
    PyTorch's older flags, because torch.compile in PyTorch 2.11 reads them, and reading them raises an error once the
    newer flags (`fp32_precision`) differ. Setting the older flags also sets the newer flags.
    """
    torch.backends.cuda.matmul.allow_tf32 = False
    torch.backends.cudnn.allow_tf32 = False


def form_mesh(world: World, mesh: Mapping[str, int]) -> World:
    """Return the world with groups of ranks that share one copy of the model; a collective.

    Args:
        world: the ranks.
        mesh: setting -> number of ranks that share a model in this way. The product of these numbers must divide the
            number of ranks. If all are 1, the world is returned unchanged.
    """
    mesh = {name: size for name, size in mesh.items() if size > 1}
    if not mesh:
        return world
    numbers = torch.arange(world.size).view(-1, *mesh.values())
    data = along(0, numbers, world)
    dimensions = {name: along(dimension, numbers, world) for dimension, name in enumerate(mesh, 1)}
    replica = next(iter(dimensions.values())) if len(mesh) == 1 else along(1, numbers.flatten(1), world)
    return dataclasses.replace(world, mesh={"data": data, "replica": replica, **dimensions})


def along(dimension: int, numbers: torch.Tensor, world: World) -> World:
    """Return this rank's group along one dimension of a tensor that contains all rank numbers; a collective."""
    rows = numbers.movedim(dimension, -1).reshape(-1, numbers.shape[dimension]).tolist()
    own = next(row for row in rows if world.rank in row)
    if len(own) == 1:
        return world.alone()
    signal_group = _own_group(rows, "gloo")
    group = _own_group(rows, "nccl") if world.device.type == "cuda" else signal_group
    first = world.rank - world.local_rank
    here = [rank for rank in own if first <= rank < first + world.local_size]
    return World(
        own.index(world.rank), here.index(world.rank), len(here), len(own), world.device, signal_group, group=group
    )


def _own_group(rows: list[list[int]], backend: str) -> dist.ProcessGroup:
    """Create groups that together contain all ranks, and return this rank's group; a collective."""
    return cast(dist.ProcessGroup, dist.new_subgroups_by_enumeration(rows, COLLECTIVE_TIMEOUT, backend=backend)[0])
