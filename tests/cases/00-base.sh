#!/usr/bin/env bash
# plain folder trains
. "$(dirname -- "${BASH_SOURCE[0]}")/lib.sh"
mk d a b
train --data d --run-name r; tb; [ $rc = 0 ] || bad "$(last)"; ok "$(last)"
