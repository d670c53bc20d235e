#!/usr/bin/env bash
# Train over ssh on the GPUs of several machines that a hostfile lists; see --help.
set -euo pipefail
# shellcheck source-path=SCRIPTDIR source=common.sh
source "$(dirname -- "${BASH_SOURCE[0]}")/common.sh"

hand_over launch.py launch_multi_node.sh "$@"
