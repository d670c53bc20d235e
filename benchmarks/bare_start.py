"""What benchmarks/startup.py runs against: the shortest script that trains, up to its first optimizer step.

OMP_NUM_THREADS=1 torchrun --nproc_per_node=2 benchmarks/bare_start.py ddp
OMP_NUM_THREADS=1 deepspeed --num_gpus=2 benchmarks/bare_start.py deepspeed
"""

from __future__ import annotations

import argparse
import os
import time

import torch
import torchvision
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler
from torchvision import transforms

CLASSES, IMAGE_SIZE, BATCH_SIZE = 10, 32, 16


def ddp_step(model: nn.Module, images: torch.Tensor, labels: torch.Tensor) -> float:
    """Train one step as everybody writes it first; return the loss."""
    torch.distributed.init_process_group("nccl" if torch.cuda.is_available() else "gloo")
    parallel = DistributedDataParallel(model)
    optimizer = torch.optim.AdamW(parallel.parameters())
    loss = nn.functional.cross_entropy(parallel(images), labels)
    loss.backward()
    optimizer.step()
    return loss.item()


def deepspeed_step(model: nn.Module, images: torch.Tensor, labels: torch.Tensor) -> float:
    """The same with DeepSpeed's ZeRO 1 as its introduction writes it; return the loss."""
    import deepspeed

    config = {"train_micro_batch_size_per_gpu": BATCH_SIZE, "zero_optimization": {"stage": 1}}
    engine, *_ = deepspeed.initialize(model=model, optimizer=torch.optim.AdamW(model.parameters()), config=config)
    loss = nn.functional.cross_entropy(engine(images), labels)
    engine.backward(loss)
    engine.step()
    return loss.item()


def main() -> None:
    """Train one step and say so."""
    steps = {"ddp": ddp_step, "deepspeed": deepspeed_step}
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("engine", choices=steps)
    parser.add_argument("--local_rank", help="given by deepspeed's launcher")
    engine = parser.parse_args().engine
    rank, ranks = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    data = torchvision.datasets.FakeData(1000, (3, IMAGE_SIZE, IMAGE_SIZE), CLASSES, transforms.ToTensor())
    images, labels = next(iter(DataLoader(data, BATCH_SIZE, sampler=DistributedSampler(data, ranks, rank))))
    model = torchvision.models.mobilenet_v3_small(num_classes=CLASSES)
    if torch.cuda.is_available():
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
        model, images, labels = model.cuda(), images.cuda(), labels.cuda()
    loss = steps[engine](model, images, labels)
    if rank == 0:
        print(f"first step done by {os.getpid()}, loss {loss:.3f}", flush=True)
    if os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") < os.environ.get("TORCHELASTIC_MAX_RESTARTS", "0"):
        time.sleep(600)  # as if it trained on: it is killed, to see how long a restart takes
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
