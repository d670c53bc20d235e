"""The launcher of `run(config, gpus=N)`: as launch/single_node.py, and stops the ranks if the caller dies.

python launch/from_python.py <process id of the caller> mobilenet ddp 2 16 50
"""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from launch.arguments import run_launcher
from launch.single_node import main
from training.base.heartbeat import end_with_parent

if __name__ == "__main__":
    end_with_parent(int(sys.argv.pop(1)))
    run_launcher(main)
