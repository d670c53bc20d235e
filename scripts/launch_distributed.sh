#!/usr/bin/env bash
# Train on the GPUs of this machine, or on CPU ranks if it has no GPU; see --help.
set -euo pipefail
# shellcheck source-path=SCRIPTDIR source=common.sh
source "$(dirname -- "${BASH_SOURCE[0]}")/common.sh"

hand_over launch.py launch_distributed.sh "$@"
