"""Builds the pretended CUDA for the PyTorch that is installed here, once, and says how to run a process with it."""

from __future__ import annotations

import hashlib
import importlib.metadata
import importlib.util
import os
import re
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[3]
SOURCES = Path(__file__).parent / "src"
CACHE = ROOT / ".pytest_cache" / "pretended"
NAME = "libcuda.so.1"  # by this name inside (soname) it is also what `dlopen("libcuda.so.1")` finds

OF_CUDA = re.compile(r"cuda[A-Z]|__cuda|cu[A-Z]|cublas|cudnn|cusparse|cusolver|nccl")
# Calls that only tell versions and texts stay with the real libraries.
REAL = re.compile(r"(nccl|cudnn|cublasLt)Get(Version|CudartVersion|Property|ErrorString|LastError|LastErrorString)")
# A call to a library of mathematics is a kernel, unless its name says that it makes, changes or describes something.
COMPUTES = re.compile(
    r"(cublas|cudnn)(?!.*(Create|Destroy|Set|Get|Find|Desc|Layout|Preference|Algo|Backend))", re.DOTALL
)


class CannotBuildError(Exception):
    """The library cannot be built here; the message says what is missing."""


def build() -> Path:
    """Return the library, compiled if it is not in the cache for this PyTorch and these sources.

    Raises:
        CannotBuildError: without a compiler, a CUDA build of PyTorch or the headers of its CUDA.
    """
    for program in ("g++", "nm"):
        if shutil.which(program) is None:
            raise CannotBuildError(f"no {program} here")
    packages, torch_libraries = _torch()
    sources = sorted(SOURCES.iterdir())
    key = hashlib.sha256(importlib.metadata.version("torch").encode())
    for file in (Path(__file__), *sources):
        key.update(file.read_bytes())
    built = CACHE / key.hexdigest()[:16] / NAME
    if not built.exists():
        built.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=CACHE) as folder:
            table = Path(folder) / "table.cpp"
            table.write_text("\n".join(_table(torch_libraries)))
            made = table.with_name(NAME)
            _compile([*sources, table], made, _header_flags(packages))
            made.replace(built)  # another process may have been as fast
    return built


def environment(library: Path) -> dict[str, str]:
    """Return the variables of a process that is to see pretended GPUs."""
    return {
        "LD_PRELOAD": " ".join(filter(None, (str(library), os.environ.get("LD_PRELOAD")))),
        # cuDNN's newer interface hands graphs to the library, which only the real one understands.
        "TORCH_CUDNN_V8_API_DISABLED": "1",
        "OMP_NUM_THREADS": "1",
        # No program may look for a device beside CUDA's: DeepSpeed does.
        "DS_ACCELERATOR": "cuda",
    }


def _torch() -> tuple[Path, list[Path]]:
    """Return the folder of installed packages and PyTorch's libraries."""
    found = importlib.util.find_spec("torch")
    if found is None or found.origin is None:
        raise CannotBuildError("no torch here")
    folder = Path(found.origin).parent
    libraries = sorted((folder / "lib").glob("*.so"))
    if not any(file.name == "libtorch_cuda.so" for file in libraries):
        raise CannotBuildError("torch is no CUDA build")
    return folder.parent, libraries


def _header_flags(packages: Path) -> list[str]:
    """Return the compiler's flags for the headers in PyTorch's own wheels of CUDA.

    The runtime's headers want crt/host_defines.h, which only triton's wheel brings along; its others must not come
    first.
    """
    folders = sorted(packages.glob("nvidia/cu*/include"))
    last = packages / "triton/backends/nvidia/include"
    for header in ("cuda_runtime_api.h", "cudnn.h", "crt/host_defines.h"):
        if not any((folder / header).exists() for folder in (*folders, last)):
            raise CannotBuildError(f"no {header} among the installed packages")
    return [word for folder in folders for word in ("-I", str(folder))] + ["-idirafter", str(last)]


def _table(libraries: list[Path]) -> Iterator[str]:
    """Yield C++ that defines all that PyTorch imports from CUDA as functions that return 0, which is success.

    They are weak: where the sources have a function of the same name, that one counts.
    """
    yield '#include "shared.h"'
    listing = subprocess.run(
        ["nm", "-D", "--undefined-only", *map(str, libraries)], capture_output=True, text=True, check=True
    ).stdout
    for name in sorted(set(re.findall(r"^ +[Uw] (\w+)", listing, re.MULTILINE))):
        if OF_CUDA.match(name) and not REAL.fullmatch(name):
            body = "{ count_launch(); return 0; }" if COMPUTES.match(name) else "{ return 0; }"
            yield f"API __attribute__((weak)) int {name}() {body}"


def _compile(sources: list[Path], output: Path, header_flags: list[str]) -> None:
    """Compile and link; without warnings, which NVIDIA's headers and the table are full of."""
    flags = ["-std=c++17", "-O1", "-fPIC", "-fvisibility=hidden", "-w", "-I", str(SOURCES), *header_flags]
    files = [str(source) for source in sources if source.suffix == ".cpp"]
    command = ["g++", *flags, "-shared", f"-Wl,-soname,{NAME}", "-o", str(output), *files, "-ldl"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"the pretended CUDA does not compile:\n{done.stderr[-3000:]}")
