#!/usr/bin/env bash
# Train on the GPUs of several machines, listed in a hostfile, over ssh: --help explains.
set -euo pipefail
# shellcheck source-path=SCRIPTDIR source=common.sh
source "$(dirname -- "${BASH_SOURCE[0]}")/common.sh"

hand_over launch.py launch_multi_node.sh "$@"
